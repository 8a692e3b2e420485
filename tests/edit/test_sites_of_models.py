"""Sites of real architectures: an edit at each gives what a hand-made hook gives, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.edit.architectures import ARCHITECTURES, Attention
from torchlens import edits

Tensor = torch.Tensor
WITH_HEADS = [name for name, own in ARCHITECTURES.items() if own.attention is not None]


def first(tree: Any) -> Tensor:
    """The first tensor of what a module returned."""
    while not isinstance(tree, Tensor):
        tree = next(iter(tree.values() if isinstance(tree, dict) else tree))
    return tree


class Case:
    """A model, its inputs, its history, and what it returns."""

    def __init__(self, name: str) -> None:
        self.model, self.args, self.kwargs = ARCHITECTURES[name].make()
        self.history = tl.log_forward_pass(self.model, self.args, self.kwargs)
        self.plain = self.result().detach()

    def result(self) -> Tensor:
        return first(self.model(*self.args, **self.kwargs))

    def edited(self, site: Any, edit: Any) -> Tensor:
        new = self.history.rerun(self.model, self.args, self.kwargs, edits={site: edit})
        value: Tensor = new[new.output_layers[0]].tensor_contents
        assert len(new.edited_layers) == 1
        assert not torch.equal(value, self.plain)
        return value

    def hooked(
        self, address: str, change: Callable[[Tensor], Tensor], *, before: bool = False
    ) -> Tensor:
        """With a hook by hand on the first tensor that a module returns, or is given."""

        def on_input(_: Any, args: Any, kwargs: Any) -> Any:
            if args:
                return (change(args[0]), *args[1:]), kwargs
            name = next(iter(kwargs))
            return args, kwargs | {name: change(kwargs[name])}

        def on_output(_: Any, args: Any, result: Any) -> Any:
            if isinstance(result, tuple):
                return (change(result[0]), *result[1:])
            if isinstance(result, dict):
                return type(result)({**result, next(iter(result)): change(first(result))})
            return change(result)

        module = self.model.get_submodule(address)
        if before:
            handle = module.register_forward_pre_hook(on_input, with_kwargs=True)
        else:
            handle = module.register_forward_hook(on_output)
        try:
            return self.result()
        finally:
            handle.remove()


def part(change: Callable[[Tensor], Tensor], at: int, size: int = 8) -> Callable[[Tensor], Tensor]:
    """A change of some of the last dimension's elements."""

    def changed(value: Tensor) -> Tensor:
        value = value.clone()
        value[..., at : at + size] = change(value[..., at : at + size])
        return value

    return changed


def double(value: Tensor) -> Tensor:
    return value * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_HEADS)
def test_heads_and_their_queries_keys_and_values_are_as_in_the_projections(name: str) -> None:
    case, own = Case(name), ARCHITECTURES[name].attention
    assert own is not None
    head = edits.site(own.address, head=3)
    assert torch.equal(
        case.edited(head, double), case.hooked(own.out, part(double, 24), before=True)
    )
    for kind in ("q", "k", "v"):
        address, start = getattr(own, kind)
        number = 2 if kind == "q" or own.num_keys == 4 else 1
        site = edits.site(own.address, part=kind, head=number)
        # Doubling is exact in every position encoding.
        expected = case.hooked(address, part(double, start + 8 * number))
        assert torch.equal(case.edited(site, double), expected), kind
    check_listed(case, own)


