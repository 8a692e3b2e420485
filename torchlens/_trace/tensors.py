"""Tensors on their way into a file: the plain tensors that are written, and for each tensor a note
that says how to make it of them again.

The file has the numbers of a tensor in the order of its shape, so that any reader of safetensors
gets them right. A view of another tensor is not written again: its note says where in that tensor
it lies. Sparse, nested and quantized tensors are written as the tensors that they consist of, and
data types that safetensors lacks as bytes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter

from torchlens._history.portable import text_of
from torchlens._recording.regions import Region, region_of
from torchlens._recording.symbolic import SymbolicInt, inert_sizes
from torchlens._recording.wrappers import inner_of, why_valueless
from torchlens._text.plain_text import shown
from torchlens.errors import TraceError

# What the JSON says of a tensor; complete when `settle` has decided what is written. Keys:
#   key       the name of the written tensor
#   dtype     where it is not that of the written tensor
#   strides   in which the written tensor lies in memory, unless it is contiguous
#   shape     where sides are expanded: the shape; `strides` has zeros there
#   view      offset, shape and strides in the memory of the written tensor
#   conj, neg, grad, param    flags
#   kind, parts    of a tensor that consists of others, with facts of its kind
#   meta, shape, strides    a tensor without values, and its dtype
#   text, why    a tensor that no file can hold
Note = dict[str, Any]

_MOST_GAPS = 4  # times the size of its elements that a tensor with gaps may take in memory
_NAMES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 "
    "complex64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
_STORED = frozenset(getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name))
QUANTIZED = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
_ROWS, _COLUMNS = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
COMPRESSED = {
    torch.sparse_csr: _ROWS, torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS, torch.sparse_bsc: _COLUMNS,
}  # fmt: skip


class _Added(NamedTuple):
    name: str
    tensor: Tensor
    note: Note


def word_of(kind: torch.dtype | torch.layout | torch.memory_format) -> str:
    """`float32` for `torch.float32`."""
    return str(kind).removeprefix("torch.")


def dtype_named(word: Any) -> torch.dtype:
    """The dtype that a file names: 'float32'."""
    found = getattr(torch, word, None) if isinstance(word, str) else None
    if not isinstance(found, torch.dtype):
        raise TraceError(f"There is no dtype {shown(word)} in torch {torch.__version__}.")
    return found


def as_stored(tensor: Tensor) -> Tensor:
    """What is written of a tensor: its numbers on the CPU, in the order of its shape, in a dtype
    that safetensors has. To be called inside `unseen()`.
    """
    is_plain = type(tensor) is Tensor and tensor.is_cpu and tensor.is_contiguous()
    if not is_plain or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    size = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.numel() and tensor.untyped_storage().nbytes() < size:
        raise RuntimeError("The memory of a tensor was given back; there is nothing to write.")
    if tensor.dtype in _STORED:
        return tensor
    if tensor.dtype is torch.complex128:
        return torch.view_as_real(tensor)
    as_items = tensor if tensor.element_size() == 1 else tensor.unsqueeze(-1)
    return as_items.view(torch.uint8)


class TensorWriter:
    """The tensors of one history. `add` gives the note of one; `settle` completes the notes.

    `claim` makes a name one that no other tensor of the file has.
    """

    def __init__(self, claim: Callable[[str], str]) -> None:
        self._claim = claim
        self._known: dict[int, tuple[Any, Note]] = {}
        self._groups: dict[int, list[_Added]] = {}  # by storage
        self._written: dict[str, Tensor] = {}

    def add(self, tensor: Tensor, name: str) -> Note:
        """The note of a tensor, which gets the name `name` if it is written."""
        known = self._known.get(id(tensor))
        if known is None:
            note: Note = {}
            known = self._known[id(tensor)] = (tensor, note)
            if _is_plain(tensor):
                self._group(tensor, name, note)
            else:
                with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                    self._fill(tensor, name, note)
        return known[1]

    @property
    def is_empty(self) -> bool:
        return not self._known

    def settle(self) -> dict[str, Tensor]:
        """Decides what is written: tensors by name. `as_stored` makes each fit to be written."""
        for group in self._groups.values():
            first = group[0].tensor
            is_simple = first.is_contiguous() or not region_of(first).overlaps_itself
            if len(group) == 1 and is_simple:
                self._write_alone(group[0])
            else:
                self._write_group(group)
        return self._written

    def _group(self, tensor: Tensor, name: str, note: Note) -> None:
        self._groups.setdefault(tensor.untyped_storage()._cdata, []).append(
            _Added(name, tensor, note)
        )

    def _fill(self, tensor: Tensor, name: str, note: Note) -> None:
        if isinstance(tensor, Parameter):
            note["param"] = True
        if tensor.requires_grad and tensor.is_leaf:
            note["grad"] = True
        while (inner := inner_of(tensor)) is not None:
            tensor = inner
        if why_valueless(tensor) is not None:
            note.update(_without_values(tensor))
            return
        taken_apart = _parts_of(tensor)
        if taken_apart is not None:
            parts, facts = taken_apart
            own = {word: self.add(part.detach(), f"{name}.{word}") for word, part in parts.items()}
            note.update(parts=own, **facts)
        elif tensor.is_quantized:
            why = f"it is of {tensor.dtype}, which has several numbers in a byte."
            note.update(text=text_of(tensor), why=why)
        elif not _has_memory(tensor):
            note.update(text=text_of(tensor), why="it is of a class of its own.")
        else:
            self._group(tensor.detach(), name, note)

    # -- what shares memory --------------------------------------------------------------------

    def _write_group(self, group: Sequence[_Added]) -> None:
        """Writes tensors of one memory: one of them where it covers the others, the memory where
        they overlap, or each alone.
        """
        regions = [region_of(added.tensor) for added in group]
        start, end = min(r.start for r in regions), max(r.end for r in regions)
        owner = _owner(group, regions, start, end)
        own_bytes = {region: _num_distinct_bytes(region) for region in regions}
        if owner is not None:
            self._write(owner, owner.tensor)
            memory = owner.note
        elif end - start <= sum(own_bytes.values()):
            storage = group[0].tensor.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=group[0].tensor.device)
            flat.set_(storage, start, (end - start,), (1,))
            memory = {"key": self._claim(f"{group[0].name}.memory")}
            self._written[memory["key"]] = flat
        else:
            for added in group:
                self._write_alone(added)
            return
        for added, region in zip(group, regions, strict=True):
            if added is not owner:
                offset = (region.start - start) // region.item_bytes if region.num_elements else 0
                added.note.update(
                    key=memory["key"],
                    dtype=word_of(added.tensor.dtype),
                    view=[offset, list(region.shape), list(region.strides)],
                )
                if "strides" in memory:
                    added.note["strides"] = memory["strides"]
                _note_flags(added.tensor, added.note)

    def _write_alone(self, added: _Added) -> None:
        """Writes a tensor that shares no memory: of expanded sides one slice, of gaps nothing."""
        tensor = added.tensor
        if tensor.is_contiguous() or not tensor.numel():
            self._write(added, tensor)
            return
        shape = tensor.shape
        for side, (size, stride) in enumerate(zip(shape, tensor.stride(), strict=True)):
            if size > 1 and not stride:
                tensor = tensor.narrow(side, 0, 1)
        self._write(added, tensor)
        region = region_of(tensor)
        if region.overlaps_itself or not is_laid_out(region.shape, region.strides):
            added.note.pop("strides", None)
        if tensor.shape != shape:
            added.note["shape"] = list(shape)

    def _write(self, added: _Added, tensor: Tensor) -> None:
        note, name = added.note, self._claim(added.name)
        note["key"] = name
        if tensor.stride() != _contiguous_strides(tensor.shape):
            note["strides"] = list(tensor.stride())
        if tensor.dtype not in _STORED:
            note["dtype"] = word_of(tensor.dtype)
        _note_flags(tensor, note)
        self._written[name] = tensor


def _parts_of(tensor: Any) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The plain tensors that a tensor consists of, and what else there is to say; None if it is a
    plain one itself.
    """
    shape = list(tensor.shape) if not tensor.is_nested else []
    if tensor.is_nested and tensor.layout is torch.jagged:
        parts = {"values": tensor.values(), "offsets": tensor.offsets()}
        if tensor.lengths() is not None:
            parts["lengths"] = tensor.lengths()
        return parts, {"kind": "jagged", "ragged": getattr(tensor, "_ragged_idx", 1)}
    if tensor.is_nested:
        parts = {str(number): part for number, part in enumerate(tensor.unbind())}
        return parts, {"kind": "nested", "dtype": word_of(tensor.dtype)}
    if tensor.layout is torch.sparse_coo:
        parts = {"indices": tensor._indices(), "values": tensor._values()}
        return parts, {"kind": "sparse_coo", "shape": shape, "coalesced": tensor.is_coalesced()}
    if tensor.layout in COMPRESSED:
        words = (*COMPRESSED[tensor.layout], "values")
        facts = {"kind": word_of(tensor.layout), "shape": shape}
        return {word: getattr(tensor, word)() for word in words}, facts
    if tensor.dtype in QUANTIZED:
        return _quantized_parts(tensor)
    if tensor.layout is not torch.strided and not tensor.is_quantized:
        return {"values": tensor.to_dense()}, {"kind": word_of(tensor.layout).lstrip("_")}
    return None


