"""The watch over autograd's nodes: it sees every run, changes nothing and keeps nothing alive."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.networks import MLP, ConvNet
from torchlens._capture.gradients.backward_hooks import (
    MOST_WATCHED,
    BackwardWatch,
    NodeInfo,
    next_sequence,
    sequence_of,
)


def leaf(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True, **options)


def names(watch: BackwardWatch) -> list[str]:
    return [run.name for run in watch.runs]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first * 2 + second * 3


def test_each_node_is_written_down_in_the_order_it_ran() -> None:
    x = leaf(3)
    loss = (x * 2).sin().sum()
    watch = BackwardWatch()
    watch.watch([loss])
    loss.backward()
    assert names(watch) == ["SumBackward0", "SinBackward0", "MulBackward0", "AccumulateGrad"]
    assert all(run.start <= run.end for run in watch.runs)
    assert all(
        one.end <= other.start for one, other in zip(watch.runs, watch.runs[1:], strict=False)
    )
    assert len({run.task for run in watch.runs}) == 1
    assert [run.parameter for run in watch.runs] == [None, None, None, id(x)]
    assert watch.runs[-1].sequence == -1


def test_sequence_numbers_tell_which_call_made_a_node() -> None:
    x, fc = leaf(2, 3, 4), nn.Linear(4, 4)
    first = next_sequence()
    y = fc(x)
    between = next_sequence()
    loss = y.sum()
    watch = BackwardWatch()
    watch.watch([loss])
    loss.backward()
    inside = [run.name for run in watch.runs if first <= run.sequence < between]
    # `UnsafeViewBackward0` in newer releases of torch
    assert [name.removeprefix("Unsafe") for name in inside] == [
        "ViewBackward0",
        "AddmmBackward0",
        "TBackward0",
        "ViewBackward0",
    ]
    assert [run.name for run in watch.runs if run.sequence >= between] == ["SumBackward0"]
    assert sequence_of(loss.grad_fn) == between


def test_several_passes_go_on_appending() -> None:
    loss = (leaf(3) * 2).sum()
    watch = BackwardWatch()
    watch.watch([loss])
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(watch.runs) == 6
    assert len({run.task for run in watch.runs}) == 2


def test_a_node_is_watched_once_however_often_it_is_met() -> None:
    x = leaf(3)
    y = x * 2
    watch = BackwardWatch()
    watch.watch([y, y, y.sum()])
    loss = y.sum()
    watch.watch([loss])
    watch.watch([loss])
    loss.backward()
    assert names(watch) == ["SumBackward0", "MulBackward0", "AccumulateGrad"]


@pytest.mark.parametrize("make", [MLP, ConvNet])
def test_gradients_do_not_change(make: Callable[[], nn.Module]) -> None:
    model, x = make().eval(), torch.randn((2, 3, 8, 8) if make is ConvNet else (2, 4))
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss = model(x).square().sum()
    watch = BackwardWatch(before=lambda node, gradients: None, after=lambda node, gradients: None)
    watch.watch([loss])
    loss.backward()
    assert watch.runs
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, wanted)


def test_what_looks_sees_the_gradients_before_and_after_each_node() -> None:
    seen: list[tuple[str, str, list[float]]] = []

    def look(when: str) -> Callable[[NodeInfo, tuple[Any, ...]], None]:
        return lambda node, gradients: seen.append(
            (when, node.name, [float(g.sum()) for g in gradients if g is not None])
        )

    loss = (leaf(3) * 2).sum()
    watch = BackwardWatch(look("before"), look("after"))
    watch.watch([loss])
    loss.backward()
    assert seen == [
        ("before", "SumBackward0", [1.0]), ("after", "SumBackward0", [3.0]),
        ("before", "MulBackward0", [3.0]), ("after", "MulBackward0", [6.0]),
        ("before", "AccumulateGrad", [6.0]), ("after", "AccumulateGrad", []),
    ]  # fmt: skip


def test_what_fails_while_looking_is_noted_and_backward_goes_on() -> None:
    def fail(node: NodeInfo, gradients: tuple[Any, ...]) -> None:
        raise KeyError("oops")

    x = leaf(3)
    loss = (x * 2).sum()
    watch = BackwardWatch(before=fail, after=fail)
    watch.watch([loss])
    loss.backward()
    assert x.grad is not None
    assert len(watch.runs) == 3
    assert watch.failures == [
        f"{name}: KeyError: 'oops'" for name in names(watch) for _ in range(2)
    ]


def test_an_exception_that_is_let_through_stops_backward() -> None:
    def stop(node: NodeInfo, gradients: tuple[Any, ...]) -> None:
        if node.name == "MulBackward0":
            raise ArithmeticError("stop here")

    x = leaf(3)
    loss = (x * 2).sum()
    watch = BackwardWatch(before=stop, lets_through=(ArithmeticError,))
    watch.watch([loss])
    with pytest.raises(ArithmeticError, match="stop here"):
        loss.backward()
    assert x.grad is None


def test_after_stop_nothing_is_left_on_the_graph() -> None:
    x = leaf(3)
    loss = (x * 2).sum()
    watch = BackwardWatch()
    watch.watch([loss])
    assert loss.grad_fn.metadata
    watch.stop()
    watch.stop()
    assert not loss.grad_fn.metadata
    loss.backward()
    assert watch.runs == []


def test_a_watch_that_is_dropped_takes_its_hooks_along() -> None:
    loss = (leaf(3) * 2).sum()
    watch = BackwardWatch()
    watch.watch([loss])
    del watch
    assert not loss.grad_fn.metadata


def test_the_graph_goes_when_its_user_lets_it_go() -> None:
    gc.collect()
    gc.disable()
    try:
        watch = BackwardWatch()
        loss = nn.Linear(3, 3)(leaf(2, 3)).sin().sum()
        watch.watch([loss])
        loss.backward(retain_graph=True)
        assert len(watch._hooks) > 4
        del loss
        assert len(watch._hooks) == 0
    finally:
        gc.enable()


def test_writes_to_views_run_as_nodes_of_their_base() -> None:
    x = leaf(2, 2)
    y = x * 1
    y[0].mul_(3)
    y[1].add_(1)
    loss = (y * 2).sum()
    watch = BackwardWatch()
    watch.watch([loss])
    loss.backward()
    assert names(watch).count("CopySlices") == 2
    assert x.grad.tolist() == [[6, 6], [2, 2]]


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointed_parts_run_as_before(is_reentrant: bool) -> None:
    x, fc = leaf(3, 4), nn.Linear(4, 4)
    loss = checkpoint(lambda y: fc(y).sin(), x * 1, use_reentrant=is_reentrant).sum()
    watch = BackwardWatch()
    watch.watch([loss])
    loss.backward()
    wanted = torch.autograd.grad(fc(x).sin().sum(), [x, fc.weight])
    torch.testing.assert_close((x.grad, fc.weight.grad), wanted)
    assert ("CheckpointFunctionBackward" if is_reentrant else "SinBackward0") in names(watch)
    assert watch.failures == []


def test_a_function_of_the_users_own_is_a_node() -> None:
    x = leaf(3)
    first, _ = Twice.apply(x * 1)
    watch = BackwardWatch()
    watch.watch([first])
    first.sum().backward()
    assert names(watch) == ["TwiceBackward", "MulBackward0", "AccumulateGrad"]
    assert x.grad.tolist() == [2, 2, 2]


def test_a_backward_pass_through_a_backward_pass() -> None:
    x = leaf(3)
    loss = (x**3).sum()
    watch = BackwardWatch()
    watch.watch([loss])
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    num_first = len(watch.runs)
    watch.watch([gradient])
    gradient.sum().backward()
    assert len(watch.runs) > num_first > 1
    torch.testing.assert_close(x.grad, 6 * x.detach())


def test_only_what_is_asked_for_runs() -> None:
    x, z = leaf(3), leaf(3)
    loss = (x.sin() * z.cos()).sum()
    watch = BackwardWatch()
    watch.watch([loss])
    loss.backward(inputs=[x])
    assert "SinBackward0" in names(watch)
    assert "CosBackward0" not in names(watch)
    assert z.grad is None


def test_gradients_changed_by_a_hook_are_seen_changed() -> None:
    seen = {}
    x = leaf(3)
    y = x * 2
    y.register_hook(lambda gradient: gradient * 10)
    watch = BackwardWatch(
        before=lambda node, gradients: seen.update({node.name: gradients[0].tolist()})
    )
    watch.watch([y])
    y.sum().backward()
    assert seen["MulBackward0"] == [10, 10, 10]
    assert x.grad.tolist() == [20, 20, 20]


@pytest.mark.slow
def test_a_very_deep_graph_is_watched_in_part_and_let_go_of_safely() -> None:
    x = leaf(1)
    y = x
    for _ in range(3 * MOST_WATCHED):
        y = y + 1
    watch = BackwardWatch()
    watch.watch([y])
    watch.watch([y])
    y.backward()
    assert x.grad.tolist() == [1]
    assert len(watch.runs) == MOST_WATCHED
    assert watch.failures == [
        ("More than 20,000 nodes are waiting for a backward pass; what is beyond them is not "
        "watched.")
    ]  # fmt: skip
    del y
    assert len(watch._hooks) == 0


def test_what_is_not_part_of_a_graph_is_passed_over() -> None:
    watch = BackwardWatch()
    watch.watch([torch.ones(2), leaf(2), torch.ones(2, dtype=torch.long)])
    assert len(watch._hooks) == 0