def check_listed(case: Case, own: Attention) -> None:
    """`sites` lists each head of an attention once, and as many keys as there are."""
    counts = {
        kind: sum(site.key == own.address for site in case.history.sites(kind))
        for kind in ("head", "q", "k", "v")
    }
    assert counts == {"head": 4, "q": 4, "k": own.num_keys, "v": own.num_keys}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_block_is_edited_before_and_after_at_a_token_and_in_a_subspace(name: str) -> None:
    case, address = Case(name), ARCHITECTURES[name].block
    size = case.history[address].tensor_shape[-1]

    def change(value: Tensor) -> Tensor:
        return value * 1.5 + 0.25

    for site, before in (
        (edits.site(address, part="before"), True),
        (edits.site(address, part="after"), False),
    ):
        assert torch.equal(case.edited(site, change), case.hooked(address, change, before=before))
    direction = torch.zeros(size)
    direction[2] = 2.0
    site = edits.site(address, directions=direction)

    def without(value: Tensor) -> Tensor:
        value = value.clone()
        value[..., 2] = 3.0 * 2.0
        return value

    torch.testing.assert_close(case.edited(site, 3.0), case.hooked(address, without))
    if len(case.history[address].tensor_shape) == 3:
        site = edits.site(address, token=0)

        def at_token(value: Tensor) -> Tensor:
            return torch.cat([change(value[:, :1]), value[:, 1:]], 1)

        assert torch.equal(case.edited(site, change), case.hooked(address, at_token))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_module_is_spliced_in_with_its_error_term_and_its_gradients(name: str) -> None:
    case, address = Case(name), ARCHITECTURES[name].block
    size = case.history[address].tensor_shape[-1]
    coder = nn.Linear(size, size)
    case.edited(address, edits.splice(coder)).square().sum().backward()
    ours, coder.weight.grad = coder.weight.grad, None
    case.hooked(address, coder).square().sum().backward()
    assert ours is not None
    torch.testing.assert_close(ours, coder.weight.grad)
    assert ours.any()
    # With the error term, the model computes what it did, and gradients pass the module.
    new = case.history.rerun(
        case.model, case.args, case.kwargs, edits={address: edits.splice(coder, keep_error=True)}
    )
    value: Tensor = new[new.output_layers[0]].tensor_contents
    torch.testing.assert_close(value, case.plain, rtol=1e-3, atol=1e-3)
    coder.weight.grad = None
    value.square().sum().backward()
    by_hand = case.hooked(address, lambda v: coder(v) + (v - coder(v)).detach())
    assert torch.equal(value, by_hand)
    ours, coder.weight.grad = coder.weight.grad, None
    by_hand.square().sum().backward()
    torch.testing.assert_close(ours, coder.weight.grad)


@pytest.mark.soak
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_module_that_ran_once_is_edited_as_with_a_hook(name: str) -> None:
    case, count = Case(name), 0

    def change(value: Tensor) -> Tensor:
        return value * 1.5 + 0.25

    for site in case.history.sites("module"):
        if ":" not in site.key:
            new = case.history.rerun(case.model, case.args, case.kwargs, edits={site: change})
            expected = case.hooked(site.key, change)
            assert torch.equal(new[new.output_layers[0]].tensor_contents, expected), site
            count += 1
    assert count > 2


@pytest.mark.slow
def test_a_channel_and_a_hidden_state_are_edited() -> None:
    case = Case("resnet")
    site = edits.site("layer2.0.conv1", channel=3)

    def without(value: Tensor) -> Tensor:
        value = value.clone()
        value[:, 3] = 0
        return value

    assert torch.equal(case.edited(site, 0.0), case.hooked("layer2.0.conv1", without))
    case = Case("lstm")

    def state(_: Any, args: Any, result: Any) -> Any:
        values, (hidden, cell) = result
        return values, (hidden * 2, cell)

    edited = case.edited("rnn.output.1.0", double)
    handle = case.model.get_submodule("rnn").register_forward_hook(state)
    assert torch.equal(edited, case.result())
    handle.remove()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "key", "count"),
    [("gpt2", "transformer.h.1.mlp.act", 128), ("llama", "model.layers.1.mlp.act_fn", 48),
     ("bert", "encoder.layer.1.intermediate", 48), ("mamba", "", 0), ("lstm", "rnn", 12)],
)  # fmt: skip
def test_neurons_are_those_of_the_whole_activation(name: str, key: str, count: int) -> None:
    case = Case(name)
    keys = [case.history[site.key].layer_label for site in case.history.sites("neuron")]
    assert keys.count(case.history[key].layer_label if key else "") == count
    assert len(keys) == sum(case.history[own].tensor_shape[-1] for own in set(keys))
