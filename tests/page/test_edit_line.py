"""The panel writes the line of Python that edits what is selected."""

from typing import Any

import torch

import torchlens as tl
from tests.networks import MLP
from torchlens import edits
from torchlens._page.page import explore


def test_the_line_of_a_chosen_edit_runs_and_is_copied(visit, tmp_path):
    model, x = MLP(), torch.rand(2, 4)
    history, other = tl.log_forward_pass(model, x), tl.log_forward_pass(model, x + 1)
    explore(history, tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    names: dict[str, Any] = {
        "torchlens": tl,
        "history": history,
        "model": model,
        "x": x,
        "other": other,
    }
    names |= {"direction": torch.ones(()), "module": torch.nn.Identity()}
    tab.click("fc2")
    line = tab.page.locator("#edit-line")
    label = history["fc2"].layer_label
    assert line.text_content() == f'new = history.replay({{"{label}": 0.0}})'
    choose, how = (
        tab.page.get_by_label("Edit", exact=True),
        tab.page.get_by_label("How", exact=True),
    )
    count = choose.locator("option").count()
    assert count == 8
    how.select_option("run the model again")
    for number in range(count):
        choose.select_option(index=number)
        exec(str(line.text_content()), names)
        assert names["new"].edited_layers == [label]
    how.select_option("in every call of a block")
    choose.select_option("set to zero")
    assert line.text_content() == f'with torchlens.edit(model, {{"{label}": 0.0}}, history):'
    exec(f"{line.text_content()}\n    new = model(x)", names)
    assert torch.equal(names["new"], history.rerun(model, x, edits={"fc2": 0.0}).output)
    tab.page.locator("#edit-copy").click()
    tab.until("['Copied', 'Selected'].includes(document.getElementById('edit-copy').textContent)")
    tab.click("fc1")  # the choices stay
    label = history["fc1"].layer_label
    assert line.text_content() == f'with torchlens.edit(model, {{"{label}": 0.0}}, history):'
    assert tab.complaints == []


def test_a_module_is_named_by_its_address(visit, tmp_path):
    history = tl.log_forward_pass(torch.nn.Sequential(MLP(), torch.nn.Tanh()), torch.rand(2, 4))
    explore(history, tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    tab.click("0")
    assert tab.page.locator("#edit-line").text_content() == 'new = history.replay({"0": 0.0})'


def test_an_output_has_no_line_and_a_sweep_colours_the_page(visit, tmp_path):
    model, x = MLP(), torch.rand(2, 4)
    history = tl.log_forward_pass(model, x)
    sweep = history.sweep(["fc1", "fc2"], 0.0)
    explore(history, tmp_path / "page.html", overlays={"effect": edits.overlay(sweep)})
    tab = visit(tmp_path / "page.html")
    tab.page.locator("#overlay").select_option("effect")
    assert tab.page.locator("#legend").text_content().startswith("effect")
    tab.click("output")
    assert tab.page.locator("#edit-line").count() == 0
