"""Writes to parts of tensors, with views alive: saved values stay right, and no more is copied or
compared than must be.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from tests.graph.byte_exact import bytes_of, random_view
from tests.sampling import first
from torchlens._capture.memory import aliases
from torchlens._capture.memory.aliases import Aliases
from torchlens._recording.regions import region_of
from torchlens._recording.unseen import NoTorchFunction


class Runs(nn.Module):
    """A model that runs a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def log(function: Callable[..., Any], *shape: int, **options: Any) -> tl.ModelHistory:
    return tl.log_forward_pass(Runs(function), torch.rand(*shape), **options)


def num_bytes_held(history: tl.ModelHistory) -> int:
    """The memory of all saved tensors, that which they share counted once."""
    storages = [entry.tensor_contents.untyped_storage() for entry in history]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# -- which values a write changes
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("few", [0, 12])
@pytest.mark.parametrize("start", range(0, 80, 20))
def test_a_write_takes_every_alias_that_it_changes(
    start: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aliases, "_FEW", few)
    num_taken = num_needless = 0
    for seed in range(start, start + 20):
        generator = np.random.default_rng(seed)
        base = torch.zeros([(12,), (6, 10), (3, 4, 8), (2, 3, 4, 6), (30, 20)][seed % 5])
        found, alive = Aliases(), {}
        for number in range(generator.integers(1, 120)):
            region = region_of(random_view(generator, base))
            if generator.integers(0, 3):
                found.add(number, region)
                alive[number] = set(bytes_of(region).tolist())
                continue
            written = set(bytes_of(region).tolist())
            taken = found.take(region)
            changed = {number for number, own in alive.items() if own & written}
            assert changed <= set(taken) <= set(alive), seed
            for number in taken:
                del alive[number]
            assert sorted(found) == sorted(alive), seed
            num_taken += len(taken)
            num_needless += len(set(taken) - changed)
    assert num_needless < num_taken / 10


def test_columns_and_steps_leave_each_other_alone() -> None:
    base = torch.zeros(50, 60)
    found = Aliases()
    for column in range(60):
        found.add(column, region_of(base[:, column]))
    found.add("odd", region_of(base[:, 1::2]))
    assert found.take(region_of(base[:, 4])) == [4]
    assert sorted(found.take(region_of(base[:, ::2]))) == [
        column for column in range(0, 60, 2) if column != 4
    ]
    assert "odd" in found.take(region_of(base[:, 7:9]))


# -- what is copied
# --------------------------------------------------------------------------------------------------


def test_views_of_what_was_written_before_are_not_copied() -> None:
    """A cache that is filled step by step and read as far as it is filled."""

    def fill(x: torch.Tensor) -> torch.Tensor:
        cache = x * 1
        total = x[0, 0, 0] * 1
        for step in range(100):
            cache[:, :, step].copy_(x[:, :, step] + 1)
            total = total + cache[:, :, : step + 1].sum()
        return total

    history = log(fill, 2, 3, 100, 64)
    size = 2 * 3 * 100 * 64 * 4
    assert num_bytes_held(history) < 8 * size  # 50 times if each view had a copy of its own
    filled = [
        entry
        for entry in history
        if entry.layer_type == "getitem" and entry.tensor_shape[2:] not in ((64,), ())
    ]
    sums = [entry for entry in history if entry.layer_type == "sum"]
    assert len(filled) == len(sums) == 100
    assert all(
        torch.equal(view.tensor_contents.sum(), own.tensor_contents)
        for view, own in zip(filled, sums, strict=True)
    )


def test_views_that_are_changed_together_share_one_copy() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        views = [y[:, start:] for start in range(100)]
        turned = [y.T for _ in range(100)]
        y.add_(1)
        return y + views[3].sum() + turned[4].sum()

    history = log(write, 100, 400)
    assert num_bytes_held(history) < 8 * 100 * 400 * 4
    before = history["mul_1_1"].tensor_contents
    for number, entry in enumerate(history.layer_list[2:102]):
        assert torch.equal(entry.tensor_contents, before[:, number:])
    assert all(
        torch.equal(entry.tensor_contents, before.T) for entry in history.layer_list[102:202]
    )


