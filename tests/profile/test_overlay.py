"""What was measured, laid over drawings and over the page."""

from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import Model, Recurrent
from tests.profile.profile_records import made_up, module, operations
from torchlens._draw.draw_options import DrawOptions
from torchlens._draw.drawing import make_drawing
from torchlens._history.overlay import Overlay
from torchlens._page.page_data import page_data
from torchlens._profile.quantities import overlay


def net() -> nn.Module:
    """A model that does what the made-up profile says."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x).flatten(1)) + 1

    stem = nn.Sequential()
    stem.add_module("conv", nn.Conv2d(3, 8, 3, padding=1))
    stem.add_module("act", nn.ReLU())
    return Model(forward, stem=stem, head=nn.Linear(2048, 10))


def lines_of(history: Any, values: Any, **options: Any) -> dict[str, str]:
    """What each coloured node says of its value."""
    scene = make_drawing(history, DrawOptions(vis_color_by=values, **options)).scene
    assert scene.legend is not None
    title = f"{scene.legend.title}: "
    return {
        node.title: line.removeprefix(title)
        for node in scene.nodes
        for line in node.lines
        if line.startswith(title)
    }


def test_a_module_profile_has_a_number_for_each_module():
    found = overlay(made_up(), "forward_time")
    assert found["stem.conv"] == pytest.approx(0.0075)
    assert found["stem.act:2"] == pytest.approx(0.75e-3 * 1.25)
    assert "spare" not in found
    assert found.own["stem"] == pytest.approx(0.5e-3 * 1.25)


def test_an_operation_profile_has_one_for_each_layer_too():
    found = overlay(made_up(level="operation", operations=operations()), "backward_time")
    assert found["conv2d_1_1"] == pytest.approx(2 * 6e-3 * 1.25)
    assert found["stem"] == pytest.approx(15e-3 * 1.25)


def test_nodes_of_a_drawing_have_the_time_of_their_module_or_its_own_time():
    history = tl.get_model_metadata(net(), torch.rand(2, 3, 16, 16))
    values = overlay(made_up(), "forward_time")
    assert lines_of(history, values) == {
        "conv2d_1_1": "7.50 ms",
        "relu_1_2": "938 µs",
        "flatten_1_3": "1.25 ms",  # with the addition, all that the model does outside its modules
        "linear_1_4": "625 µs",
        "add_1_5": "1.25 ms",
    }


def test_a_collapsed_module_has_its_measured_span():
    history = tl.get_model_metadata(net(), torch.rand(2, 3, 16, 16))
    drawn = lines_of(history, overlay(made_up(), "forward_time"), vis_nesting_depth=1)
    assert drawn["@stem"] == "10.0 ms"
    with_layers = overlay(made_up(level="operation", operations=operations()), "forward_time")
    assert lines_of(history, with_layers, vis_nesting_depth=1)["@stem"] == "10.0 ms"


def test_a_layer_of_its_own_comes_before_its_module():
    history = tl.get_model_metadata(net(), torch.rand(2, 3, 16, 16))
    values = overlay(made_up(level="operation", operations=operations()), "forward_time")
    assert lines_of(history, values)["relu_1_2"] == "625 µs"


def test_passes_add_up_where_they_are_drawn_as_one():
    history = tl.get_model_metadata(Recurrent(), torch.ones(2, 4))
    values = Overlay(
        {f"fc:{n}": n / 1000 for n in range(1, 5)}, title="time", unit="seconds", is_sum=True
    )
    assert lines_of(history, values, vis_opt="unrolled")["linear_1_1:3"] == "3.00 ms"
    assert lines_of(history, values, vis_opt="rolled")["linear_1_1 (x4)"] == "10.0 ms"
    means = Overlay({f"fc:{n}": float(n) for n in range(1, 5)}, title="mean")
    assert lines_of(history, means, vis_opt="rolled")["linear_1_1 (x4)"] == "2.5"


def test_a_dict_may_name_modules():
    history = tl.get_model_metadata(net(), torch.rand(2, 3, 16, 16))
    assert lines_of(history, {"stem": 2.0, "linear_1_4": 3.0}) == {
        "conv2d_1_1": "2",
        "relu_1_2": "2",
        "linear_1_4": "3",
    }


def test_units_are_written_for_people():
    history = tl.get_model_metadata(net(), torch.rand(2, 3, 16, 16))
    assert lines_of(history, overlay(made_up(), "peak_bytes"))["conv2d_1_1"] == "80.0 KB"
    assert lines_of(history, overlay(made_up(), "flops"))["linear_1_4"] == "200 kFLOP"


def test_the_page_shows_the_same_overlay_as_the_drawing():
    history = tl.get_model_metadata(net(), torch.rand(2, 3, 16, 16))
    data = page_data(history, {"forward": overlay(made_up(), "forward_time")}, None)
    (marks,) = data["overlays"]
    titles = [data["strings"][title] for title in data["parts"]["title"]]
    shown = {
        titles[part]: value for part, value in zip(marks["parts"], marks["values"], strict=True)
    }
    assert (marks["unit"], marks["isSum"]) == ("seconds", True)
    assert shown["Model"] == pytest.approx(0.0125)
    assert shown["stem"] == pytest.approx(0.01)
    assert shown["stem.conv"] == pytest.approx(0.0075)
    assert shown["add_1_5"] == pytest.approx(0.00125)
    assert "input.inputs.0" not in shown


@pytest.mark.parametrize("level", ["module", "operation"])
def test_a_model_without_modules_inside_has_an_overlay_too(level: Any):
    p = tl.profile(nn.Linear(3, 4), torch.rand(2, 3), level=level, warmup=0, repeats=1)
    history = tl.get_model_metadata(nn.Linear(3, 4), torch.rand(2, 3))
    assert p.overlay("parameters") == {"": 16}
    assert lines_of(history, p.overlay("flops")) == {"linear_1_1": "48 FLOP"}
    assert set(lines_of(history, p.overlay("forward_time"))) == {"linear_1_1"}


def test_an_overlay_of_another_model_is_refused():
    history = tl.get_model_metadata(Recurrent(), torch.ones(2, 4))
    strange = Overlay({"stem": 1.0}, title="time")
    with pytest.raises(ValueError, match="Was it made from another model"):
        lines_of(history, strange)


def test_an_overlay_of_a_quantity_that_was_not_measured_is_refused():
    with pytest.raises(ValueError, match="must be 'forward_time', "):
        overlay(made_up(), "speed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"has no backward time\. The model was not called"):
        overlay(made_up(root=module("", "Net", [], []), steps=[]), "backward_time")


# -- what a logged backward pass tells
# -------------------------------------------------------------------------------------


def test_nodes_are_coloured_by_the_backward_pass():
    history = tl.log_forward_pass(net(), torch.rand(2, 3, 16, 16), save_gradients=True)
    history["output_1"].tensor_contents.sum().backward()
    assert set(lines_of(history, "backward_time")) >= {"conv2d_1_1", "linear_1_4"}
    norm = history["linear_1"].grad_contents.norm()
    assert lines_of(history, "gradient_norm")["linear_1_4"] == f"{norm:.3g}"


def test_without_a_backward_pass_nothing_is_coloured_by_it():
    history = tl.get_model_metadata(net(), torch.rand(2, 3, 16, 16))
    scene = make_drawing(history, DrawOptions(vis_color_by="backward_time")).scene
    assert scene.legend is None


@pytest.mark.parametrize("level", ["module", "operation"])
@pytest.mark.parametrize(
    "quantity",
    ["forward_time", "backward_time", "flops", "parameters", "peak_bytes", "saved_bytes"],
)
def test_a_real_measurement_is_an_overlay_of_a_log(level: Any, quantity: Any):
    model, x = net(), torch.rand(2, 3, 16, 16)
    p = tl.profile(model, x, level=level, warmup=0, repeats=1)
    history = tl.get_model_metadata(model, x)
    values = p.overlay(quantity)
    assert {"conv2d_1_1", "linear_1_4"} <= set(lines_of(history, values))
    assert page_data(history, {quantity: values}, None)["overlays"][0]["values"]
