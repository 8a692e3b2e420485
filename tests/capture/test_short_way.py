"""Calls that are written down the short way leave the same log as those that are not: nested arguments, several results."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torchlens as tl
from torchlens.capture import recorder
from torchlens.capture.arguments import shallow_arguments


class ManyKinds(nn.Module):
    """Lists of tensors, tensors by keyword, several results, results that are handed back, writes to one of several."""

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
        if not torch.is_grad_enabled():  # which has one of several views written by nobody
            second += 1
        rows = f.unbind(0)
        g = torch.einsum("ij,jk->ik", rows[0], torch.block_diag(*rows[1][:2].chunk(2, 1)))
        h = torch.where(g > 0, g, values) + first.sum() + places.float().mean()
        i = F.interpolate(h[None], scale_factor=2.0)[0, :, places[0]]
        return torch.addcmul(i, tensor1=i, tensor2=i, value=0.5) + torch.meshgrid([i[0], i[1]], indexing="ij")[0].sum()


def _description(history: tl.ModelHistory) -> list[Any]:
    return [
        (
            entry.layer_label, entry.parent_layers, entry.parent_layer_arg_locs, entry.iterable_output_index,
            entry.func_position_args_non_tensor, entry.func_keyword_args_non_tensor, entry.tensor_shape, entry.tensor_dtype,
            entry.parent_param_shapes, entry.tensor_contents.tolist(),
        )
        for entry in history
    ]  # fmt: skip


def test_the_short_way_leaves_the_log_that_the_long_way_leaves() -> None:
    torch.manual_seed(0)
    model, x = ManyKinds(), torch.rand(4, 4)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            short = tl.log_forward_pass(model, x)
            long = tl.log_forward_pass(model, x, save_function_args=True)  # arguments are kept, so nothing may wait
        assert _description(short) == _description(long)


def test_lists_of_tensors_and_several_results_go_the_short_way(monkeypatch: Any) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("the long way")

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = torch.cat([x, x], dim=1).chunk(2, dim=1)
            return torch.addcmul(a, tensor1=a, tensor2=b)

    monkeypatch.setattr(recorder.Recorder, "prepare", refuse)
    assert len(tl.log_forward_pass(Model(), torch.rand(2, 2))) == 6


def test_shallow_arguments_are_those_with_tensors_no_deeper_than_one_list() -> None:
    x, y = torch.rand(2), torch.rand(2)
    found = shallow_arguments(([x, 3, y], 1, (2, 3)), {"dim": 0, "other": x})
    assert found is not None
    assert {path: id(tensor) for path, tensor in found.tensors.items()} == {(0, 0): id(x), (0, 2): id(y), "other": id(x)}
    assert (found.args, found.kwargs) == (([None, 3, None], 1, (2, 3)), {"dim": 0, "other": None})
    assert shallow_arguments(([[x]],), None) is None
    assert shallow_arguments((x,), {"out": y}) is None
    assert shallow_arguments((x,), {"generator": torch.Generator()}) is None
    assert shallow_arguments((x, (slice(None), x)), None) is None
