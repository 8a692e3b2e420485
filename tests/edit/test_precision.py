"""Rounding as an edit, and modules that run in another precision."""

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.edit.models import gpt
from torchlens import edits

Tensor = torch.Tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_modules_run_in_another_dtype_and_are_as_before_afterwards(dtype: torch.dtype) -> None:
    model, ids = gpt()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = model(ids)
    seen: list[torch.dtype] = []
    handle = model.h[1].mlp[0].register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    with edits.run_in(model, ["h.1.mlp", "h.1.mlp.0", "head"], dtype):
        result = model(ids)
    handle.remove()
    assert seen == [dtype]
    assert result.dtype == torch.float32
    x = model.h[1](model.h[0](model.wte(ids)))
    by_hand = model.wte(ids)
    for number, block in enumerate(model.h):
        by_hand = by_hand + block.attn(block.ln_1(by_hand))
        given = block.ln_2(by_hand)
        if number == 1:
            block.mlp.to(dtype)
            by_hand = by_hand + block.mlp(given.to(dtype)).float()
            block.mlp.float()
            block.mlp.load_state_dict({
                name.removeprefix("h.1.mlp."): own
                for name, own in before.items() if name.startswith("h.1.mlp.")
            })  # fmt: skip
        else:
            by_hand = by_hand + block.mlp(given)
    by_hand = (by_hand.to(dtype) @ model.head.weight.to(dtype).T).float()
    torch.testing.assert_close(result, by_hand, rtol=1e-2, atol=1e-2)
    assert not torch.equal(result, plain)
    assert x.dtype == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(ids), plain)


def test_rounding_is_what_a_cast_does_and_int8_has_255_steps() -> None:
    value = torch.randn(4, 7)
    assert torch.equal(edits.rounding(torch.bfloat16)(value), value.bfloat16().float())
    rounded = edits.rounding(torch.int8)(value)
    steps = rounded / (value.abs().max() / 127)
    torch.testing.assert_close(steps, steps.round())
    assert (rounded - value).abs().max() <= value.abs().max() / 254 * 1.001
    assert not edits.rounding(torch.int8)(torch.zeros(3)).any()
    with pytest.raises(TypeError, match=r"dtype must be torch\.int8 or a floating-point type"):
        edits.rounding(torch.int64)
    with (
        pytest.raises(KeyError, match=r"has no module 'h\.9'"),
        edits.run_in(gpt()[0], ["h.9"], torch.float16),
    ):
        pass


def test_the_sweep_finds_the_operation_that_cannot_be_rounded() -> None:
    class Sharp(nn.Module):
        """The second branch is multiplied by a thousand after a difference of like numbers."""

        def forward(self, x: Tensor) -> Tensor:
            first = (x * 2).tanh()
            return first + ((x + 100.0) - 100.0) * 1000.0

    model, x = Sharp(), torch.rand(8)
    history = tl.log_forward_pass(model, x)
    sites = [site for site in history.sites("operation") if str(site) != "add_3_7"]
    table = history.sweep(sites, edits.rounding(torch.bfloat16)).to_pandas()
    ranked = table.sort_values("metric", ascending=False)["site"].tolist()
    assert ranked[0] == "add_1_3"
    assert table["edit"].unique().tolist() == ["bfloat16"]
    assert table.set_index("site")["metric"]["tanh_1_2"] < 1e-3
