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
    round_ = rounding(dtype)
    known = dict(model.named_modules())
    unknown = [name for name in modules if name not in known]
    if unknown:
        near = did_you_mean(unknown[0], list(known))
        raise KeyError(f"The model has no module {unknown[0]!r}. {near}")

    def cast(tree: Any, to: torch.dtype | None) -> Any:
        def own(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor.to(to) if to is not None and dtype.is_floating_point else round_(tensor)

        return same_with(tree, own)

    handles: list[Any] = []
    before: list[tuple[Tensor, Tensor]] = []
    kinds: dict[str, torch.dtype] = {}

    def leave(module: Any, args: Any, result: Any) -> Any:
        return cast(result, kinds[""])

    def enter(module: Any, args: Any, kwargs: Any) -> Any:
        return cast((args, kwargs), dtype)

    try:
        for name in modules:
            module = known[name]
            for param in [*module.parameters(), *module.buffers()]:
                if param.is_floating_point() and all(param is not own for own, _ in before):
                    kinds[""] = param.dtype
                    before.append((param, param.data))
                    param.data = cast(param.data, dtype)
            kinds.setdefault("", torch.get_default_dtype())
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        yield model
    finally:
        for param, data in before:
            param.data = data
        for handle in handles:
            handle.remove()
