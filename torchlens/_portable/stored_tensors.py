"""Tensors of a file, read when they are asked for: the way back from the notes of `tensors.py`."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torchlens._portable.tensor_notes import (
    COMPRESSED,
    QUANTIZED,
    Note,
    dtype_named,
    is_dense,
    word_of,
)
from torchlens._recording.functions import StandIn
from torchlens._recording.regions import Region
from torchlens._recording.stored import StoredValue
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._text.plain_text import printable, shown
from torchlens.errors import TraceError

_MOST_BYTES = 1 << 62  # of an expanded tensor: torch counts in 64 bits


# What reading inconsistent data raises, beside the errors of our own checks.
_INCONSISTENT = (
    KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError,
    RuntimeError,
)  # fmt: skip


@contextmanager
def damage_reported(path: Path) -> Iterator[None]:
    """Raises whatever reading inconsistent data raises as a TraceError that names the file."""
    where = printable(str(path))
    try:
        yield
    except TraceError as error:
        if str(error).startswith(where):
            raise
        raise TraceError(f"{where} is damaged: {error}") from None
    except _INCONSISTENT as error:
        reason = shown(f"{type(error).__name__}: {error}")
        raise TraceError(f"{where} is damaged ({reason}).") from None


class TensorSource:
    """The tensors of a file by key; the live objects of a pickle by number."""

    path: Path
    objects: Sequence[Any] = ()

    def read(self, key: str) -> Tensor:
        """A tensor, which the caller may change."""
        raise NotImplementedError


def stored_tensor(files: TensorSource, note: Note | str) -> Any:
    """A tensor to be read later, or, where there are no numbers to read, what there is of it. A
    note that is text is the name of the tensor.
    """
    if isinstance(note, str):
        return StoredTensor(files, {"key": note})
    if "meta" in note:
        return _with_flags(_meta_tensor(note), note)
    if "kept" in note:
        return files.objects[note["kept"]]
    if "text" in note:
        return StandIn(str(note["text"]), str(note["why"]))
    return StoredTensor(files, note)


class StoredTensor(StoredValue):
    """A tensor in a file. It stays one object as long as the caller holds it and does not change
    it in place.
    """

    __slots__ = ("_files", "_last", "_note")

    def __init__(self, files: TensorSource, note: Note) -> None:
        self._files = files
        self._note = note
        self._last: tuple[Callable[[], Tensor | None], int] | None = None

    def read(self) -> Tensor:
        if self._last is not None:
            tensor = self._last[0]()
            if tensor is not None and tensor._version == self._last[1]:
                return tensor
        with unseen(), NoTorchFunction(), damage_reported(self._files.path):
            tensor = _with_flags(_tensor_of(self._files, self._note), self._note)
            if "class" in self._note:
                tensor = _of_class(tensor, self._note, self._files.objects)
        self._last = (weakref.ref(tensor), tensor._version)
        return tensor


def _of_class(tensor: Tensor, note: Note, objects: Sequence[Any]) -> Tensor:
    """A tensor of a subclass; a plain one where the class is not known."""
    kind, attributes = objects[note["class"]], objects[note["attributes"]]
    if isinstance(kind, StandIn):
        return tensor
    made: Tensor = tensor.detach().as_subclass(kind).requires_grad_(tensor.requires_grad)
    made.__dict__.update(attributes if isinstance(attributes, dict) else {})
    return made


def _with_flags(tensor: Tensor, note: Note) -> Tensor:
    needs_grad = note.get("grad") is True and (tensor.is_floating_point() or tensor.is_complex())
    if note.get("param") is True:
        return Parameter(tensor, needs_grad)
    return tensor.requires_grad_() if needs_grad else tensor


def _meta_tensor(note: Note) -> Tensor:
    shape, strides = _sizes(note["shape"]), _steps(note["strides"])
    dtype = dtype_named(note["meta"])
    if len(shape) != len(strides) or Region(0, shape, strides, dtype.itemsize).end > _MOST_BYTES:
        raise _impossible(shape, strides)
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _steps(numbers: Any) -> tuple[int, ...]:
    """Strides, or an offset. How far they go is only known with a shape."""
    if type(numbers) is not list or not all(
        type(number) is int and 0 <= number < 1 << 62 for number in numbers
    ):
        raise TraceError(f"Sizes and strides must be numbers from 0 on, not {shown(numbers)}.")
    return tuple(numbers)


def _sizes(numbers: Any) -> tuple[int, ...]:
    found = _steps(numbers)
    if math.prod(size for size in found if size) > _MOST_BYTES:
        raise TraceError(f"A tensor cannot have the sizes {shown(numbers)}.")
    return found


def _impossible(shape: Sequence[int], strides: Sequence[int]) -> TraceError:
    return TraceError(
        f"A tensor cannot have the shape {shown(tuple(shape))} and the strides "
        f"{shown(tuple(strides))}."
    )


def _tensor_of(files: TensorSource, note: Note) -> Tensor:
    if "kind" in note:
        tensor = _with_parts(files, note)
    elif "view" in note:
        tensor = _view_of(_tensor_of(files, note["of"]), note)
    else:
        tensor = _written_tensor(files, note)
    return _with_lazy_operations(tensor, note)


def _with_lazy_operations(tensor: Tensor, note: Note) -> Tensor:
    """The tensor with the lazy conjugation and negation that it had. The numbers in the file are
    the results; those that a view shares with another tensor are the operands.
    """
    is_operand = "view" in note
    if note.get("conj") is True and tensor.is_complex():
        tensor = tensor if is_operand else tensor.conj_physical()
        torch._C._set_conj(tensor, True)
    if note.get("neg") is True:
        tensor = tensor if is_operand else tensor.neg()
        torch._C._set_neg(tensor, True)
    return tensor


def _written_tensor(files: TensorSource, note: Note) -> Tensor:
    """A tensor whose numbers are in the file under a name of their own."""
    tensor = files.read(note["key"])
    if "dtype" in note:
        tensor = _of_dtype(tensor, dtype_named(note["dtype"]))
    if "strides" in note:
        tensor = _laid_out(tensor, _steps(note["strides"]))
    return tensor.expand(_sizes(note["shape"])) if "shape" in note else tensor


def _of_dtype(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a dtype that safetensors lacks."""
    if dtype.itemsize == stored.element_size():
        return stored.view(dtype)
    return stored.view(dtype).squeeze(-1)


