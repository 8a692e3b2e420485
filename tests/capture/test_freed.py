"""Promise 6: `del history` gives its memory back without the garbage collector."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.failures import partial_history
from tests.networks import ConvNet, Model, Recurrent


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def watch(history: tl.ModelHistory) -> list[weakref.ref[Any]]:
    tensors = [entry.tensor_contents for entry in history]
    return [
        weakref.ref(history),
        weakref.ref(history._log),
        *(weakref.ref(t) for t in tensors if t is not None),
    ]


def alive(references: list[weakref.ref[Any]]) -> int:
    return sum(reference() is not None for reference in references)


OPTIONS: list[dict[str, Any]] = [
    {}, {"save_function_args": True}, {"save_gradients": True}, {"layers_to_save": "relu"},
    {"layers_to_save": "conv"},
    {"detach_saved_tensors": True}, {"activation_postfunc": lambda t: t.float().mean()},
    {"keep_unsaved_layers": False},
    {"mark_input_output_distances": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_del_frees_everything(options: dict[str, Any]) -> None:
    history = tl.log_forward_pass(ConvNet(), torch.rand(2, 3, 8, 8), **options)
    references = watch(history)
    str(history), history.to_pandas(), history["conv"].lookup_keys, history.layer_list
    assert alive(references) == len(references)
    del history
    assert alive(references) == 0


def test_del_frees_everything_after_backward() -> None:
    history = tl.log_forward_pass(
        Recurrent(), torch.rand(2, 4, requires_grad=True), save_gradients=True
    )
    history["output_1"].tensor_contents.sum().backward()
    references = watch(history)
    references += [weakref.ref(entry.grad_contents) for entry in history if entry.has_saved_grad]
    assert len(references) > 20
    del history
    assert alive(references) == 0


def test_del_frees_gradients_while_the_loss_lives_on() -> None:
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4), save_gradients=True)
    loss = history["output_1"].tensor_contents.sum()
    loss.backward()
    gradient = weakref.ref(history["linear_1:1"].grad_contents)
    del history
    assert gradient() is None
    assert loss.requires_grad


def test_an_entry_that_is_kept_keeps_its_value() -> None:
    entry = tl.log_forward_pass(ConvNet(), torch.rand(2, 3, 8, 8))["conv"]
    assert entry.tensor_contents is not None


def test_a_new_run_frees_the_old_values() -> None:
    model = Recurrent()
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    references = watch(history)[2:]
    history.save_new_activations(model, torch.rand(2, 4))
    assert alive(references) == 0


def test_cleanup_frees_the_values_and_keeps_the_rest() -> None:
    history = tl.log_forward_pass(
        Recurrent(), torch.rand(2, 4), save_gradients=True, save_function_args=True
    )
    history["output_1"].tensor_contents.sum().backward()
    entry = history["linear_1:1"]
    references = watch(history)[2:]
    history.cleanup()
    assert alive(references) == 0
    assert entry.tensor_contents is None
    assert entry.grad_contents is None
    assert entry.creation_args is None
    assert not entry.has_saved_activations
    assert entry.tensor_shape == (2, 4)
    assert history.num_tensors_saved == 0
    assert history.layer_labels[0] == "input_1_0"


@pytest.mark.parametrize("is_deep", [False, True])
def test_a_partial_history_is_freed_with_its_exception(is_deep: bool) -> None:
    references: list[weakref.ref[Any]] = []

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        references.append(weakref.ref(y))
        return self.bad(y) if is_deep else y @ y

    model = Model(forward, fc=nn.Linear(4, 4), bad=nn.Sequential(nn.Sequential(nn.Linear(5, 5))))
    try:
        tl.log_forward_pass(model, torch.rand(2, 4))
    except RuntimeError as error:
        history = partial_history(error)
    references += watch(history)
    assert alive(references) == len(references)
    del history
    assert alive(references) == 0


def test_nothing_is_left_of_a_failed_log_that_nobody_keeps() -> None:
    references: list[weakref.ref[Any]] = []

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        references.append(weakref.ref(x * 2))
        y = x * 3
        references.append(weakref.ref(y))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        tl.log_forward_pass(Model(forward), torch.rand(2, 4))
    del caught
    assert alive(references) == 0


def test_get_model_metadata_holds_no_activation() -> None:
    references: list[weakref.ref[Any]] = []

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        references.append(weakref.ref(y))
        return y + 1

    history = tl.get_model_metadata(Model(forward), torch.rand(2, 4))
    assert alive(references) == 0
    assert len(history) == 4


@pytest.mark.slow
def test_a_very_deep_graph_is_freed_without_overflowing_the_stack() -> None:
    """In a process of its own: torch would crash it."""
    code = """
import torch, torchlens as tl
class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
    def forward(self, x):
        for _ in range(20_000):
            x = self.fc(x) + 1
        return x
history = tl.get_model_metadata(Deep(), torch.rand(2, 4))
print(history.num_operations)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "40000\n"), done.stderr
