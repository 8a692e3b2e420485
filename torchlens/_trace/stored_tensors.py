"""Tensors out of a file, when they are asked for: the way back from the notes of `tensors.py`."""

import math
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torchlens._recording.functions import StandIn
from torchlens._recording.regions import Region
from torchlens._recording.stored import StoredValue
from torchlens._recording.unseen import unseen
from torchlens._text.plain_text import shown
from torchlens._trace.damage import told_as_damage
from torchlens._trace.files import TraceFiles
from torchlens._trace.format import DTYPES, dtype_named
from torchlens._trace.tensors import QUANTIZED, Note
from torchlens.errors import TraceError

_MOST_GAPS = 4  # times the size of what is in it
_MOST_BYTES = 1 << 62  # of what a view pretends to have: torch counts in 64 bits


def stored_tensors(files: TraceFiles, names: Sequence[str]) -> list[Any]:
    """What stands for tensors of which no more is to be said than their names."""
    return list(map(StoredTensor, repeat(files), names))


def stored_tensor(files: TraceFiles, note: Note | str) -> Any:
    """What stands for a tensor: something to read, or, where there are no numbers, the thing
    itself.
    """
    if isinstance(note, str):
        return StoredTensor(files, note)
    if "meta" in note:
        return _flagged(_meta_tensor(note), note)
    if "text" in note:
        return StandIn(str(note["text"]), str(note["why"]))
    return StoredTensor(files, note)


class StoredTensor(StoredValue):
    """A tensor in a file. As long as somebody holds it, it is one object; a change in place is not
    remembered.
    """

    __slots__ = ("_files", "_last", "_note")

    def __init__(self, files: TraceFiles, note: Note | str) -> None:
        self._files = files
        self._note = note
        self._last: tuple[Callable[[], Tensor | None], int] | None = None

    def read(self) -> Tensor:
        if self._last is not None:
            tensor = self._last[0]()
            if tensor is not None and tensor._version == self._last[1]:
                return tensor
        with unseen():
            note = {"key": self._note} if isinstance(self._note, str) else self._note
            with told_as_damage(self._files.path):
                tensor = _flagged(_tensor_of(self._files, note), note)
        self._last = (weakref.ref(tensor), tensor._version)
        return tensor


def _flagged(tensor: Tensor, note: Note) -> Tensor:
    needs_grad = note.get("grad") is True and (tensor.is_floating_point() or tensor.is_complex())
    if note.get("param") is True:
        return Parameter(tensor, needs_grad)
    return tensor.requires_grad_() if needs_grad else tensor


def _meta_tensor(note: Note) -> Tensor:
    shape, strides = _sizes(note["shape"]), _strides(note["strides"])
    dtype = dtype_named(note["meta"])
    if len(shape) != len(strides) or Region(0, shape, strides, dtype.itemsize).end > _MOST_BYTES:
        raise TraceError(
            f"A tensor cannot have the shape {shown(shape)} and the strides {shown(strides)}."
        )
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _sizes(sizes: Any) -> tuple[int, ...]:
    found = _strides(sizes)
    if math.prod(size for size in found if size) > _MOST_BYTES:
        raise TraceError(f"A tensor cannot have the sizes {shown(sizes)}.")
    return found


def _strides(strides: Any) -> tuple[int, ...]:
    """Steps through memory. Only with a shape do they say how far it goes: a side of one element
    has any.
    """
    if type(strides) is not list or not all(
        type(stride) is int and 0 <= stride < 1 << 62 for stride in strides
    ):
        raise TraceError(
            f"Sizes and strides must be whole numbers from 0 on, not {shown(strides)}."
        )
    return tuple(strides)


def _tensor_of(files: TraceFiles, note: Note) -> Tensor:
    if "kind" in note:
        return _OF_PARTS[note["kind"]](files, note)
    key = note["key"]
    place = files.place(key)
    stored = DTYPES.get(place.dtype)
    dtype = dtype_named(note["dtype"]) if "dtype" in note else stored
    if dtype is None:
        raise TraceError(
            f"The tensor {shown(key)} has the dtype {place.dtype}, which torch {torch.__version__} "
            "lacks."
        )
    if "view" in note:
        return _view_of(files, note, dtype)
    shape = (
        place.shape
        if stored is not None and dtype.itemsize == stored.itemsize
        else place.shape[:-1]
    )
    if math.prod(shape) * dtype.itemsize != place.end - place.start:
        raise TraceError(
            f"The tensor {shown(key)} has a different number of bytes than {dtype} takes."
        )
    memory, strides = _memory_of(files, note, len(shape))
    tensor = _over(memory, dtype, 0, shape, strides)
    if note.get("conj") is True and tensor.is_complex():
        tensor = tensor.conj_physical_()
        torch._C._set_conj(tensor, True)
    if note.get("neg") is True:
        tensor = tensor.neg_()
        torch._C._set_neg(tensor, True)
    if "spread" in note:
        tensor = _spread(tensor, _strides(note["spread"]))
    return tensor.expand(_sizes(note["expanded"])) if "expanded" in note else tensor


