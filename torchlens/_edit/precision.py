"""Rounding as an edit, and modules that really run in another precision."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchlens._recording.trees import same_with
from torchlens._text.error_wording import did_you_mean, got

Tensor = torch.Tensor


def rounding(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """As `torchlens.edits.rounding`."""
    if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype is torch.int8):
        raise TypeError(f"dtype must be torch.int8 or a floating-point type, got {got(dtype)}.")

    def rounded(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        if dtype.is_floating_point:
            return value.to(dtype).to(value.dtype)
        scale = value.abs().amax() / 127  # symmetric, one scale for the tensor
        return (value / scale.clamp_min(torch.finfo(value.dtype).tiny)).round() * scale

    rounded.__name__ = str(dtype).removeprefix("torch.")
    return rounded


@contextmanager
def run_in(
    model: torch.nn.Module, modules: Sequence[str], dtype: torch.dtype
) -> Iterator[torch.nn.Module]:
    """As `torchlens.edits.run_in`."""
    known = dict(model.named_modules())
    unknown = [name for name in modules if name not in known]
    if unknown:
        near = did_you_mean(unknown[0], list(known))
        raise KeyError(f"The model has no module {unknown[0]!r}. {near}")
    whole = next((own.dtype for own in _floats(model)), torch.get_default_dtype())
    round_ = rounding(dtype)
    is_cast = dtype.is_floating_point

    def lower(tree: Any) -> Any:
        return same_with(tree, lambda own: _to(own, dtype) if is_cast else round_(own))

    def enter(module: Any, args: Any, kwargs: Any) -> Any:
        return lower((args, kwargs))

    def leave(module: Any, args: Any, result: Any) -> Any:
        return same_with(result, lambda own: _to(own, whole) if is_cast else round_(own))

    before: dict[Tensor, Tensor] = {}
    handles: list[Any] = []
    try:
        for name in _outermost(modules):
            for own in _floats(known[name]):
                if own not in before:
                    before[own] = own.data
                    own.data = lower(own.data)
            handles.append(known[name].register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(known[name].register_forward_hook(leave))
        yield model
    finally:
        for own, data in before.items():
            own.data = data
        for handle in handles:
            handle.remove()


def _floats(module: torch.nn.Module) -> list[Tensor]:
    """Its parameters and buffers of floating-point numbers."""
    own = [*module.parameters(), *module.buffers()]
    return [tensor for tensor in own if tensor.is_floating_point()]


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _outermost(names: Sequence[str]) -> list[str]:
    """The modules that are in no other of these."""
    return [name for name in {*names} if not any(name.startswith(f"{own}.") for own in names)]
