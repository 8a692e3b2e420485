"""What printing shows, held in golden files."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.failures import partial_history
from tests.networks import Model, Recurrent, Residual

ROOT = Path(__file__).parents[2]


def settled(text: str) -> str:
    """The text without what differs between runs, machines and releases of torch."""
    text = text.replace("RuntimeError: addmm: mat1", "RuntimeError: mat1")
    text = re.sub(r"Time elapsed: [ \d.E+-]+s", "Time elapsed: <time>", text)
    return re.sub(r"\S*/(\w+\.py):\d+", r"<\1>", text) + "\n"


@pytest.fixture(scope="module")
def alexnet() -> tl.ModelHistory:
    spec = importlib.util.spec_from_file_location("alexnet", ROOT / "examples" / "alexnet.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model = module.AlexNet().eval()
    return tl.log_forward_pass(model, torch.rand(1, 3, 224, 224))


def test_a_history_prints_as_the_classic_one(
    alexnet: tl.ModelHistory, golden: Callable[[str, str], None]
) -> None:
    assert alexnet["output_1"].layer_label == "output_1_23"
    golden("alexnet_history.txt", settled(str(alexnet)))


def test_an_entry_prints_as_the_classic_one(
    alexnet: tl.ModelHistory, golden: Callable[[str, str], None]
) -> None:
    text = settled(str(alexnet["conv2d_3_7"]))
    # The numbers themselves may differ in the last digit between processors.
    golden("alexnet_conv2d_3_7.txt", re.sub(r"-?\d\.\d{4}", "<n>", text).replace(" <n>", "<n>"))


def test_several_passes_show_as_such(golden: Callable[[str, str], None]) -> None:
    history = tl.log_forward_pass(Recurrent(), torch.ones(2, 4))
    assert "linear_1_1:2 (2/4 passes)" in str(history)
    assert str(history["linear_1_1:2"]).startswith(
        "Layer linear_1_1:2 (2/4 passes), operation 5/14:"
    )
    golden("recurrent_history.txt", settled(str(history)))


def test_a_partial_save_shows_what_is_saved(golden: Callable[[str, str], None]) -> None:
    history = tl.log_forward_pass(
        Residual(), torch.ones(2, 4), layers_to_save=["blocks.0", "output.logits"]
    )
    golden("partial_save_history.txt", settled(str(history)))
    assert "(not saved)" in str(history["relu_1"])


def test_a_failed_pass_shows_where_it_got(golden: Callable[[str, str], None]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    with pytest.raises(RuntimeError) as caught:
        tl.log_forward_pass(model, torch.ones(2, 4))
    golden("failed_history.txt", settled(str(partial_history(caught.value))))
    golden("failed_note.txt", settled("\n".join(caught.value.__notes__)))


def test_repr_is_one_line() -> None:
    history = tl.log_forward_pass(Residual(), torch.ones(2, 4))
    assert repr(history).startswith("<ModelHistory of Residual: 13 layers")
    assert repr(history["add_1"]) == "<LayerEntry add_1_3>"
    assert "\n" not in repr(history)


@torch.no_grad()
def test_a_very_long_list_of_layers_is_printed_by_its_ends() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x + 1
        return x

    short = tl.get_model_metadata(Model(forward, times=9_998), torch.ones(1))
    assert str(short) == short.to_text()
    long = tl.get_model_metadata(Model(forward, times=12_000), torch.ones(1))
    lines = str(long).split("\n")
    assert lines[-501].strip() == "... 11,002 more: print(history.to_text())"
    assert lines[-1].endswith("12001: output_1_2")
    whole = long.to_text().split("\n")
    assert whole[: len(lines) - 501] == lines[:-501]
    assert whole[-500:] == lines[-500:]
    assert len(whole) == len(lines) + 11_001


def test_modules_that_call_each_other_are_listed_once() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, others: list[nn.Module]) -> torch.Tensor:
            x = self.fc(x)
            for other in others:
                x = other(x, [])
            return x

    class EachCallsEach(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Part() for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x, [other for other in self.parts if other is not part])
            return x

    text = str(tl.log_forward_pass(EachCallsEach(), torch.rand(1, 2)))
    hierarchy = text[text.index("Module Hierarchy") : text.index("Layers:")]
    assert [hierarchy.count(f"parts.{number}:") for number in range(6)] == [1] * 6
