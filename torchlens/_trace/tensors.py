"""Tensors on their way into a file: what is written, and what is noted so that each comes out as it
was.

The file has the numbers of a tensor in the order of its shape, so that any reader of safetensors
gets it right. What looks at the memory of another tensor is not written again: the note says where
in it to look. Data types that the format does not have are written as bytes, and sparse, nested and
quantized tensors as the tensors that they consist of.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter

from torchlens._history.portable import text_of
from torchlens._recording.process_memory import bytes_of
from torchlens._recording.regions import Region, region_of
from torchlens._recording.symbolic import SymbolicInt, inert_sizes
from torchlens._recording.unseen import unseen
from torchlens._recording.wrappers import inner_of, why_valueless
from torchlens._trace.format import DTYPES

# What stands in the JSON for a tensor; filled in when it is decided what is written.
Note = dict[str, Any]

_MOST_GAPS = (
    4  # memory with gaps that is larger than this many times what is in it is not made again
)
_STORED_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# What a quantized tensor of each type is written as.
QUANTIZED = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"), torch.sparse_csc: ("ccol_indices",
    "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"), torch.sparse_bsc: ("ccol_indices",
    "row_indices"),
}  # fmt: skip


class Blob(NamedTuple):
    """Something to write: its name, what the header says of it, and bytes, or a tensor in the order
    of its shape or not.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: Tensor | bytes | memoryview

    @property
    def num_bytes(self) -> int:
        content = self.content
        return (
            content.numel() * content.element_size()
            if isinstance(content, Tensor)
            else len(content)
        )

    def numbers(self) -> memoryview:
        """The bytes, in the order of the shape; without a copy where they lie that way.

        What is conjugated or negated when it is read is written so, for others to read it right.
        """
        content = self.content
        if not isinstance(content, Tensor):
            return memoryview(content)
        if not is_as_written(content):
            with unseen():
                content = content.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return bytes_of(content)


class _Added(NamedTuple):
    name: str
    tensor: Tensor
    note: Note


class _Held(NamedTuple):
    name: str
    tensor: Tensor
    note: Note
    region: Region


def word_of(kind: torch.dtype | torch.layout | torch.memory_format) -> str:
    """`float32` for `torch.float32`."""
    return str(kind).removeprefix("torch.")


