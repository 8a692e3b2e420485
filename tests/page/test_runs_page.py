"""The page of runs, in a browser: as one file, and live from a server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torchlens as tl


def train(folder: Path, num_steps: int = 12, dies_at: int = -1, **options) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU()),
        nn.Sequential(nn.Linear(16, 16), nn.ReLU()),
        nn.Linear(16, 3),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tl.monitor(model, folder, **options) as run:
        for step in range(num_steps):
            if step == dies_at:
                with torch.no_grad():
                    model[1][0].bias.fill_(-100.0)
            loss = model(torch.randn(96, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss, rate=0.05)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "dying", dies_at=6)
    train(folder / "well", num_steps=8)
    tl.open_run(folder / "dying").explore(
        folder / "run.html", compare=[folder / "well"], title="two runs"
    )
    return folder


@pytest.fixture
def opened(visit, runs):
    def opened(path: Path | None = None, **options):
        tab = visit(path or runs / "run.html", **options)
        tab.until("window.torchlens && torchlens.isReady === true")
        return tab

    return opened


def settled(tab) -> None:
    frame = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))"
    tab.run(f"(async () => {{ do await {frame}; while (torchlens.isShowing); }})()")


def text(tab, selector: str) -> str:
    return tab.run(f"document.querySelector({json.dumps(selector)}).innerText")


def inked(tab, selector: str) -> int:
    """How many pixels of a canvas are not empty."""
    return tab.run(
        f"(() => {{ const c = document.querySelector({json.dumps(selector)}), d = "
        "c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; let n = 0; "
        "for (let i = 3; i < d.length; i += 4) if (d[i]) n++; return n; })()"
    )


def test_the_file_shows_curves_of_both_runs_and_asks_nobody(opened) -> None:
    tab = opened()
    assert text(tab, "#name") == "two runs"
    assert tab.run(
        "[...document.querySelectorAll('.chip')].map(chip => chip.innerText.trim())"
    ) == ["dying", "well"]
    assert tab.run(
        "[...document.querySelectorAll('#panel h3')].map(h => h.firstChild.textContent)"
    ) == ["loss", "rate"]
    assert inked(tab, "#panel canvas") > 500
    assert "finished" in text(tab, "#status")


def test_the_graph_has_the_colours_of_the_chosen_step(opened, runs) -> None:
    reader = tl.open_run(runs / "dying")
    tab = opened()
    tab.page.select_option("#by", "outputs/zero")
    shown = (
        "(() => { const g = torchlens.graphs.get(torchlens.active); return "
        "g.shown.get(g.partsOf.get('1.1')[0]); })()"
    )
    tab.until(
        "torchlens.statistic === 'zero' && document.getElementById('by').value === 'outputs/zero'"
    )
    for step in (2, 11):
        tab.run(f"torchlens.goToStep({step})")
        settled(tab)
        own = reader["1.1"].outputs
        expected = float(own.zero[own.steps.tolist().index(step)])
        assert tab.run(shown) == pytest.approx(expected, abs=0.005)
    assert expected == 1.0
    assert text(tab, "#step").startswith("step 11")


def test_every_kind_of_series_has_its_histograms(opened) -> None:
    tab = opened()
    tab.run("torchlens.goToModule('1.0')")
    tab.until("document.querySelectorAll('#panel .chart').length > 0")
    tab.until("[...document.querySelectorAll('#panel h3')].length === 9")
    headings = tab.run(
        "[...document.querySelectorAll('#panel h3')].map(h => h.firstChild.textContent)"
    )
    assert headings == [
        "Outputs", "Inputs", "Gradients of outputs", "Parameters · weight", "Parameters · bias",
        "Gradients of parameters · weight", "Gradients of parameters · bias", "Updates · weight",
        "Updates · bias",
    ]  # fmt: skip
    settled(tab)
    assert inked(tab, "#panel .chart canvas") > 500
    for key, value in (("shape", "ridge"), ("axis", "log"), ("shape", "heat")):
        tab.run(f"torchlens.setLook('{key}', '{value}')")
        settled(tab)
        assert inked(tab, "#panel .chart canvas") > 500


def test_a_finding_leads_to_its_step_and_module(opened, runs) -> None:
    found = next(each for each in tl.open_run(runs / "dying").findings if each.kind == "dead units")
    assert found.module == "1.1"
    tab = opened()
    tab.page.click("#tab-findings")
    tab.page.locator("#findings .found", has_text="dead units").first.click()
    tab.until(
        "document.querySelector('#panel h2') && document.querySelector('#panel h2').innerText === "
        "'1.1'"
    )
    assert tab.run("[torchlens.module, torchlens.step]") == ["1.1", found.step]
    tab.until("torchlens.graphs.get(torchlens.active).page.state.selected > 0")
    marks = (
        "[...document.querySelector('.pane').shadowRoot.querySelectorAll('.mark .tag')].map(tag "
        "=> tag.textContent)"
    )
    tab.until(f"{marks}.some(text => text.includes('dead units'))")


def test_all_modules_over_all_steps_side_by_side(opened) -> None:
    tab = opened()
    tab.page.click("#view-modules")
    tab.until("document.querySelectorAll('.matrix canvas').length === 2")
    settled(tab)
    assert inked(tab, ".matrix canvas") > 5000
    widths = tab.run(
        "[...document.querySelectorAll('.matrix canvas')].map(c => [c.width, c.clientWidth])"
    )
    assert all(drawn == shown for drawn, shown in widths)  # none is squeezed
    box = tab.page.locator(".matrix canvas").first.bounding_box()
    tab.page.mouse.click(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.5)
    tab.until("torchlens.module !== null && torchlens.tab === 'module'")
    tab.page.locator(".chip input").nth(1).uncheck()
    tab.until("document.querySelectorAll('.matrix canvas').length === 1")


def test_what_is_chosen_while_the_page_is_at_work_is_what_it_shows_at_last(opened) -> None:
    tab = opened()
    tab.run(
        "(async () => { const name = [...torchlens.active.modules.keys()]; "
        "const click = id => document.getElementById(id).click(); "
        "for (let k = 0; k < 40; k++) { "
        "[() => click('view-modules'), () => torchlens.goToModule(name[k % name.length]), () => "
        "click('view-graph'), "
        "() => click('tab-findings'), () => click('view-beside')][k % 5](); "
        "for (let turns = k % 4; turns; turns--) await new Promise(done => setTimeout(done)); } "
        "click('view-modules'); click('tab-scalars'); })()"
    )
    settled(tab)
    shown = "id => !document.getElementById(id).hidden"
    assert tab.run(f"['panes', 'matrices'].map({shown})") == [False, True]
    assert tab.run(
        "[...document.querySelectorAll('#panel h3')].map(h => h.firstChild.textContent)"
    ) == ["loss", "rate"]
    assert inked(tab, ".matrix canvas") > 500
    assert inked(tab, "#panel canvas") > 500


def test_in_all_modules_the_line_of_the_step_ends_with_the_modules(opened) -> None:
    tab = opened()
    tab.page.click("#view-modules")
    tab.until("document.querySelectorAll('.matrix canvas').length > 0")
    settled(tab)
    bottoms = (
        "(() => ['.matrix .cursor', '.matrix canvas'].map(s => "
        "document.querySelector(s).getBoundingClientRect().bottom))()"
    )
    line, canvas = tab.run(bottoms)
    assert canvas - 20 < line < canvas


def test_the_graphs_of_two_runs_side_by_side_have_one_scale_one_step_and_one_selection(
    opened, runs
) -> None:
    tab = opened()
    tab.page.select_option("#by", "outputs/zero")
    tab.page.click("#view-beside")
    tab.until("document.querySelectorAll('#panes .pane').length === 2")
    tab.run("torchlens.goToStep(4)")
    settled(tab)
    titles = (
        "[...document.querySelectorAll('#panes .whose')].filter(t => !t.hidden).map(t => "
        "t.innerText)"
    )
    assert tab.run(titles) == ["dying", "well"]
    shown = "[...torchlens.graphs.values()].map(g => g.shown.get(g.partsOf.get('1.1')[0]))"
    for name, value in zip(("dying", "well"), tab.run(shown), strict=True):
        own = tl.open_run(runs / name)["1.1"].outputs
        assert value == pytest.approx(float(own.zero[own.steps.tolist().index(4)]), abs=0.005)
    boxes = tab.run(
        "[...document.querySelectorAll('#panes .pane')].map(p => "
        "p.getBoundingClientRect().toJSON())"
    )
    assert boxes[0]["right"] <= boxes[1]["left"]
    assert boxes[0]["width"] == pytest.approx(boxes[1]["width"], abs=3)
    places = "[...torchlens.graphs.values()].map(g => g.page.screen(g.partsOf.get('1')[0]))"
    for box, place in zip(
        boxes, tab.run(places), strict=True
    ):  # a graph is moved into the place that it has now
        assert box["left"] <= place["x"]
        assert place["x"] + place["w"] <= box["right"]
    selected = "[...torchlens.graphs.values()].map(g => g.addressOf(g.page.state.selected))"
    tab.run(
        "[...torchlens.graphs.values()][1].page.select([...torchlens.graphs.values()][1].partsOf.get('1.0')[0], {})"
    )
    tab.until(f'JSON.stringify({selected}) === \'["1.0","1.0"]\'')
    tab.until(
        "document.querySelector('#panel h2') && document.querySelector('#panel h2').innerText === "
        "'1.0'"
    )
    tab.page.locator(".chip input").nth(1).uncheck()
    tab.until("document.querySelectorAll('#panes .pane').length === 1")
    tab.page.locator(".chip input").nth(1).check()
    tab.until("document.querySelectorAll('#panes .pane').length === 2")
    tab.page.click("#view-graph")
    tab.until("document.querySelectorAll('#panes .pane').length === 1")
    assert tab.run(titles) == []


def test_what_is_not_finite_is_painted_and_told_from_what_was_not_recorded(
    opened, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tl.monitor(model, tmp_path / "run"):
        for step in range(4):
            if step == 2:
                with torch.no_grad():
                    model[1].bias.fill_(torch.nan)
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    tl.open_run(tmp_path / "run").explore(tmp_path / "run.html")
    tab = opened(tmp_path / "run.html")
    at = (
        "(a => { const [g] = torchlens.graphs.values(); return "
        "String(g.shown.get(g.partsOf.get(a)[0])); })"
    )
    tab.run("torchlens.goToStep(2)")
    settled(tab)
    assert tab.run(at + "('1')") == "Infinity"
    assert float(tab.run(at + "('0')")) > 0
    said = "[...torchlens.graphs.values()][0].host.shadowRoot.querySelector('svg').textContent"
    assert "not finite" in tab.run(said)
    legend = "[...torchlens.graphs.values()][0].host.shadowRoot.querySelector('#legend').innerText"
    assert "not finite" in tab.run(legend)
    tab.run("torchlens.goToStep(1)")
    settled(tab)
    assert "not finite" not in tab.run(said)
    assert "not finite" not in tab.run(legend)
    tab.page.click("#view-modules")
    tab.until("document.querySelector('#scale-legend').innerText.includes('not finite')")


def test_on_a_phone_graphs_stand_one_below_the_other(opened) -> None:
    tab = opened(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    tab.page.click("#view-beside")
    tab.until("document.querySelectorAll('#panes .pane').length === 2")
    boxes = tab.run(
        "[...document.querySelectorAll('#panes .pane')].map(p => "
        "p.getBoundingClientRect().toJSON())"
    )
    assert boxes[0]["bottom"] <= boxes[1]["top"]
    assert min(box["height"] for box in boxes) > 100
    assert tab.run("document.documentElement.scrollWidth") <= 390


def test_a_run_alone_has_nobody_beside_it(opened, runs, tmp_path: Path) -> None:
    tl.open_run(runs / "well").explore(tmp_path / "one.html")
    assert opened(tmp_path / "one.html").run("document.getElementById('view-beside').hidden")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_graph_and_sheet(opened, scheme: str) -> None:
    tab = opened(
        viewport={"width": 390, "height": 844}, color_scheme=scheme, has_touch=True, is_mobile=True
    )
    assert tab.run("document.documentElement.scrollWidth") <= 390
    tab.page.click("#tab-module")
    tab.until("document.getElementById('side').dataset.size === 'half'")
    assert tab.run("document.getElementById('time').getBoundingClientRect().width") > 100


def test_a_graph_of_modules_alone(opened, tmp_path: Path) -> None:
    train(tmp_path / "plain", 2, graph="modules")
    tl.open_run(tmp_path / "plain").explore(tmp_path / "plain.html")
    tab = opened(tmp_path / "plain.html")
    tab.until("torchlens.graphs.get(torchlens.active).page !== undefined")
    assert tab.run("[...torchlens.graphs.get(torchlens.active).partsOf.keys()]") == [
        "0",
        "0.0",
        "0.1",
        "1",
        "1.0",
        "1.1",
        "2",
    ]
    links = "torchlens.graphs.get(torchlens.active).data.links"
    assert tab.run(f"{links}.from.length") == 6  # with those of the input and the output


def test_in_a_notebook_the_page_is_shown_in_a_frame(browser, runs) -> None:
    shown = tl.open_run(runs / "dying").explore(None)._repr_html_()
    page = browser.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.set_content(f"<body>{shown}</body>")
    frame = page.frames[-1]
    for _ in range(3000):
        if frame.evaluate("Boolean(window.torchlens && torchlens.isReady)"):
            break
        page.wait_for_timeout(20)
    assert frame.evaluate("document.querySelectorAll('#panel canvas').length") == 2
    assert complaints == []
    page.close()


def test_a_change_in_the_folder_comes_onto_the_screen(browser, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    command = [sys.executable, "-m", "torchlens", "serve", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "no run yet" in process.stdout.readline()
            page = browser.new_page()
            complaints: list[str] = []
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(process.stdout.readline().strip())

            def until(fact: str) -> None:
                for _ in range(6000):
                    if page.evaluate(fact):
                        return
                    page.wait_for_timeout(20)
                raise AssertionError(f"never came true: {fact}; {complaints}")

            until("!document.getElementById('empty').hidden")
            train(folder / "a", 3)
            until("window.torchlens.active && torchlens.active.count === 3 && torchlens.step === 2")
            until(
                "torchlens.graphs.get(torchlens.active) && "
                "torchlens.graphs.get(torchlens.active).page !== undefined"
            )
            train(folder / "a", 2)
            until(
                "torchlens.active.count === 5 && document.getElementById('step').innerText === "
                "'step 4'"
            )
            rows = "[...torchlens.active.tables.get('outputs/rms').value.rows.values()]"
            until(f"!torchlens.isShowing && {rows}[0].length === 5")
            recorded = tl.open_run(folder / "a")
            for module in recorded.modules:
                number = f"torchlens.active.modules.get('{module}').outputs[0].number"
                shown = page.evaluate(
                    f"[...torchlens.active.tables.get('outputs/rms').value.rows.get({number})]"
                )
                assert shown == pytest.approx(recorded[module].outputs.rms.tolist(), rel=2**-7)
            # A step more is written behind the others: what was there is not copied.
            page.evaluate(f"window.before = {rows}")
            train(folder / "a", 1)
            until(f"!torchlens.isShowing && {rows}[0].length === 6")
            assert page.evaluate(f"{rows}.every((row, k) => row.buffer === before[k].buffer)")
            train(folder / "b", 2)
            until("document.querySelectorAll('.chip').length === 2")
            assert complaints == []
            page.close()
        finally:
            process.terminate()
            process.wait()
