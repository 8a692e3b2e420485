"""Promise 4: saved values are those of the moment, parents are what was read."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchlens as tl
from tests.networks import Model
from torchlens._recording.unseen import NoTorchFunction


def log(forward: Callable[..., Any], *inputs: torch.Tensor, **options: Any) -> tl.ModelHistory:
    return tl.log_forward_pass(Model(lambda self, *args: forward(*args)), list(inputs), **options)


def parents(history: tl.ModelHistory, label: str) -> list[str]:
    return [parent.rpartition("_")[0] for parent in history[label].parent_layers]


# -- who reads whom
# --------------------------------------------------------------------------------------------------


def write_to_a_row(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[0].add_(5)
    return y * 2


def write_below_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    v = y.view(-1)
    y.add_(1)
    return v * 2


def write_through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.view(-1).add_(1)
    return y * 2


def write_through_two_views(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.view(-1)[2:4].mul_(3)
    return y - 2


def write_all_rows(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[0].add_(5)
    y[1].sub_(5)
    return y / 2


def write_other_row(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    v = y[0]
    y[1].add_(5)
    return v - 2


def overwritten_write(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[0].add_(5)
    y.zero_()
    return y - 2


def set_row(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[0] = x[1]
    return y - 2


def set_everything(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    v = y.view(-1)
    y[:] = x + 1
    return v - 2


def set_by_mask(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[x > 0] = 0
    return y - 2


def into_out(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(2, 3)
    v = y.view(-1)
    torch.exp(x, out=y)
    return v - 2


def transposed_write(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.t()[0].add_(1)
    return y[:, 1] - 2


def written_twin(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    z = y.detach()
    z += 1
    return y - 2


def copied_row(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(2, 3)
    y[0].copy_(x[0])
    y[1].copy_(x[1])
    return y - 2


def through_data(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.data.add_(1)
    return y - 2


READS = [
    (write_to_a_row, "mul_2", ["mul_1", "add_1"]),
    (write_below_a_view, "mul_2", ["view_1", "add_1"]),
    (write_through_a_view, "mul_2", ["add_1"]),
    (write_through_two_views, "sub_1", ["mul_1", "mul_2"]),
    (write_all_rows, "truediv_1", ["add_1", "sub_1"]),
    (write_other_row, "sub_1", ["getitem_1"]),
    (overwritten_write, "sub_1", ["zero_1"]),
    (set_row, "sub_1", ["setitem_1"]),
    (set_everything, "sub_1", ["view_1", "setitem_1"]),
    (set_by_mask, "sub_1", ["setitem_1"]),
    (into_out, "sub_1", ["view_1", "exp_1"]),
    (transposed_write, "sub_1", ["getitem_2"]),
    (written_twin, "sub_1", ["iadd_1"]),
    (copied_row, "sub_1", ["copy_1", "copy_2"]),
    (through_data, "sub_1", ["add_1"]),
]


@pytest.mark.parametrize("saved", ["all", "none"])
@pytest.mark.parametrize(
    ("forward", "label", "expected"), READS, ids=[row[0].__name__ for row in READS]
)
def test_a_parent_is_an_operation_whose_result_is_read(
    forward: Any, label: str, expected: list[str], saved: str
) -> None:
    history = log(forward, torch.randn(2, 3), layers_to_save=saved)
    assert parents(history, label) == expected


def test_a_model_that_writes_to_its_input_reads_the_writer_from_then_on() -> None:
    x = torch.ones(3)
    history = log(lambda x: x.mul_(2) + x, x)
    assert history["add_1"].parent_layers == ["mul_1_1"]
    assert history["input_1"].tensor_contents.tolist() == [1, 1, 1]
    assert x.tolist() == [2, 2, 2]


def test_several_tensors_written_by_one_call_are_told_apart() -> None:
    def forward(x: torch.Tensor) -> Any:
        a, b = x * 1, x - 1
        view = b.view(-1)
        torch._foreach_add_([a, b], 1.0)
        return view / 3, a

    history = log(forward, torch.rand(3))
    assert parents(history, "truediv_1") == ["view_1", "foreachadd_2"]
    assert parents(history, "output_2") == ["foreachadd_1"]
    assert "foreachadd_1" not in parents(history, "foreachadd_2")


def test_several_tensors_written_by_out_are_told_apart() -> None:
    def forward(x: torch.Tensor) -> Any:
        values, indices = torch.empty(3), torch.empty(3, dtype=torch.int64)
        view = indices.view(-1)
        torch.max(x, 0, out=(values, indices))
        return view + 1, values

    history = log(forward, torch.rand(2, 3))
    assert parents(history, "add_1") == ["view_1", "max_2"]
    assert parents(history, "output_2") == ["max_1"]


def test_the_log_tells_which_argument_each_parent_is() -> None:
    history = log(write_to_a_row, torch.rand(2, 3))
    assert history["mul_2"].parent_layer_arg_locs["args"] == {0: ["mul_1_1", "add_1_3"]}


# -- values of the moment
# ----------------------------------------------------------------------------------------------


def busy(x: torch.Tensor, note: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Writes in many ways; every operation's result is noted, as plain numbers, at once."""
    y = note(x * 1)
    v = note(y.view(-1))
    note(v.add_(1))
    row = note(y[0])
    note(row.mul_(3))
    y += 1
    note(y)
    y[1] = 7
    note(y)
    mask = note(y > 8)
    y[mask] = -1
    note(y)
    t = note(y.t())
    note(t.sub_(0.5))
    out = note(torch.zeros_like(y))
    note(torch.exp(y, out=out))
    note(F.relu(out, inplace=True))
    note(out.data)
    note(out.zero_())
    note(y.expand(2, 2, 3))
    note(y.neg_())
    c = note(torch.cat([y, out]))
    note(c.clamp_(min=0))
    note(x.fill_(4))
    return note(c * 1)