class Tensors:
    """The tensors of one file. `add` gives the note of one; `settle` fills in the notes and tells
    what is to be written.

    `claim` makes a name one that no other tensor of the file has.
    """

    def __init__(self, claim: Callable[[str], str]) -> None:
        self._claim = claim
        self._known: dict[int, tuple[Any, Note]] = {}
        self._groups: dict[int, list[_Added]] = {}  # by storage

    def add(self, tensor: Tensor, name: str) -> Note:
        """The note of a tensor, which is going to be called `name` if it is written."""
        known = self._known.get(id(tensor))
        if known is None:
            note: Note = {}
            known = self._known[id(tensor)] = (tensor, note)
            if _is_plain(tensor):
                self._groups.setdefault(tensor.untyped_storage()._cdata, []).append(
                    _Added(name, tensor, note)
                )
                return note
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                self._fill(tensor, name, note)
        return known[1]

    def settle(self) -> list[Blob]:
        """Decides what is written. What was added comes with what shares its memory, and is not
        remembered.
        """
        found: list[Blob] = []
        for group in self._groups.values():
            if len(group) == 1 and group[0].tensor.is_contiguous():  # as most are
                found.append(self._written(group[0], group[0].tensor))
            else:
                found += self._settle_group(
                    [_Held(*added, region_of(added.tensor)) for added in group]
                )
        self._groups.clear()
        self._known.clear()
        return found

    # -- one tensor
    # ----------------------------------------------------------------------------------------------

    def _fill(self, tensor: Tensor, name: str, note: Note) -> None:
        if isinstance(tensor, Parameter):
            note["param"] = True
        if tensor.requires_grad and tensor.is_leaf:
            note["grad"] = True
        while (inner := inner_of(tensor)) is not None:
            tensor = inner
        if why_valueless(tensor) is not None:
            self._fill_valueless(tensor, note)
        elif tensor.is_nested:
            self._fill_nested(tensor, name, note)
        elif tensor.layout is torch.sparse_coo:
            parts = {"indices": tensor._indices(), "values": tensor._values()}
            self._fill_parts("sparse_coo", parts, tensor, name, note)
            note["coalesced"] = tensor.is_coalesced()
        elif tensor.layout in _COMPRESSED:
            parts = {
                word: getattr(tensor, word)() for word in (*_COMPRESSED[tensor.layout], "values")
            }
            self._fill_parts(word_of(tensor.layout), parts, tensor, name, note)
        elif tensor.dtype in QUANTIZED:
            self._fill_quantized(tensor, name, note)
        elif tensor.is_quantized:
            note.update(
                text=text_of(tensor),
                why=f"it is of {tensor.dtype}, which has several numbers in a byte.",
            )
        elif tensor.layout is not torch.strided:
            self._fill_parts(
                word_of(tensor.layout).lstrip("_"),
                {"values": tensor.to_dense()},
                tensor,
                name,
                note,
            )
        elif not _has_memory(tensor):
            note.update(text=text_of(tensor), why="it is of a class of its own.")
        else:
            added = _Added(name, tensor.detach(), note)
            self._groups.setdefault(tensor.untyped_storage()._cdata, []).append(added)

    def _fill_valueless(self, tensor: Tensor, note: Note) -> None:
        sizes = (
            inert_sizes(tensor.shape),
            inert_sizes(tensor.stride()) if tensor.layout is torch.strided else (),
        )
        if any(isinstance(size, SymbolicInt) for size in (*sizes[0], *sizes[1])):
            note.update(text=text_of(tensor.detach()), why="it is a fake tensor of symbolic sizes.")
        else:
            note.update(meta=word_of(tensor.dtype), shape=list(sizes[0]), strides=list(sizes[1]))

    def _fill_parts(
        self, kind: str, parts: dict[str, Tensor], tensor: Tensor, name: str, note: Note
    ) -> None:
        own = {word: self.add(part.detach(), f"{name}.{word}") for word, part in parts.items()}
        note.update(kind=kind, parts=own, shape=list(tensor.shape))

    def _fill_nested(self, tensor: Any, name: str, note: Note) -> None:
        if tensor.layout is torch.jagged:
            parts = {"values": tensor.values(), "offsets": tensor.offsets()}
            if tensor.lengths() is not None:
                parts["lengths"] = tensor.lengths()
            own = {word: self.add(part.detach(), f"{name}.{word}") for word, part in parts.items()}
            note.update(kind="jagged", parts=own, ragged=getattr(tensor, "_ragged_idx", 1))
        else:
            own = {
                str(number): self.add(part.detach(), f"{name}.{number}")
                for number, part in enumerate(tensor.unbind())
            }
            note.update(kind="nested", parts=own, dtype=word_of(tensor.dtype))

    def _fill_quantized(self, tensor: Tensor, name: str, note: Note) -> None:
        parts = {"values": tensor.int_repr()}
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            note.update(scale=tensor.q_scale(), zero_point=tensor.q_zero_point())
        else:
            parts |= {
                "scales": tensor.q_per_channel_scales(),
                "zero_points": tensor.q_per_channel_zero_points(),
            }
            note.update(axis=tensor.q_per_channel_axis())
        self._fill_parts("quantized", parts, tensor, name, note)
        note["dtype"] = word_of(tensor.dtype)

    # -- tensors that share memory
    # ---------------------------------------------------------------------------------

    def _settle_group(self, group: Sequence[_Held]) -> list[Blob]:
        if len(group) > 1:
            owner = _owner(group)
            if owner is not None:
                blob = self._written(owner, owner.tensor)
                for held in group:
                    if held is not owner:
                        held.note["key"] = blob.name
                        _note_view(held, owner.region)
                        if "layout" in owner.note:
                            held.note["layout"] = owner.note["layout"]
                return [blob]
        if len(group) > 1 or group[0].region.overlaps_itself:
            start, end = (
                min(held.region.start for held in group),
                max(held.region.end for held in group),
            )
            if end - start <= sum(
                {held.region: _own_bytes(held.region) for held in group}.values()
            ):
                return [self._written_as_memory(group, start, end)]
        return [self._written_alone(held) for held in group]

    def _written(self, held: _Added | _Held, tensor: Tensor) -> Blob:
        """Writes a tensor that fills its memory. Its note is complete with that, and a layout if it
        has one.
        """
        note, name, shape = held.note, self._claim(held.name), tuple(tensor.shape)
        note["key"] = name
        # What is empty has any strides, and what has a side of one element has any there.
        may_be_odd = 0 in shape or 1 in shape or not tensor.is_contiguous()
        if may_be_odd and tensor.stride() != _usual_strides(shape):
            note["layout"] = list(tensor.stride())
        _note_flags(tensor, note)
        dtype = _STORED_NAMES.get(tensor.dtype)
        if dtype is not None:
            return Blob(name, dtype, shape, tensor)
        note["dtype"] = word_of(tensor.dtype)
        if tensor.dtype is torch.complex128:
            return Blob(name, "F64", (*tensor.shape, 2), tensor)
        extra = () if tensor.element_size() == 1 else (tensor.element_size(),)
        return Blob(name, "U8", (*tensor.shape, *extra), tensor)

    def _written_alone(self, held: _Held) -> Blob:
        """Of a tensor with expanded sides, one slice; of one with gaps, what lies between them is
        left out.
        """
        tensor, region = held.tensor, held.region
        is_expanded = [
            stride == 0 and size > 1
            for size, stride in zip(region.shape, region.strides, strict=True)
        ]
        if not any(is_expanded) or not region.num_elements:
            if _fills_memory(region):
                return self._written(held, tensor)
            blob = self._written(held, tensor.contiguous())
            if region.end - region.start <= _MOST_GAPS * region.num_bytes:
                held.note["spread"] = list(region.strides)
            return blob
        for side, expanded in enumerate(is_expanded):
            if expanded:
                tensor = tensor.narrow(side, 0, 1)
        blob = self._written(
            held, tensor if _fills_memory(region_of(tensor)) else tensor.contiguous()
        )
        held.note["expanded"] = list(region.shape)
        return blob

    def _written_as_memory(self, group: Sequence[_Held], start: int, end: int) -> Blob:
        """Writes the memory as it is, where no tensor of the group fills it."""
        flat = torch.empty(0, dtype=torch.uint8, device=group[0].tensor.device)
        flat.set_(group[0].tensor.untyped_storage(), start, (end - start,), (1,))
        blob = Blob(self._claim(f"{group[0].name}.memory"), "U8", (end - start,), flat)
        for held in group:
            held.note["key"] = blob.name
            _note_view(held, Region(start, (end - start,), (1,), 1))
        return blob


