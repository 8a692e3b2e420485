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


class Caller:
    """Makes calls of a model from batches.

    A dict gives keyword arguments, without labels. Of a tuple, the model takes as many items as it
    needs; the others are labels.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        try:
            parameters = list(inspect.signature(model.forward).parameters.values())
        except (TypeError, ValueError):  # a forward written in C, or a scripted one
            parameters = []
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = [p for p in parameters if p.default is p.empty and p.kind in by_place]
        self._num_needed = max(1, len(needed))
        self._names = forward_names(model)
        self._accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._model_name = type(model).__name__
        self._device = next((t.device for t in (*model.parameters(), *model.buffers())), None)

    def __call__(self, data: Any, size: int) -> Call:
        """The call of the model with a batch."""
        mask = None
        args: list[Any] = [data]
        kwargs: dict[str, Any] = {}
        if isinstance(data, Mapping):
            given = {str(name): self._moved(value) for name, value in data.items()}
            mask = given.get("attention_mask")
            args, kwargs = self._by_name(given)
        elif isinstance(data, list | tuple) and not hasattr(data, "_fields"):
            args = list(data[: self._num_needed])
        is_ragged = isinstance(mask, torch.Tensor) and mask.ndim == 2
        return Call([self._moved(arg) for arg in args], kwargs, size, mask if is_ragged else None)

    def _moved(self, value: Any) -> Any:
        """The tensors and arrays of a value as tensors on the device of the model."""
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if isinstance(tensor, torch.Tensor):
            is_there = self._device is None or tensor.device == self._device
            return tensor if is_there else tensor.to(self._device, non_blocking=True)
        is_tree = isinstance(tensor, list | tuple | dict)
        return same_with(tensor, self._moved) if is_tree else tensor

    def _by_name(self, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        wanted = {name: value for name, value in given.items() if name not in _LABELS}
        named = {name: value for name, value in wanted.items() if name in self._names}
        if self._accepts_all:  # besides, such as data sets have them, texts and the like
            tensors = {k: one for k, one in wanted.items() if isinstance(one, torch.Tensor)}
            return [], named | tensors
        if named:
            return [], named
        if len(wanted) == 1:
            return list(wanted.values()), {}
        raise TypeError(
            f"A batch has {', '.join(map(repr, wanted))}, and {self._model_name} takes "
            f"{', '.join(map(repr, self._names)) or 'no arguments by name'}. Rename them in the "
            "data set."
        )


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