@pytest.mark.parametrize(
    "options", [{}, {"detach_saved_tensors": True}, {"save_function_args": True}]
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_saved_tensor_is_the_value_at_the_moment_its_operation_ended(
    options: dict[str, Any], grad: bool
) -> None:
    notes: list[Any] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        notes.append(tensor.tolist())
        return tensor

    x = torch.randn(2, 3)
    before = x.tolist()
    with torch.set_grad_enabled(grad):
        history = log(lambda x: busy(x, note), x, **options)
    made = [entry for entry in history if not (entry.is_input_layer or entry.is_output_layer)]
    assert [entry.tensor_contents.tolist() for entry in made] == notes
    assert history["input_1"].tensor_contents.tolist() == before


def test_saved_tensors_do_not_change_when_input_output_or_parameters_do() -> None:
    weight = nn.Parameter(torch.ones(3))
    results = []

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        view = x.view(-1)
        results.append(view * self.weight.view(-1))
        return results[0]

    model, x = Model(forward, weight=weight), torch.ones(3)
    history = tl.log_forward_pass(model, x)
    with torch.no_grad():
        x.zero_()
        weight.zero_()
        results[0].zero_()
    for entry in history:
        assert entry.tensor_contents.tolist() == [1, 1, 1], entry


def test_a_saved_tensor_that_was_changed_later_is_an_error_and_never_a_wrong_number() -> None:
    history = log(lambda x: (x * 2) + 1, torch.ones(3))
    history["mul_1"].tensor_contents.zero_()
    with pytest.raises(tl.ValueChangedError, match="mul_1_1"):
        _ = history["mul_1"].tensor_contents


def test_a_tensor_that_was_changed_unseen_is_an_error_too() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        with NoTorchFunction():  # what an extension in C++ does
            y.add_(1)
        return y + 1

    with torch.no_grad():
        history = log(forward, torch.ones(3))
    with pytest.raises(tl.ValueChangedError, match="mul_1_1"):
        _ = history["mul_1"].tensor_contents
    assert history["add_1"].tensor_contents.tolist() == [4, 4, 4]


HANDED_BACK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "by an operation": lambda y: y.contiguous(),
    "by a module": nn.Identity(),
    "by dropout": nn.Dropout().eval(),
    "by none": lambda y: y,
}


@pytest.mark.parametrize("how", HANDED_BACK)
@pytest.mark.parametrize("grad", [False, True])
def test_every_entry_of_a_tensor_that_is_written_keeps_its_value(how: str, grad: bool) -> None:
    hand_back = HANDED_BACK[how]
    parts = {"part": hand_back} if isinstance(hand_back, nn.Module) else {}

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = hand_back(y)
        assert z is y
        z.neg_()
        z = hand_back(z)
        z += 1
        return z * 1

    with torch.set_grad_enabled(grad):
        history = tl.log_forward_pass(Model(forward, **parts), torch.ones(2, requires_grad=True))
    before = [
        entry
        for entry in history
        if entry.layer_type not in ("neg", "iadd", "mul", "input", "output")
    ]
    half = len(before) // 2
    assert [entry.tensor_contents[0].item() for entry in before] == [2] * half + [-2] * half
    assert [
        history[label].tensor_contents[0].item() for label in ("mul_1", "neg_1", "iadd_1", "mul_2")
    ] == [2, -2, -1, -1]
    assert parents(history, "iadd_1") == [
        before[-1].layer_label_no_pass.rpartition("_")[0] if before else "neg_1"
    ]


