"""Prepares values for a copy: a pickle, a file of `torch.save`, another process, a deep copy.

`Packer` replaces each value by an object of a class below, which pickles, and copies deeply, as
that value. A `StandIn` replaces what cannot be pickled (a lambda) and what cannot be read (an
object whose class is not known there).

Tensors leave their autograd graph. Those that share memory share it in the copy; `pickle` alone
would write the whole memory once for each view. Many small tensors are written as one.
"""

import copy
import pickle
from collections.abc import Iterable
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from torchlens._recording.functions import StandIn, found_again, reference_to
from torchlens._recording.regions import region_of
from torchlens._recording.symbolic import SymbolicInt, inert, inert_sizes
from torchlens._recording.user_code import code_of_line, line_of_code
from torchlens._recording.wrappers import copy_of

_ATOMS = frozenset({
    int, float, bool, complex, str, bytes, type(None), type(Ellipsis), range, torch.dtype,
    torch.device, torch.layout,
    torch.memory_format, SymbolicInt,
})  # fmt: skip
FUNCTIONS = (
    FunctionType, BuiltinFunctionType, MethodDescriptorType, MethodWrapperType,
    WrapperDescriptorType, type,
    torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
_SPARSE = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)
_LONGEST_TEXT = 1000
_SMALL = 1 << 20  # memory up to this many bytes is written together with that of others
_POOL = 1 << 26  # bytes
_ALIGNED = 16  # bytes: a multiple of the size of every dtype


class Packer:
    """Packs the values of one log. Values that are one object, or share memory, do so in the
    copy.
    """

    def __init__(self, params: Iterable[Parameter] = ()) -> None:
        self.params = list(params)
        # By id: what was packed (so that the id stays its own), and what stands for it.
        self._packed: dict[int, tuple[Any, Any]] = {
            id(param): (param, _packed_parameter(param)) for param in self.params
        }
        self._storages: dict[int, _Storage] = {}
        self._codes: dict[tuple[int, int], _Code] = {}

    def pack(self, value: Any) -> Any:
        """The object that replaces `value` in a copy. Call `finish` before it is pickled."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is tuple or kind is list:
            items = [self.pack(item) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else kind(items)
        if kind is dict:
            return {self.pack(key): self.pack(item) for key, item in value.items()}
        if kind is slice:
            return slice(*map(self.pack, (value.start, value.stop, value.step)))
        if kind is torch.Size:
            return inert_sizes(value)
        if kind is torch.SymInt:
            return inert(value)
        known = self._packed.get(id(value))
        if known is None:
            known = self._packed[id(value)] = (value, self._pack_object(value))
        return known[1]

    def _pack_object(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                return self._pack_tensor(value)
        if isinstance(value, FUNCTIONS):
            return _Function(value)
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return value
        return _Object(value)

    def _pack_tensor(self, tensor: Tensor) -> Any:
        kind = type(tensor)
        if isinstance(tensor, FakeTensor):
            return _Fake(tensor)
        is_plain = (
            kind in (Tensor, Parameter) or kind.__torch_dispatch__ is Tensor.__torch_dispatch__
        )
        if not is_plain:
            return _Object(tensor)
        if tensor.layout in _SPARSE or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            return _Unusual(tensor.detach())
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a kind of tensor without memory of its own
            return _Object(tensor.detach())
        memory = self._storages.get(storage._cdata)
        if memory is None:
            memory = self._storages[storage._cdata] = _Storage(storage, tensor.dtype)
        region = region_of(tensor)
        memory.include(region.start, region.end)
        packed = _Tensor(tensor, memory)
        if kind is Tensor:
            return packed
        return _Subclass(kind, packed, {} if kind is Parameter else vars(tensor))

    def code(self, code: CodeType | None, instruction: int) -> Any:
        """The object that replaces a place in the user's code."""
        if code is None:
            return None
        key = (id(code), instruction)
        if key not in self._codes:
            self._codes[key] = _Code(code, instruction)
        return self._codes[key]

    def finish(self) -> None:
        """Decides which small storages are written together. Call it once, after all values."""
        pools: dict[torch.device, _Pool] = {}
        for storage in self._storages.values():
            if storage.num_bytes <= _SMALL:
                pool = pools.get(storage.device)
                if pool is None or pool.num_bytes + storage.num_bytes > _POOL:
                    pool = pools[storage.device] = _Pool()
                storage.place = (pool, pool.add(storage))


