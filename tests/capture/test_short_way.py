"""Calls that are written down the short way leave the same log as those that are not: nested
arguments, several results.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchlens as tl
from tests.work import lines_run
from torchlens._capture import recorder
from torchlens._capture.entries import take_apart
from torchlens._recording.unseen import NoTorchFunction


class ManyKinds(nn.Module):
    """Lists of tensors, tensors by keyword, several results, results that are handed back, writes
    to one of several.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = torch.cat([x, x + 1], dim=1).chunk(2, dim=1)
        c = torch.cat(tensors=(a, b), dim=0)
        values, places = c.max(dim=0, keepdim=True)
        same, wide = torch.broadcast_tensors(a, values)
        d = torch.stack([same, wide * 2, a])
        e = F.linear(d, weight=self.linear.weight, bias=self.linear.bias)
        f = F.scaled_dot_product_attention(e, e, d, attn_mask=torch.ones(4, 4, dtype=torch.bool))
        first, second = f.split([1, 2])
        if not torch.is_grad_enabled():  # one of several views is not written
            second += 1
        rows = f.unbind(0)
        g = torch.einsum("ij,jk->ik", rows[0], torch.block_diag(*rows[1][:2].chunk(2, 1)))
        h = torch.where(g > 0, g, values) + first.sum() + places.float().mean()
        i = F.interpolate(h[None], scale_factor=2.0)[0, :, places[0]]
        return (
            torch.addcmul(i, tensor1=i, tensor2=i, value=0.5)
            + torch.meshgrid([i[0], i[1]], indexing="ij")[0].sum()
        )


def _description(history: tl.ModelHistory) -> list[Any]:
    return [
        (
            entry.layer_label, entry.parent_layers, entry.parent_layer_arg_locs,
            entry.iterable_output_index,
            entry.func_position_args_non_tensor, entry.func_keyword_args_non_tensor,
            entry.tensor_shape, entry.tensor_dtype,
            entry.parent_param_shapes, entry.gradfunc, entry.modules_exited,
            entry.tensor_contents.tolist() if entry.has_saved_activations else None,
        )
        for entry in history
    ]  # fmt: skip


def test_the_short_way_leaves_the_log_that_the_long_way_leaves() -> None:
    torch.manual_seed(0)
    model, x = ManyKinds(), torch.rand(4, 4)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            short = tl.log_forward_pass(model, x)
            long = tl.log_forward_pass(
                model, x, save_function_args=True
            )  # arguments are kept, so nothing may wait
        assert _description(short) == _description(long)


@pytest.mark.parametrize("layers", ["none", ["linear_1", "chunk"], ["split"]])
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_not_saved_leaves_the_same_log_either_way(layers: Any, grad: bool) -> None:
    torch.manual_seed(0)
    model, x = ManyKinds(), torch.rand(4, 4)
    with torch.set_grad_enabled(grad):
        short = tl.log_forward_pass(model, x, layers_to_save=layers)
        long = tl.log_forward_pass(model, x, layers_to_save=layers, save_function_args=True)
        everything = tl.log_forward_pass(model, x)
    assert _description(short) == _description(long)
    assert [line[:-1] for line in _description(short)] == [
        line[:-1] for line in _description(everything)
    ]


class InPlace(nn.Module):
    """Writes to tensors of its own, to one that is looked at by another, and to one whose memory is
    used again later.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = (x * 2).relu_()
        a = a.add_(1)
        del x
        part = a[0]
        a.mul_(3)  # which `part` sees
        b = torch.sin(a)
        b.neg_()
        return b + part


@torch.no_grad()
def test_writes_to_what_is_not_saved_leave_the_graph_that_saving_leaves() -> None:
    x = torch.rand(3, 3)
    unsaved = tl.log_forward_pass(InPlace(), x, layers_to_save=None)
    assert [line[:-1] for line in _description(unsaved)] == [
        line[:-1] for line in _description(tl.log_forward_pass(InPlace(), x))
    ]


def test_a_tensor_with_the_id_of_one_that_is_gone_is_another() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                number = id(x + 1)  # gone at once
                with NoTorchFunction():
                    stranger = torch.ones(3)  # which no operation is known to have made
                if id(stranger) == number:
                    self.has_met = True
                    return x * stranger
                del stranger
            return x * 1

    model = Model()
    history = tl.get_model_metadata(model, torch.rand(3))
    assert model.has_met
    assert history[-2].parent_layers == ["input_1_0"]


def test_saving_nothing_is_about_the_work_of_saving_everything() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(100):
                x = torch.sin(self.linear(x) + 1).relu_()
            return x

    model, x = Loop(), torch.rand(2, 3)
    with torch.no_grad():
        for layers in ("all", "none"):
            tl.log_forward_pass(model, x, layers_to_save=layers)  # what is worked out once
        assert lines_run(lambda: tl.get_model_metadata(model, x)) < 1.25 * lines_run(
            lambda: tl.log_forward_pass(model, x)
        )


@pytest.mark.parametrize("layers", ["all", "none"])
def test_lists_of_tensors_and_several_results_go_the_short_way(
    layers: str, monkeypatch: Any
) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("the long way")

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = torch.cat([x, x], dim=1).chunk(2, dim=1)
            return torch.addcmul(a, tensor1=a, tensor2=b)

    monkeypatch.setattr(recorder.Recorder, "prepare", refuse)
    assert len(tl.log_forward_pass(Model(), torch.rand(2, 2), layers_to_save=layers)) == 6


def test_arguments_come_apart_into_tensors_by_position_and_the_rest() -> None:
    x, y = torch.rand(2), torch.rand(2)
    found: dict[Any, torch.Tensor] = {}
    args = ([x, 3, y], 1, (slice(None), slice(0, y)), {"deep": [[x]]}, slice(1, None))
    assert take_apart(args, (), found) == (
        [None, 3, None], 1, (slice(None), slice(0, None)), {"deep": [[None]]}, slice(1, None),
    )  # fmt: skip
    assert {path: id(tensor) for path, tensor in found.items()} == {
        (0, 0): id(x),
        (0, 2): id(y),
        (2, 1, "stop"): id(y),
        (3, "deep", 0, 0): id(x),
    }