def _quantized_parts(tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    parts, facts = {"values": tensor.int_repr()}, {"dtype": word_of(tensor.dtype)}
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        scale, zero_point = tensor.q_scale(), tensor.q_zero_point()
        return parts, {"kind": "quantized", **facts, "scale": scale, "zero_point": zero_point}
    parts["scales"] = tensor.q_per_channel_scales()
    parts["zero_points"] = tensor.q_per_channel_zero_points()
    return parts, {"kind": "quantized", **facts, "axis": tensor.q_per_channel_axis()}


def _without_values(tensor: Tensor) -> Note:
    """The note of a tensor that has a shape and no values."""
    is_strided = tensor.layout is torch.strided
    shape, strides = inert_sizes(tensor.shape), inert_sizes(tensor.stride() if is_strided else ())
    if any(isinstance(size, SymbolicInt) for size in (*shape, *strides)):
        why = "it is a fake tensor of symbolic sizes."
        return {"text": text_of(tensor.detach()), "why": why}
    return {"meta": word_of(tensor.dtype), "shape": list(shape), "strides": list(strides)}


def is_laid_out(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of these strides takes little more memory than its elements."""
    end = Region(0, tuple(shape), tuple(strides), 1).end
    return end <= _MOST_GAPS * math.prod(shape)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is numbers in memory and no more, as most are."""
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


def _num_distinct_bytes(region: Region) -> int:
    """How much it takes to write a region alone."""
    sides = zip(region.shape, region.strides, strict=True)
    return math.prod(size for size, stride in sides if stride or not size) * region.item_bytes


def _owner(
    group: Sequence[_Added], regions: Sequence[Region], start: int, end: int
) -> _Added | None:
    """A tensor of the group that the others are views of."""
    able = [
        added
        for added, region in zip(group, regions, strict=True)
        if (region.start, region.end) == (start, end)
        and region.num_bytes == end - start
        and not region.overlaps_itself
        and not added.tensor.is_conj()
        and not added.tensor.is_neg()
    ]
    return min(able, key=lambda added: not added.tensor.is_contiguous(), default=None)


def _note_flags(tensor: Tensor, note: Note) -> None:
    if tensor.is_conj():
        note["conj"] = True
    if tensor.is_neg():
        note["neg"] = True
