"""From a batch of data to the arguments of the model, and from values to rows."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from torchlens._capture.options import forward_names
from torchlens._extract.engine import are_close
from torchlens._recording.trees import same_with
from torchlens._text.error_wording import got

# What data sets call their targets; a model would compute a loss from them.
_LABELS = ("label", "labels", "target", "targets")


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a model for one batch, and the mask of its tokens if it is ragged text."""

    args: list[Any]
    kwargs: dict[str, Any]
    size: int
    mask: torch.Tensor | None = None

    def rows(self, numbers: Sequence[int]) -> "Call":
        """The call for some of the inputs; tokens that are padding in all of these are cut off."""
        index = torch.as_tensor(numbers)
        mask = self.mask
        kept = None if mask is None else mask[index].bool().any(0).nonzero().flatten()

        def part(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.ndim == 0 or len(tensor) != self.size:
                return tensor
            is_tokens = mask is not None and tensor.shape[:2] == mask.shape
            tensor = tensor[index.to(tensor.device)]
            return tensor[:, kept.to(tensor.device)] if is_tokens and kept is not None else tensor

        return replace(
            self,
            args=[same_with(arg, part) for arg in self.args],
            kwargs={name: same_with(arg, part) for name, arg in self.kwargs.items()},
            size=len(numbers),
            mask=None if mask is None else part(mask),
        )


def call_of(model: torch.nn.Module, data: Any, size: int, device: torch.device | None) -> Call:
    """The call of the model with a batch.

    A dict gives keyword arguments, without labels. Of a tuple, the model takes as many items as it
    needs; the others are labels.
    """
    mask = None
    kwargs: dict[str, Any] = {}
    if isinstance(data, Mapping):
        given = {str(name): value for name, value in data.items()}
        mask = given.get("attention_mask")
        args, kwargs = _by_name(model, given)
    elif isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        args = list(data[: max(1, _num_needed(model))])
    else:
        args = [data]

    def moved(value: Any) -> Any:
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if isinstance(tensor, torch.Tensor) and device is not None:
            return tensor.to(device, non_blocking=True)
        return same_with(tensor, moved) if isinstance(tensor, list | tuple | dict) else tensor

    args, kwargs = [moved(arg) for arg in args], {name: moved(kwargs[name]) for name in kwargs}
    if mask is not None:
        mask = moved(mask)
    is_ragged = isinstance(mask, torch.Tensor) and mask.ndim == 2
    return Call(args, kwargs, size, mask if is_ragged else None)


def _by_name(model: torch.nn.Module, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    names = forward_names(model)
    wanted = {name: value for name, value in given.items() if name not in _LABELS}
    named = {name: value for name, value in wanted.items() if name in names}
    if _accepts_all(model):  # besides, such as data sets have them, texts and the like
        return [], named | {name: one for name, one in wanted.items() if _is_tensor(one)}
    if named:
        return [], named
    if len(wanted) == 1:
        return list(wanted.values()), {}
    raise TypeError(
        f"A batch has {', '.join(map(repr, wanted))}, and {type(model).__name__} takes "
        f"{', '.join(map(repr, names)) or 'no arguments by name'}. Rename them in the data set."
    )


def _accepts_all(model: torch.nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _num_needed(model: torch.nn.Module) -> int:
    """How many positional arguments a model cannot do without."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a forward written in C, or a scripted one
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty and p.kind in kinds for p in parameters)


# -- rows ------------------------------------------------------------------------------------------


def as_rows(name: str, value: Any, call: Call, who: str) -> torch.Tensor:
    """A value with the inputs along its first axis: (inputs, ...).

    Where the first axis holds several parts of each input, one input after the other (as in
    `x.view(batch * tokens, -1)`), it becomes two.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"The value of {name!r} is no tensor but {got(value)}.")
    first = value.shape[0] if value.ndim else 0
    if first == call.size:
        return value
    if first and call.size and first % call.size == 0:
        return value.reshape(call.size, first // call.size, *value.shape[1:])
    raise ValueError(
        f"{name!r} has the shape {tuple(value.shape)} for {who}, a batch of {call.size}: its first "
        "axis is not that of the inputs, so it cannot be stored by rows. Choose another layer, "
        "such as the one before it was reshaped."
    )


def check_rows(
    whole: Mapping[str, torch.Tensor],
    part: Mapping[str, torch.Tensor],
    numbers: Sequence[int],
    mask: torch.Tensor | None,
    part_mask: torch.Tensor | None,
) -> None:
    """Raises unless the rows of a batch are those of the same inputs in a smaller batch.

    This finds values whose first axis is not that of the inputs, and models whose result for an
    input depends on the other inputs or on the padding.
    """
    for name, value in whole.items():
        own, other = value[torch.as_tensor(numbers, device=value.device)], part[name]
        if mask is not None and own.shape[1:2] == mask.shape[1:]:
            assert part_mask is not None
            own = own[mask[torch.as_tensor(numbers, device=mask.device)].bool()]
            if other.shape[:2] == part_mask.shape:
                other = other[part_mask.bool()]
        if mask is not None and own.shape != other.shape:  # such as attention to padding
            continue
        if not are_close(own, other):
            raise ValueError(
                f"The rows of {name!r} are not the same if the batch holds other inputs, or other "
                "padding. Either its first axis is not that of the inputs, or the model mixes "
                "them. Choose another layer, or batch_size=1."
            )
