"""Edits in loops of calls: steps, tokens, and what a cache keeps, against loops written by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchlens as tl
from tests.edit.architectures import ARCHITECTURES
from tests.edit.models import Gpt, gpt
from torchlens import edits

Tensor = torch.Tensor


def by_hand(
    model: Gpt,
    ids: Tensor,
    steps: int,
    change: Callable[[int, Tensor], Tensor],
    *,
    is_sampled: bool,
) -> Tensor:
    """The loop of `generate`, with the block in the middle changed by hand."""
    caches: list[list[Tensor]] = [[] for _ in model.h]
    new = ids
    with torch.no_grad():
        for step in range(steps):
            x = model.wte(new)
            for number, block in enumerate(model.h):
                x = block(x, caches[number])
                if number == 1:
                    x = change(step, x)
            logits = model.head(x)[:, -1]
            new = logits.argmax(-1, keepdim=True)
            if is_sampled:
                new = torch.multinomial(logits.softmax(-1), 1)
            ids = torch.cat([ids, new], 1)
    return ids


@pytest.mark.parametrize("has_history", [True, False])
@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_direction_is_added_from_a_step_on(is_sampled: bool, has_history: bool) -> None:
    model, ids = gpt()
    direction = torch.randn(16) * 3
    history = tl.log_forward_pass(model, [ids, [[] for _ in model.h]]) if has_history else None

    def change(step: int, value: Tensor) -> Tensor:
        if step < 3:
            return value
        value = value.clone()
        value[:, -1] += direction
        return value

    steered = {"h.1": edits.at(steps=slice(3, None), tokens=-1, add=direction)}
    torch.manual_seed(5)
    with tl.edit(model, steered, history):
        result = model.generate(ids, 8, is_sampled=is_sampled)
    torch.manual_seed(5)
    assert torch.equal(result, by_hand(model, ids, 8, change, is_sampled=is_sampled))
    torch.manual_seed(5)
    assert not torch.equal(result, model.generate(ids, 8, is_sampled=is_sampled))


def test_what_was_cached_before_an_edit_stays_and_an_edited_prompt_is_cached() -> None:
    model, ids = gpt()
    seen: list[int] = []

    def change(step: int, value: Tensor) -> Tensor:
        if step == 0:
            value = value.clone()
            value[:, 2] = 0
        return value

    def zero(value: Tensor) -> Tensor:
        seen.append(value.shape[1] if value.ndim > 2 else 0)
        return torch.zeros_like(value)

    with tl.edit(model, {"h.1": edits.at(steps=0, tokens=2, edit=zero)}):
        result = model.generate(ids, 6)
    assert torch.equal(result, by_hand(model, ids, 6, change, is_sampled=False))
    assert len(seen) == 1


def test_a_head_is_edited_in_every_step() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, [ids, [[] for _ in model.h]])
    site = edits.site("h.1.attn", head=2)
    with tl.edit(model, {site: 0.0}, history):
        result = model.generate(ids, 6)

    def without(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        value = args[0].clone()
        value[..., 8:12] = 0
        return (value,)

    handle = model.h[1].attn.out.register_forward_pre_hook(without)
    assert torch.equal(result, model.generate(ids, 6))
    handle.remove()


def test_a_token_that_a_later_step_has_not_is_an_error() -> None:
    model, ids = gpt()
    expected = pytest.raises(IndexError, match=r"h\.1\[token 3\] has 1 tokens, numbered 0 to 0")
    with expected, tl.edit(model, {"h.1": edits.at(tokens=3, edit=0.0)}):
        model.generate(ids, 3)


def test_the_first_call_of_each_block_is_step_0() -> None:
    model, ids = gpt()
    editing = tl.edit(model, {"h.1": edits.at(steps=[0], edit=0.0)})
    plain = model(ids)
    for _ in range(2):
        with editing:
            first, second = model(ids), model(ids)
        assert not torch.equal(first, plain)
        assert torch.equal(second, plain)


def steered_block(model: Any) -> Any:
    return model.get_submodule(
        "transformer.h.0" if hasattr(model, "transformer") else "model.layers.0"
    )


class ByHand:
    """Generation written by hand, with a direction added to the last token from a step on."""

    def __init__(self, model: Any, direction: Tensor, start: int) -> None:
        self.model, self.direction, self.start = model, direction, start
        self.step = 0
        self.cache: Any = None

    def log_probabilities(self, new: Tensor) -> Tensor:
        """Of the next token, after one more call of the model with its cache."""

        def steer(_: Any, args: Any, result: Any) -> Any:
            value = (result[0] if isinstance(result, tuple) else result).clone()
            value[:, -1] += self.direction
            return (value, *result[1:]) if isinstance(result, tuple) else value

        is_steered = self.step >= self.start
        handle = steered_block(self.model).register_forward_hook(steer) if is_steered else None
        with torch.no_grad():
            out = self.model(new, past_key_values=self.cache, use_cache=True)
        if handle is not None:
            handle.remove()
        self.step, self.cache = self.step + 1, out.past_key_values
        return out.logits[:, -1].float().log_softmax(-1)

    def run(self, ids: Tensor, steps: int, *, do_sample: bool = False) -> Tensor:
        new = ids
        for _ in range(steps):
            found = self.log_probabilities(new)
            new = found.argmax(-1, keepdim=True)
            if do_sample:
                new = torch.multinomial(found.softmax(-1), 1)
            ids = torch.cat([ids, new], 1)
        return ids

    def beams(self, ids: Tensor, steps: int, num_beams: int) -> Tensor:
        """The best of the beams of each row; no token ends a beam."""
        count = len(ids)
        ids = new = ids.repeat_interleave(num_beams, 0)
        scores = torch.full((count, num_beams), -1e9)
        scores[:, 0] = 0
        for _ in range(steps):
            found = self.log_probabilities(new).view(count, num_beams, -1) + scores[..., None]
            scores, best = found.flatten(1).topk(num_beams)
            rows = (best // found.shape[-1] + num_beams * torch.arange(count)[:, None]).flatten()
            new = (best % found.shape[-1]).view(-1, 1)
            ids = torch.cat([ids[rows], new], 1)
            self.cache.reorder_cache(rows)
        return ids.view(count, num_beams, -1)[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("how", [{}, {"do_sample": True}, {"num_beams": 3}])
def test_generate_of_transformers_is_as_a_loop_by_hand(name: str, how: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    model, _, _ = ARCHITECTURES[name].make()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids, direction = torch.randint(1, 30, (2, 5)), torch.randn(32)
    key = "transformer.h.0" if name == "gpt2" else "model.layers.0"
    edit = {key: edits.at(steps=slice(2, None), tokens=-1, add=direction)}
    history = tl.log_forward_pass(model, ids)
    plain = model.generate(ids, max_new_tokens=6, **how)
    torch.manual_seed(3)
    by_hand = ByHand(model, direction, 2)
    if "num_beams" in how:
        expected = by_hand.beams(ids, 6, how["num_beams"])
    else:
        expected = by_hand.run(ids, 6, **how)
    for own in (None, history):
        torch.manual_seed(3)
        with tl.edit(model, edit, own):
            result = model.generate(ids, max_new_tokens=6, top_k=0, **how)
        assert torch.equal(result, expected)
    assert not torch.equal(expected, plain)