def _laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with its elements in another order in memory."""
    shape = tuple(tensor.shape)
    if len(strides) != len(shape) or not is_dense(shape, strides):
        raise _impossible(shape, strides)
    return torch.empty_strided(shape, strides, dtype=tensor.dtype).copy_(tensor)


def _view_of(owner: Tensor, note: Note) -> Tensor:
    """A view of the memory of another tensor."""
    dtype, memory = dtype_named(note["dtype"]), owner.untyped_storage()
    offset, sizes, steps = note["view"]
    shape, strides, (start,) = _sizes(sizes), _steps(steps), _steps([offset])
    region = Region(start, shape, strides, dtype.itemsize)
    if len(shape) != len(strides) or region.end > memory.nbytes():
        raise TraceError("A view lies in bytes that its tensor does not have.")
    return torch.empty(0, dtype=dtype).set_(memory, start, shape, strides)


# -- tensors of several parts ----------------------------------------------------------------------


def _with_parts(files: TensorSource, note: Note) -> Tensor:
    if any("kind" in part for part in note["parts"].values()):
        raise TraceError("A part of a tensor must not itself have parts.")
    parts = {word: _tensor_of(files, part) for word, part in note["parts"].items()}
    return _MAKERS[note["kind"]](parts, note)


def _coo(parts: dict[str, Tensor], note: Note) -> Tensor:
    shape = _sizes(note["shape"])
    tensor = torch.sparse_coo_tensor(
        parts["indices"], parts["values"], shape, check_invariants=True
    )
    return tensor._coalesced_(note["coalesced"] is True)


def _compressed(layout: torch.layout) -> Callable[[dict[str, Tensor], Note], Tensor]:
    def make(parts: dict[str, Tensor], note: Note) -> Tensor:
        outer, inner = (parts[word] for word in COMPRESSED[layout])
        return torch.sparse_compressed_tensor(
            outer, inner, parts["values"], _sizes(note["shape"]), layout=layout,
            check_invariants=True,
        )  # fmt: skip

    return make


def _quantized(parts: dict[str, Tensor], note: Note) -> Tensor:
    values, dtype = parts["values"], dtype_named(note["dtype"])
    if QUANTIZED.get(dtype) is not values.dtype:
        raise TraceError(f"A tensor of {dtype} cannot be made of {values.dtype}.")
    if "scale" in note:
        scale, zero_point = float(note["scale"]), int(note["zero_point"])
        return torch._make_per_tensor_quantized_tensor(values, scale, zero_point)
    return torch._make_per_channel_quantized_tensor(
        values, parts["scales"], parts["zero_points"], int(note["axis"])
    )


def _nested(parts: dict[str, Tensor], note: Note) -> Tensor:
    return torch.nested.nested_tensor(list(parts.values()), dtype=dtype_named(note["dtype"]))


def _jagged(parts: dict[str, Tensor], note: Note) -> Tensor:
    values, offsets, side = parts["values"], parts["offsets"], note["ragged"]
    ends = offsets.tolist()
    if ends != sorted(ends) or not ends or ends[0] < 0 or not 0 < side <= values.dim():
        raise TraceError("The offsets of a nested tensor must rise.")
    if ends[-1] > values.shape[side - 1]:
        raise TraceError("A part of a nested tensor lies beyond its values.")
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, parts.get("lengths"), jagged_dim=side
    )


_MAKERS: dict[str, Callable[[dict[str, Tensor], Note], Tensor]] = {
    "sparse_coo": _coo,
    **{word_of(layout): _compressed(layout) for layout in COMPRESSED},
    "quantized": _quantized,
    "nested": _nested,
    "jagged": _jagged,
}