def test_views_of_an_input_share_its_copy() -> None:
    x = torch.rand(50, 400)
    history = tl.log_forward_pass(
        Runs(lambda x: sum(x[:, :column].sum() for column in range(1, 100))), x
    )
    assert num_bytes_held(history) < 3 * x.nbytes
    before = x.clone()
    x.zero_()
    views = [entry for entry in history if entry.layer_type == "getitem"]
    assert len(views) == 99
    assert all(
        torch.equal(entry.tensor_contents, before[:, : number + 1])
        for number, entry in enumerate(views)
    )


def test_a_repeated_tensor_is_copied_as_it_lies() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        repeated = y.expand(1000, -1, -1)
        y.add_(1)
        return y + repeated[3]

    history = log(write, 100, 100)
    assert history["expand_1_2"].tensor_contents.shape == (1000, 100, 100)
    assert torch.equal(history["expand_1_2"].tensor_contents[7], history["mul_1_1"].tensor_contents)
    assert num_bytes_held(history) < 10 * 100 * 100 * 4


def test_changing_a_shared_copy_is_noticed() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        turned, flat = y.T, y.view(-1)
        y.add_(1)
        return y + turned.sum() + flat.sum()

    history = log(write, 200, 200)
    history["view_1"].tensor_contents[0] = 7
    with pytest.raises(tl.ValueChangedError):
        _ = history["mul_1_1"].tensor_contents


def test_saved_arguments_share_the_copies_of_saved_values() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        for _ in range(20):
            x = x + y.sum() + y[0, 0]
        y.add_(1)
        return x + y

    history = log(write, 200, 200, save_function_args=True)
    y = history["mul_1_1"].tensor_contents
    given = [entry.creation_args[0] for entry in history if entry.layer_type == "sum"]
    assert len(given) == 20
    assert all(torch.equal(argument, y) for argument in given)
    assert len({argument.untyped_storage().data_ptr() for argument in [y, *given]}) == 1


# -- what happened behind our back
# -------------------------------------------------------------------------------------


def write_unseen(tensor: torch.Tensor) -> None:
    with NoTorchFunction():
        tensor.mul_(2)


def test_an_unseen_write_after_a_seen_one_is_an_error_and_no_wrong_number() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        kept = y[1]
        y[0].add_(1)
        write_unseen(y)
        return kept + y[2]

    history = log(write, 3, 4)
    with pytest.raises(tl.ValueChangedError):
        _ = history["getitem_1_2"].tensor_contents


@pytest.mark.parametrize("how", ["view", "data", "detach"])
def test_values_that_a_seen_write_leaves_alone_are_no_error(how: str) -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        kept = [y[1], y.data[1], y.detach()[1]]
        target = {"view": y, "data": y.data, "detach": y.detach()}[how]
        target[0].add_(1)
        target[0].add_(1)
        return kept[0] + kept[1] + kept[2]

    history = log(write, 3, 4)
    for entry in history:
        _ = entry.tensor_contents
    rows = [entry for entry in history if entry.layer_type == "getitem"][:3]
    assert all(
        torch.equal(entry.tensor_contents, history["mul_1_1"].tensor_contents[1]) for entry in rows
    )


# -- how much is done
# --------------------------------------------------------------------------------------------------


def count_calls(function: Callable[[], Any]) -> int:
    """How many functions are called, of Python and of C."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def rows(y: torch.Tensor, number: int) -> None:
    y[number % len(y)].add_(1)


def columns(y: torch.Tensor, number: int) -> None:
    y[:, number % y.size(1)].add_(1)


def overlapping(y: torch.Tensor, number: int) -> None:
    start = number % (len(y) - 8)
    y[start : start + 8].mul_(0.5)


def assigned(y: torch.Tensor, number: int) -> None:
    y[number % len(y)] += 1


@pytest.mark.slow
@pytest.mark.parametrize("write", [rows, columns, overlapping, assigned])
@pytest.mark.parametrize(
    "options",
    first(1, [{}, {"layers_to_save": "none"}, {"save_function_args": True}]),
    ids=str,
)
def test_the_work_grows_with_the_number_of_writes(
    write: Callable[..., None], options: dict[str, Any]
) -> None:
    def run(num_writes: int) -> Callable[[], Any]:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            views = [y[row] for row in range(0, len(y), 2)]
            total = x[0, 0] * 1
            for number in range(num_writes):
                write(y, number * 7)
                total = total + y[number % len(y), 3]
            return total + sum(view.sum() for view in views) + y.sum()

        return lambda: len(log(function, num_writes, 64, **options))

    run(20)()
    small, large = count_calls(run(150)), count_calls(run(600))
    assert large < 5 * small