# -- tensors
# --------------------------------------------------------------------------------------------------


class _Storage:
    """The part of a storage that the packed tensors use."""

    def __init__(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self.device = storage.device
        self.start, self.end = storage.nbytes(), 0
        self.place: tuple[_Pool, int] | None = None
        self._storage = storage
        self._dtype = dtype

    def include(self, start: int, end: int) -> None:
        if start < end:
            self.start = min(self.start, start - start % _ALIGNED)
            self.end = max(self.end, min(end + -end % _ALIGNED, self._storage.nbytes()))

    @property
    def num_bytes(self) -> int:
        return max(0, self.end - self.start)

    def numbers(self) -> Tensor:
        """The bytes of that part, as a tensor."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        return empty.set_(self._storage, self.start, (self.num_bytes,), (1,))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.place is not None:
            pool, start = self.place
            return _from_pool, (pool.numbers, start, start + self.num_bytes)
        if self.num_bytes < self._storage.nbytes() or self.num_bytes % self._dtype.itemsize:
            return _storage_of, (self.numbers().clone(),)
        # Of the type that it is used as: torch refuses to save one memory as several types.
        return _storage_of, (
            torch.empty(0, dtype=self._dtype, device=self.device).set_(self._storage),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.UntypedStorage:
        return self.numbers().clone().untyped_storage()


class _Pool:
    """The storages of many small tensors, joined into one tensor."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._parts: list[_Storage] = []
        self._numbers: Tensor | None = None

    def add(self, part: _Storage) -> int:
        """Adds a storage; returns its offset in the pool."""
        start = self.num_bytes
        self._parts.append(part)
        self.num_bytes += part.num_bytes
        return start

    @property
    def numbers(self) -> Tensor:
        if self._numbers is None:
            self._numbers = torch.cat([part.numbers() for part in self._parts])
        return self._numbers


def _from_pool(pool: Tensor, start: int, end: int) -> torch.UntypedStorage:
    return pool[start:end].clone().untyped_storage()


def _storage_of(flat: Tensor) -> torch.UntypedStorage:
    return flat.untyped_storage()


class _Tensor:
    """A plain tensor: a view of a `_Storage`."""

    def __init__(self, tensor: Tensor, memory: _Storage) -> None:
        self._tensor = tensor
        self._memory = memory

    def _facts(self) -> tuple[Any, ...]:
        tensor = self._tensor
        offset = (
            tensor.storage_offset() - self._memory.start // tensor.element_size()
            if self._memory.num_bytes
            else 0
        )
        needs_grad = tensor.requires_grad and tensor.is_leaf
        flags = (tensor.is_conj(), tensor.is_neg(), needs_grad)
        return tensor.dtype, offset, tuple(tensor.shape), tensor.stride(), flags

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt_tensor, (self._memory, *self._facts())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        storage: Any = copy.deepcopy(self._memory, memo)
        return _rebuilt_tensor(storage, *self._facts())


def _rebuilt_tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    flags: tuple[bool, bool, bool],
) -> Tensor:
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(
        storage, offset, shape, strides
    )
    is_conj, is_neg, needs_grad = flags
    if is_conj:
        torch._C._set_conj(tensor, True)
    if is_neg:
        torch._C._set_neg(tensor, True)
    return tensor.requires_grad_() if needs_grad else tensor