def _usual_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of a tensor that lies in memory in the order of its shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_as_written(tensor: Tensor) -> bool:
    """Whether the bytes of a tensor lie in memory as they are to be written."""
    is_here = type(tensor) is Tensor and tensor.is_cpu and tensor.is_contiguous()
    return is_here and not tensor.is_conj() and not tensor.is_neg()


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is a tensor like most: numbers in memory, and no more."""
    is_dense = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
    is_plain = (
        is_dense and not tensor.is_quantized and not tensor.is_meta and not tensor.requires_grad
    )
    return is_plain and not is_functorch_wrapped_tensor(tensor)


def _has_memory(tensor: Tensor) -> bool:
    kind = type(tensor)
    if kind not in (Tensor, Parameter) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a kind of tensor without memory of its own
        return False
    return True


def _own_bytes(region: Region) -> int:
    """What it takes to write a region alone."""
    sides = zip(region.shape, region.strides, strict=True)
    return math.prod(size for size, stride in sides if stride or not size) * region.item_bytes


def _fills_memory(region: Region) -> bool:
    """Whether each byte between its first and its last belongs to one element, and only one."""
    return region.num_bytes == region.end - region.start and not region.overlaps_itself


def _owner(group: Sequence[_Held]) -> _Held | None:
    """A tensor of the group in which all others are views."""
    start, end = min(held.region.start for held in group), max(held.region.end for held in group)
    able = [
        held
        for held in group
        if (held.region.start, held.region.end) == (start, end) and _fills_memory(held.region)
    ]
    able = [held for held in able if not held.tensor.is_conj() and not held.tensor.is_neg()]
    return min(able, key=lambda held: not held.tensor.is_contiguous(), default=None)


def _note_view(held: _Held, memory: Region) -> None:
    """Notes where in the written memory to look, in items from its start."""
    region, note = held.region, held.note
    note["dtype"] = word_of(held.tensor.dtype)
    offset = (region.start - memory.start) // region.item_bytes if region.num_elements else 0
    note["view"] = [offset, list(region.shape), list(region.strides)]
    _note_flags(held.tensor, note)


def _note_flags(tensor: Tensor, note: Note) -> None:
    if tensor.is_conj():
        note["conj"] = True
    if tensor.is_neg():
        note["neg"] = True
