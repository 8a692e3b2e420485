"""Tensors that the log meets without having seen them made.

A tensor that a module keeps as a plain attribute becomes an entry, like a buffer. A tensor whose
class wraps others, such as a masked tensor, becomes an entry with those as parents, and a tensor
taken out of it an entry with the wrapper as its
parent: torch reports neither. All others (tensors in closures, globals, legacy constructors) stay
unknown.
"""

import sys
from typing import Any

import torch

from torchlens._capture.attributes import Attributes
from torchlens._capture.recorder import Recorder
from torchlens._recording.arguments import TENSORS
from torchlens._recording.operations import BUFFER, Operation, named_operation
from torchlens._recording.recording import MadeCall

Tensor = torch.Tensor


class UnseenTensors:
    """Makes entries for such tensors when they first occur."""

    def __init__(self, attributes: Attributes) -> None:
        self._attributes = attributes
        # Attributes that were met: address, entry, tensor.
        self.met: list[tuple[str, int, Tensor]] = []

    def meet(self, recorder: Recorder, tensor: Tensor) -> int | None:
        """The entry that the tensor becomes; None if it stays unknown."""
        with torch._C.DisableTorchFunction():
            address = self._attributes.address_of(tensor)
            if address is not None:
                entry = recorder.add_source(BUFFER, tensor)
                recorder.memory.meet(entry, tensor)
                self.met.append((address, entry, tensor))
                return entry
            if recorder.collected is not None:
                return None
            return (
                _unwrapped(recorder, tensor)
                if type(tensor) in TENSORS
                else _wrapped(recorder, tensor)
            )


def is_of_unseen(operation: Operation) -> bool:
    """Whether an entry stands for a tensor that holds others, or that another one holds: no call
    made it.
    """
    func: Any = operation.func
    is_wrapper = (
        isinstance(func, type)
        and issubclass(func, Tensor)
        and func not in (Tensor, torch.nn.Parameter)
    )
    return func is getattr or is_wrapper


def _unwrapped(recorder: Recorder, tensor: Tensor) -> int | None:
    """An entry for a tensor that another one holds."""
    holder, name, held = recorder.held.get(id(tensor), (0, "", None))
    if held is None or held() is not tensor:
        return None
    return _append(recorder, named_operation(name, getattr), (), (holder,), tensor)


def _wrapped(recorder: Recorder, tensor: Tensor) -> int | None:
    """An entry for a tensor that its class made around others, if the log knows one of them."""
    inside = tuple(part for part in vars(tensor).values() if isinstance(part, Tensor))
    references = tuple(recorder.entry_of(part) for part in inside)
    if all(reference is None for reference in references):
        return None
    return _append(
        recorder, named_operation(type(tensor).__name__, type(tensor)), inside, references, tensor
    )


def _append(
    recorder: Recorder,
    operation: Operation,
    args: tuple[Tensor, ...],
    references: tuple[int | None, ...],
    tensor: Tensor,
) -> int:
    place = recorder.user_code(sys._getframe(2))
    entry = len(recorder.rows)
    recorder.append(
        MadeCall(operation, args, None, references, recorder.module_call, *place, 0.0), tensor, None
    )
    return entry
