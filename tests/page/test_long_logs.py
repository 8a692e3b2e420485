"""The page of a long log carries what can be looked at, says so, and counts everything."""

from functools import partial

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.failures import partial_history
from tests.page.viewer_models import history_of
from tests.work import lines_run
from torchlens._page import parts as parts_of_pages
from torchlens._page.page import explore
from torchlens._page.page_data import page_data


@pytest.fixture
def short(monkeypatch):
    """Logs are long from a thousand operations on, and pages small."""
    monkeypatch.setattr(parts_of_pages, "MOST_OPERATIONS", 1000)
    monkeypatch.setattr(parts_of_pages, "_MOST_PARTS", 60)
    monkeypatch.setattr(parts_of_pages, "_MOST_CARRIED", 60)


class Repeats(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        for _ in range(700):
            x = torch.relu(self.fc(x))
        return x


def test_counts_sizes_and_times_of_a_long_log_are_those_of_all(short, monkeypatch):
    history = history_of("nested_loop")
    data = page_data(history, {}, None)
    assert data["tensors"] == len(history) == 10_002
    left, entries, parts = data["leftOut"], data["entries"], data["parts"]
    assert left["carried"] == len(entries["label"]) < 200
    num_carried = sum(len(own) for own in parts["entries"])
    assert num_carried + sum(left["passes"]) == len(history)
    assert sum(entries["bytes"]) + sum(left["bytes"]) == data["bytes"] == history.tensor_fsize_total
    monkeypatch.setattr(parts_of_pages, "MOST_OPERATIONS", 10**6)
    whole = page_data(history, {}, None)
    assert sum(entries["flops"]) + sum(left["flops"]) == sum(whole["entries"]["flops"])
    assert sum(entries["micros"]) + sum(left["micros"]) == pytest.approx(
        sum(whole["entries"]["micros"]), rel=1e-3
    )


def test_the_page_of_a_long_log_says_what_it_does_not_carry(short, visit, tmp_path):
    explore(history_of("nested_loop"), tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    said = tab.page.locator("#carried").text_content()
    assert "of its 10,002 tensors" in said
    assert "history[" in said
    sealed = tab.run(
        "[...torchlens.scene.nodes.keys()].find(i => torchlens.D.leftOut.part.includes(i))"
    )
    tab.run(f"torchlens.select({sealed})")
    assert "does not carry what is inside" in tab.page.locator("#left-out").text_content()
    before = tab.run("torchlens.shown()")
    tab.run(f"torchlens.toggle({sealed})")
    assert tab.run("torchlens.shown()") == before
    total = tab.run(
        "[...torchlens.scene.nodes.values()].filter(n => !n.isBox).map(n => "
        "torchlens.count(n.id)).reduce((a, b) => a + b)"
    )
    assert total == 10_002


def test_passes_of_a_long_loop_are_the_first_and_the_last_ones(short, visit, tmp_path):
    explore(tl.log_forward_pass(Repeats(), torch.ones(1, 2)), tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    assert "× 700" in tab.node("loop of 2").text_content()
    tab.run(f"torchlens.select({tab.find('fc')})")
    assert "1 / 700" in tab.page.locator("#panel .passes").first.text_content()
    slider = tab.page.locator("#pass")
    slider.fill(slider.get_attribute("max"))
    slider.dispatch_event("change")
    panel = tab.page.locator("#panel").text_content()
    assert "700 / 700" in panel
    assert "linear_1_1:700" in panel
    assert "first and the last passes" in panel


def test_the_failed_operation_of_a_long_log_is_carried(short, visit, tmp_path):
    class Fails(Repeats):
        def forward(self, x):
            for number in range(3000):
                x = torch.sin(x + number)
            return x @ torch.ones(7, 7)

    with pytest.raises(RuntimeError) as caught:
        tl.log_forward_pass(Fails(), torch.ones(1, 2))
    explore(partial_history(caught.value), tmp_path / "page.html")
    assert visit(tmp_path / "page.html").page.locator(".node.k-failed").count() == 1


@pytest.mark.parametrize("calls", [False, True])
def test_twice_the_operations_are_at_most_twice_the_work(calls):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return x + self.b(torch.relu(self.a(x)))

    class Loop(nn.Module):
        def __init__(self, times):
            super().__init__()
            self.block, self.times = Block(), times

        def forward(self, x):
            for number in range(self.times):
                x = self.block(x) if calls else torch.sin(x + number)
            return x

    logs = [tl.get_model_metadata(Loop(times), torch.ones(1, 2)) for times in (200, 400)]
    few, many = (lines_run(partial(page_data, log, {}, None)) for log in logs)
    assert many < 2.3 * few
