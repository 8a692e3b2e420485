"""Overlays of what a profile and a backward pass told."""

import torch

import torchlens as tl
from tests.networks import MLP
from torchlens.history.overlay import Overlay
from torchlens.viewer import explore


def test_an_overlay_shows_its_unit_and_what_was_measured_of_a_module(visit, tmp_path):
    history = tl.get_model_metadata(MLP(), torch.rand(2, 4))
    values = Overlay({"": 0.01, "fc1": 0.002, "fc2": 0.004}, title="time", unit="seconds", is_sum=True, own={"": 0.003})
    explore(history, tmp_path / "page.html", overlays={"forward": values})
    tab = visit(tmp_path / "page.html")
    tab.page.locator("#overlay").select_option("forward")
    legend = tab.page.locator("#legend").text_content()
    assert legend == "forward, sum of what is inside2 ms4 ms"
    assert "4 ms" in tab.node("fc2").text_content()
    tab.click("fc2")
    assert "forward4 ms" in tab.page.locator("#panel").text_content()


def test_a_logged_backward_pass_can_be_coloured_by(visit, tmp_path):
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4), save_gradients=True)
    history["output_1"].tensor_contents.sum().backward()
    explore(history, tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    for name in ("backward time", "gradient norm"):
        tab.page.locator("#overlay").select_option(name)
        assert tab.page.locator("#legend").text_content().startswith(name)
    tab.click("fc1")
    assert "Backward" in tab.page.locator("#panel").text_content()


def test_without_a_backward_pass_there_is_nothing_of_it(visit, tmp_path):
    explore(tl.get_model_metadata(MLP(), torch.rand(2, 4)), tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    names = tab.run("[...document.getElementById('overlay').options].map(o => o.value)")
    assert names == ["", "time", "memory", "FLOPs"]