def _spread(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with gaps in memory, as it had them; they are not much larger than it."""
    region = Region(0, tuple(tensor.shape), strides, 1)
    if (
        len(strides) != tensor.dim()
        or region.overlaps_itself
        or region.end > _MOST_GAPS * tensor.numel()
    ):
        raise TraceError(
            f"A tensor cannot have the shape {shown(tuple(tensor.shape))} and the strides "
            f"{shown(strides)}."
        )
    laid_out = torch.zeros(region.end, dtype=tensor.dtype)
    return laid_out.as_strided(tensor.shape, strides).copy_(tensor)


def _memory_of(
    files: TraceFiles, note: Note, num_sides: int
) -> tuple[Tensor, tuple[int, ...] | None]:
    """The bytes of what was written, laid out as they were in memory, and its strides if those are
    special.
    """
    key = note["key"]
    numbers = files.read(key)
    if "layout" not in note:
        return numbers, None
    place, strides = files.place(key), _strides(note["layout"])
    shape = place.shape[: len(strides)]
    count = math.prod(shape)
    if not count and len(shape) == len(strides):  # which lies nowhere
        return numbers, strides
    item = (place.end - place.start) // count if count else 1
    region = Region(0, shape, strides, item)
    if len(shape) != len(strides) or region.overlaps_itself or region.end != len(numbers):
        raise TraceError(
            f"The tensor {shown(key)} cannot lie in memory with the strides {shown(strides)}."
        )
    laid_out = torch.empty(len(numbers), dtype=torch.uint8)
    as_it_was = laid_out.as_strided((*shape, item), (*(stride * item for stride in strides), 1))
    as_it_was.copy_(numbers.view(*shape, item))
    return laid_out, strides


def _view_of(files: TraceFiles, note: Note, dtype: torch.dtype) -> Tensor:
    offset, shape, strides = note["view"]
    shape, strides, (offset,) = _sizes(shape), _strides(strides), _strides([offset])
    region = Region(offset, shape, strides, dtype.itemsize)
    place = files.place(note["key"])
    if len(shape) != len(strides) or region.end > place.end - place.start:
        raise TraceError(
            f"A view of the tensor {shown(note['key'])} looks at bytes that it does not have."
        )
    if "layout" in note or not region.num_elements:
        memory = _memory_of(files, note, 0)[0]
    else:  # no more than is looked at
        memory, offset = files.read(note["key"], region.start, region.end), 0
    tensor = _over(memory, dtype, offset if region.num_elements else 0, shape, strides)
    if note.get("conj") is True and tensor.is_complex():
        torch._C._set_conj(tensor, True)
    if note.get("neg") is True:
        torch._C._set_neg(tensor, True)
    return tensor


def _over(
    memory: Tensor,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int] | None,
) -> Tensor:
    """A tensor that looks at memory."""
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(
        memory.untyped_storage(), offset, tuple(shape), tuple(strides)
    )


# -- tensors of several parts
# ------------------------------------------------------------------------------------------


def _part(files: TraceFiles, note: Note, word: str) -> Tensor:
    part = note["parts"][word]
    if "kind" in part:
        raise TraceError("A part of a tensor must not itself have parts.")
    return _tensor_of(files, part)


def _coo(files: TraceFiles, note: Note) -> Tensor:
    indices, values = _part(files, note, "indices"), _part(files, note, "values")
    tensor = torch.sparse_coo_tensor(indices, values, _sizes(note["shape"]), check_invariants=True)
    return tensor._coalesced_(note["coalesced"] is True)


def _compressed(one: str, other: str, layout: torch.layout) -> Callable[[TraceFiles, Note], Tensor]:
    def make(files: TraceFiles, note: Note) -> Tensor:
        outer, inner, values = (_part(files, note, word) for word in (one, other, "values"))
        sizes = _sizes(note["shape"])
        return torch.sparse_compressed_tensor(
            outer, inner, values, sizes, layout=layout, check_invariants=True
        )

    return make


def _quantized(files: TraceFiles, note: Note) -> Tensor:
    dtype = dtype_named(note["dtype"])
    values = _part(files, note, "values")
    if QUANTIZED.get(dtype) is not values.dtype:
        raise TraceError(f"A tensor of {dtype} cannot be made of {values.dtype}.")
    if "scale" in note:
        return torch._make_per_tensor_quantized_tensor(
            values, float(note["scale"]), int(note["zero_point"])
        )
    scales, zero_points = _part(files, note, "scales"), _part(files, note, "zero_points")
    return torch._make_per_channel_quantized_tensor(values, scales, zero_points, int(note["axis"]))


def _mkldnn(files: TraceFiles, note: Note) -> Tensor:
    values = _part(files, note, "values")
    can_be = torch.backends.mkldnn.is_available() and values.dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
    )
    return values.to_mkldnn() if can_be else values  # on processors without it, the same numbers


def _nested(files: TraceFiles, note: Note) -> Tensor:
    parts = [_part(files, note, word) for word in note["parts"]]
    return torch.nested.nested_tensor(parts, dtype=dtype_named(note["dtype"]))


def _jagged(files: TraceFiles, note: Note) -> Tensor:
    lengths = _part(files, note, "lengths") if "lengths" in note["parts"] else None
    values, offsets = _part(files, note, "values"), _part(files, note, "offsets")
    ends = offsets.tolist()
    if ends != sorted(ends) or not ends or ends[0] < 0 or not 0 < note["ragged"] <= values.dim():
        raise TraceError("The offsets of a nested tensor must rise.")
    if ends[-1] > values.shape[note["ragged"] - 1]:
        raise TraceError("A part of a nested tensor lies beyond its values.")
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, jagged_dim=note["ragged"]
    )


_OF_PARTS: dict[str, Callable[[TraceFiles, Note], Tensor]] = {
    "sparse_coo": _coo,
    "sparse_csr": _compressed("crow_indices", "col_indices", torch.sparse_csr),
    "sparse_csc": _compressed("ccol_indices", "row_indices", torch.sparse_csc),
    "sparse_bsr": _compressed("crow_indices", "col_indices", torch.sparse_bsr),
    "sparse_bsc": _compressed("ccol_indices", "row_indices", torch.sparse_bsc),
    "mkldnn": _mkldnn,
    "quantized": _quantized,
    "nested": _nested,
    "jagged": _jagged,
}