def test_memory_that_gets_a_view_between_two_writes_is_told_apart() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y += 1  # nothing else looks at it yet
        v = y.view(-1)
        y *= 3  # now v does
        w = v + 0
        del v
        y -= 1
        return w + y

    with torch.no_grad():
        history = log(forward, torch.ones(4))
    found = {
        entry.layer_type: entry.tensor_contents.flatten()[0].item()
        for entry in history
        if entry.layer_type != "add"
    }
    assert found == {"input": 1, "mul": 2, "iadd": 3, "view": 3, "imul": 9, "isub": 8, "output": 17}
    assert parents(history, "add_1") == ["view_1", "imul_1"]
    assert parents(history, "isub_1") == ["imul_1"]
    assert parents(history, "add_2") == ["add_1", "isub_1"]


def test_a_tensor_whose_write_failed_is_not_taken_for_one_that_comes_after_it() -> None:
    taken: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        try:
            y.add_(torch.ones(5))
        except RuntimeError:
            taken.append(id(y))
        try:
            torch.add(torch.ones(2), torch.ones(3))
        except RuntimeError:
            taken.append(0)  # the log remembers the last failure, and what was on the stack then
        del y
        with NoTorchFunction():
            unseen = [torch.zeros(1) for _ in range(100)]  # one of them would get its id
        assert taken[0] not in map(id, unseen)
        return x + unseen[7]

    with torch.no_grad():
        history = log(forward, torch.ones(3))
    assert history["mul_1"].tensor_contents.tolist() == [2, 2, 2]
    assert parents(history, "add_1") == ["input_1"]


def test_a_write_through_numpy_does_not_change_what_was_saved() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.numpy()[:] = 7
        z = x * 3
        np.asarray(z)[:] = 9
        return y + z

    history = log(forward, torch.ones(3))
    assert history["mul_1"].tensor_contents.tolist() == [2, 2, 2]
    assert history["mul_2"].tensor_contents.tolist() == [3, 3, 3]
    assert history["add_1"].tensor_contents.tolist() == [16, 16, 16]


def test_a_cache_written_slot_by_slot_is_read_as_written() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros(4, 2)
        for step in range(3):
            cache[step] = x[step] * 2
        return cache[:2].sum()

    history = log(forward, torch.ones(4, 2))
    assert [history[f"setitem_{n}"].tensor_contents.sum().item() for n in (1, 2, 3)] == [4, 8, 12]
    assert "zeros_1" not in parents(history, "sum_1")


def test_saved_arguments_are_those_of_the_call() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = torch.add(y, 1, alpha=3)
        y.zero_()
        return y + z

    history = log(forward, torch.ones(3), save_function_args=True)
    assert history["add_1"].creation_args[0].tolist() == [2, 2, 2]
    assert history["add_1"].creation_args[1] == 1
    assert history["add_1"].creation_kwargs == {"alpha": 3}
    assert history["zero_1"].creation_args[0].tolist() == [2, 2, 2]
    assert history["add_2"].creation_args[0].tolist() == [0, 0, 0]


def test_complex_views_share_memory_too() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.real.mul_(2)
        return y + 1

    history = log(forward, torch.ones(3, dtype=torch.complex64))
    assert parents(history, "add_1") == ["mul_1", "mul_2"]
    assert history["mul_1"].tensor_contents.tolist() == [1, 1, 1]


def test_a_write_to_a_tensor_given_by_keyword_is_seen() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        view = y.view(-1)
        torch.relu_(input=y)
        return view + 1

    history = log(forward, torch.tensor([-1.0, 1.0]))
    assert history["mul_1"].tensor_contents.tolist() == [-1, 1]
    assert history["relu_1"].tensor_contents.tolist() == [0, 1]
    assert parents(history, "add_1") == ["view_1", "relu_1"]


def test_a_tensor_that_gets_other_memory_was_saved_as_it_was() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.set_(torch.zeros(3))  # type: ignore[call-overload]  # torch's stubs know only storages
        z = x * 3
        z.data = x * 4
        return y + z.resize_(3)

    history = log(forward, torch.ones(3))
    assert history["mul_1"].tensor_contents.tolist() == [2, 2, 2]
    assert history["mul_2"].tensor_contents.tolist() == [3, 3, 3]
    assert history["output_1"].tensor_contents.tolist() == [4, 4, 4]