class _Unusual:
    """A tensor that torch pickles itself: sparse, nested, quantized, or on the meta device."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._tensor,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._tensor.clone()


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Fake:
    """A fake tensor. Its pickle is a tensor on the meta device, or a `StandIn` if its sizes are
    symbolic.

    A deep copy must not copy its mode: torch would free the memory that the mode holds once for
    each copy (torch 2.13).
    """

    def __init__(self, tensor: FakeTensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self._tensor
        shape, strides = inert_sizes(tensor.shape), inert_sizes(tensor.stride())
        if any(isinstance(size, SymbolicInt) for size in (*shape, *strides)):
            return StandIn, (repr(tensor.detach()), "it is a fake tensor of symbolic sizes.")
        return _meta_tensor, (
            tuple(shape),
            strides,
            tensor.dtype,
            tensor.requires_grad,
            isinstance(tensor, Parameter),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = copy_of(self._tensor.detach())
        if isinstance(self._tensor, Parameter):
            return Parameter(copied, self._tensor.requires_grad)
        return copied


def _meta_tensor(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    needs_grad: bool,
    is_parameter: bool,
) -> Tensor:
    tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return Parameter(tensor, needs_grad) if is_parameter else tensor


class _Subclass:
    """A tensor of a subclass; it is read as a plain tensor where the class is not known."""

    def __init__(self, kind: type, plain: _Tensor, attributes: dict[str, Any]) -> None:
        self._parts: tuple[Any, ...] = (
            _Function(kind),
            plain,
            _Object(attributes) if attributes else {},
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt_subclass, self._parts

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _rebuilt_subclass(*copy.deepcopy(self._parts, memo))


def _rebuilt_subclass(kind: Any, plain: Tensor, attributes: Any) -> Tensor:
    if isinstance(kind, StandIn):
        return plain
    with torch._C.DisableTorchFunctionSubclass():
        tensor: Tensor = plain.detach().as_subclass(kind).requires_grad_(plain.requires_grad)
        tensor.__dict__.update(attributes if isinstance(attributes, dict) else {})
    return tensor


def _packed_parameter(param: Parameter) -> Any:
    """A parameter is pickled itself, so that a history and its model, pickled together, still share
    it.
    """
    if isinstance(param, FakeTensor):
        return _Fake(param)
    if type(param).__module__.partition(".")[0] == "torch":
        if all(type(value) in _ATOMS for value in vars(param).values()):
            return param
        if type(param) is Parameter:  # without the attributes that other code has set on it
            return Parameter(param.detach(), param.requires_grad)
    with torch._C.DisableTorchFunctionSubclass():
        empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
    return _Object(param, instead=Parameter(empty, param.requires_grad))


# -- all else
# --------------------------------------------------------------------------------------------------


class _Function:
    """A function or class, which is pickled by name."""

    def __init__(self, func: Any) -> None:
        self._func = func

    def __reduce__(self) -> tuple[Any, ...]:
        return found_again, (reference_to(self._func),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._func


class _Code:
    """A place in the user's code."""

    def __init__(self, code: CodeType, instruction: int) -> None:
        self._code = code
        self._instruction = instruction

    def __reduce__(self) -> tuple[Any, ...]:
        return code_of_line, line_of_code(self._code, self._instruction)


class _Object:
    """Any other object: pickled inside the pickle, so that the rest can be read where this
    cannot.
    """

    def __init__(self, value: Any, instead: Any = None) -> None:
        self._value = value
        self._instead = instead

    def __reduce__(self) -> tuple[Any, ...]:
        text = text_of(self._value)
        if isinstance(self._value, torch.nn.Module):
            return _stand_in, (text, "models are left where they are.", self._instead)
        try:
            return _opened, (
                pickle.dumps(self._value, pickle.DEFAULT_PROTOCOL),
                text,
                self._instead,
            )
        except Exception as error:  # the object's own code may raise anything
            return _stand_in, (
                text,
                f"it cannot be pickled ({type(error).__name__}: {error}).",
                self._instead,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if isinstance(self._value, torch.nn.Module):
            return self._value
        try:
            return copy.deepcopy(self._value, memo)
        except Exception:  # as above; what cannot be copied is shared
            return self._value


def _opened(data: bytes, text: str, instead: Any) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:  # its class is not known here, or does not take it back
        return _stand_in(
            text, f"it cannot be read back here ({type(error).__name__}: {error}).", instead
        )


def _stand_in(text: str, reason: str, instead: Any) -> Any:
    return StandIn(text, reason) if instead is None else instead


def text_of(value: Any) -> str:
    """The `repr` of a value, shortened."""
    try:
        text = repr(value)
    except Exception:  # the object's own `__repr__`
        text = object.__repr__(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
