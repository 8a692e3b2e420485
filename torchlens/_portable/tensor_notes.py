"""Takes the tensors of a log apart: plain tensors to write, and a note for each tensor, from which
`stored_tensors.py` makes it again.

The file has the numbers of a tensor in the order of its shape, so any reader of safetensors gets
them right. A view of another saved tensor is not written again: its note says where in that tensor
it lies. Sparse, nested and quantized tensors are written as the tensors that they consist of, and
data types that safetensors lacks as bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter

from torchlens._portable.live_objects import LiveObjects, text_of
from torchlens._recording.regions import Region, region_of
from torchlens._recording.symbolic import SymbolicInt, inert_sizes
from torchlens._recording.unseen import GradMode
from torchlens._recording.wrappers import inner_of, why_valueless
from torchlens._text.plain_text import shown
from torchlens.errors import TraceError

# What the JSON says of a tensor; complete when `settle` has decided what is written. Keys:
#   key       the name of the written tensor
#   dtype     where it is not that of the written tensor
#   strides   where it is not contiguous; without gaps
#   shape     where sides are expanded: the full shape
#   of, view  of a view: the note of the tensor whose memory it shares; offset, shape and strides
#             there
#   conj, neg, grad, param    flags
#   kind, parts    of a tensor that consists of others, with facts of its kind
#   meta, shape, strides    a tensor without values, and its dtype
#   text, why    a tensor that no file can hold
#   kept         in a pickle: the number of the tensor, which is one of its live objects
#   class, attributes    in a pickle: those of a subclass, by number
Note = dict[str, Any]

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
    if not (_is_plain(tensor) and tensor.is_cpu and tensor.is_contiguous()):
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
    """The tensors of one log. `add` gives the note of one; `settle` completes the notes.

    `claim` makes a name unique in the file. `objects` takes live objects.
    """

    def __init__(self, claim: Callable[[str], str], objects: LiveObjects | None = None) -> None:
        self._claim = claim
        self._objects = objects
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
                with torch._C.DisableTorchFunctionSubclass(), GradMode(False):
                    self._fill(tensor, name, note)
        return known[1]

    @property
    def is_empty(self) -> bool:
        return not self._known

    def settle(self) -> dict[str, Tensor]:
        """Decides what is written: tensors by name. `as_stored` makes each fit to be written."""
        for group in self._groups.values():
            owner = _owner(group) if len(group) > 1 else None
            for added in group:
                if owner is None or added is owner:
                    self._write(added)
                else:
                    _note_view(added, owner)
        return self._written

    def _group(self, tensor: Tensor, name: str, note: Note) -> None:
        self._groups.setdefault(tensor.untyped_storage()._cdata, []).append(
            _Added(name, tensor, note)
        )

    def _fill(self, tensor: Tensor, name: str, note: Note) -> None:
        note.update(_flags_of(tensor))
        if self._objects is not None and _is_kept(tensor, note, self._objects):
            return
        while (inner := inner_of(tensor)) is not None:
            tensor = inner
        if why_valueless(tensor) is not None:
            note.update(_without_values(tensor))
        elif (taken_apart := _parts_of(tensor)) is not None:
            parts, facts = taken_apart
            own = {word: self.add(part.detach(), f"{name}.{word}") for word, part in parts.items()}
            note.update(parts=own, **facts)
        elif (why := _why_not_written(tensor)) is not None:
            note.update(text=text_of(tensor), why=why)
        elif tensor.layout is not torch.strided:
            self._group(tensor.to_dense(), name, note)
        else:
            note.update({flag: True for flag in ("conj", "neg") if getattr(tensor, f"is_{flag}")()})
            self._group(tensor.detach(), name, note)

    def _write(self, added: _Added) -> None:
        """Writes a tensor; of expanded sides one slice, of gaps in its memory nothing."""
        tensor, note, name = added.tensor, added.note, self._claim(added.name)
        note["key"] = name
        if not _has_default_strides(tensor):
            tensor = _one_slice(tensor)
            if tensor.shape != added.tensor.shape:
                note["shape"] = list(added.tensor.shape)
            if is_dense(tensor.shape, tensor.stride()):
                note["strides"] = list(tensor.stride())
        if tensor.dtype not in _STORED:
            note["dtype"] = word_of(tensor.dtype)
        self._written[name] = tensor


def _is_kept(tensor: Tensor, note: Note, objects: LiveObjects) -> bool:
    """Keeps a tensor that has no other form as it is, and of a subclass its class."""
    is_whole = inner_of(tensor) is None
    if is_whole and (why_valueless(tensor) is not None or _parts_of(tensor) is not None):
        return False
    if not is_whole or _why_not_written(tensor) is not None:
        note["kept"] = objects.keep(tensor.detach())
        return True
    if type(tensor) not in (Tensor, Parameter):
        note["class"], note["attributes"] = map(objects.keep, (type(tensor), vars(tensor)))
    return False


def _flags_of(tensor: Tensor) -> Note:
    """The flags of a tensor that autograd and modules read."""
    flags = {
        "param": isinstance(tensor, Parameter),
        "grad": tensor.requires_grad and tensor.is_leaf,
    }
    return {flag: True for flag, is_set in flags.items() if is_set}


def _one_slice(tensor: Tensor) -> Tensor:
    """The tensor, with one slice of each expanded side."""
    if tensor.numel():
        for side, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size > 1 and not stride:
                tensor = tensor.narrow(side, 0, 1)
    return tensor


def _owner(group: Sequence[_Added]) -> _Added | None:
    """A tensor whose memory contains that of all others, preferably a contiguous one."""
    regions = [region_of(added.tensor) for added in group]
    start, end = min(r.start for r in regions), max(r.end for r in regions)
    able = [
        added
        for added, region in zip(group, regions, strict=True)
        if (region.start, region.end) == (start, end)
        and is_dense(region.shape, region.strides)
        and not (added.tensor.is_conj() or added.tensor.is_neg())
    ]
    return min(able, key=lambda added: not added.tensor.is_contiguous(), default=None)


def _note_view(added: _Added, owner: _Added) -> None:
    """Completes the note of a tensor that lies in the memory of `owner`."""
    region = region_of(added.tensor)
    distance = region.start - region_of(owner.tensor).start
    offset = distance // region.item_bytes if region.num_elements else 0
    added.note.update(
        of=owner.note,
        dtype=word_of(added.tensor.dtype),
        view=[offset, list(region.shape), list(region.strides)],
    )


def _parts_of(tensor: Any) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The plain tensors that a nested, sparse or quantized tensor consists of, and other facts."""
    if tensor.is_nested:
        return _nested_parts(tensor)
    shape = list(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        parts = {"indices": tensor._indices(), "values": tensor._values()}
        return parts, {"kind": "sparse_coo", "shape": shape, "coalesced": tensor.is_coalesced()}
    if tensor.layout in COMPRESSED:
        words = (*COMPRESSED[tensor.layout], "values")
        facts = {"kind": word_of(tensor.layout), "shape": shape}
        return {word: getattr(tensor, word)() for word in words}, facts
    return _quantized_parts(tensor) if tensor.dtype in QUANTIZED else None


def _nested_parts(tensor: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if tensor.layout is not torch.jagged:
        parts = {str(number): part for number, part in enumerate(tensor.unbind())}
        return parts, {"kind": "nested", "dtype": word_of(tensor.dtype)}
    parts = {"values": tensor.values(), "offsets": tensor.offsets()}
    if tensor.lengths() is not None:
        parts["lengths"] = tensor.lengths()
    return parts, {"kind": "jagged", "ragged": getattr(tensor, "_ragged_idx", 1)}


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


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if the elements of a tensor fill its memory, without gaps and overlaps, in any order."""
    region = Region(0, tuple(shape), tuple(strides), 1)
    if not region.num_elements:
        return True
    return region.end == region.num_elements and not region.overlaps_itself


def _has_default_strides(tensor: Tensor) -> bool:
    """Stricter than `is_contiguous`, which ignores the strides of sides of size 1."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True


def _is_plain(tensor: Tensor) -> bool:
    """True for numbers in memory, which most tensors are: no flag, subclass, or special layout."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta or tensor.requires_grad)
        and not (tensor.is_conj() or tensor.is_neg() or is_functorch_wrapped_tensor(tensor))
    )


def _why_not_written(tensor: Tensor) -> str | None:
    """Why no file can hold the numbers of a tensor; None if one can."""
    kind = type(tensor)
    if tensor.is_quantized:
        return f"it is of {tensor.dtype}, which has several numbers in a byte."
    if tensor.layout is not torch.strided:
        return None
    if kind not in (Tensor, Parameter) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return "it is of a class of its own."
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return "it has no memory of its own."
    return None
