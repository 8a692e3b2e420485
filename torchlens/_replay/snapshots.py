"""The arguments of a call, set aside so that the call can be made again.

A snapshot is a copy of its own, taken without asking the log's memory of what was written when:
that is what is being proved. A tensor that still has the value of the last snapshot of the same
memory shares it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from torchlens._recording.regions import Region, region_of, storage_of
from torchlens._recording.trees import SLICE_BOUNDS, Path
from torchlens._recording.wrappers import copy_of, inner_of
from torchlens._replay.values import same

Tensor = torch.Tensor
# Arguments with tensors, generators and arrays set aside: see `Snapshots.freeze`.
Frozen = Any
_ATOMS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A tensor as it was: its value, and the memory it looked at (`region` is None where it looks
    at none).

    Where `is_conj` or `is_neg`, the value is the conjugate or the negative of what lies in memory.

    Snapshots of one tensor, in the sense of Python's `is`, have one `identity`; `inner` are those
    of the tensors that it stands for (see `_recording/wrappers.py`).
    """

    value: Tensor
    storage: int
    region: Region | None
    requires_grad: bool
    identity: int
    inner: tuple[int, ...] = ()
    is_conj: bool = False
    is_neg: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    type: type
    items: tuple[Frozen, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Mapping:
    items: dict[Any, Frozen]


@dataclass(frozen=True, slots=True, eq=False)
class _Slice:
    bounds: dict[str, Frozen]


@dataclass(frozen=True, slots=True, eq=False)
class _Generator:
    device: torch.device
    state: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Array:
    value: Any


class Snapshots:
    """Takes snapshots and remembers the last one of each place in memory. To be used from
    `apart`.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[Any, ...], Tensor] = {}
        # Tensors that were seen stay until `forget`, so that no other gets their id or their
        # memory.
        self._seen: dict[int, Tensor] = {}
        # Types of tensors that cannot be copied: their snapshots are the tensors themselves.
        self.uncopied: dict[str, int] = {}

    def forget(self) -> None:
        """Lets go of all that was only kept to tell tensors apart."""
        self._last.clear()
        self._seen.clear()

    def take(self, tensor: Tensor, with_storage: bool = False) -> Snapshot:
        """A snapshot of `tensor`; `with_storage` also of the memory around it, for functions that
        reach beyond.
        """
        self._seen.setdefault(id(tensor), tensor)
        region = _region_of(tensor)
        storage = storage_of(tensor)
        if with_storage and region is not None:
            return Snapshot(
                _copy_with_storage(tensor), storage, region, tensor.requires_grad, id(tensor)
            )
        key = None if region is None or tensor.is_meta else _key(tensor, region)
        last = self._last.get(key) if key is not None else None
        if last is None or not same(last, tensor):
            last = self._copy(tensor, region)
            if key is not None:
                self._last[key] = last
        is_conj, is_neg = (False, False) if region is None else (tensor.is_conj(), tensor.is_neg())
        return Snapshot(
            last,
            storage,
            region,
            tensor.requires_grad,
            id(tensor),
            self._inner_of(tensor),
            is_conj,
            is_neg,
        )

    def _inner_of(self, tensor: Tensor) -> tuple[int, ...]:
        found: list[int] = []
        inner = inner_of(tensor)
        while inner is not None:
            self._seen.setdefault(id(inner), inner)
            found.append(id(inner))
            inner = inner_of(inner)
        return tuple(found)

    def _copy(self, tensor: Tensor, region: Region | None) -> Tensor:
        if is_lazy(tensor):
            return tensor
        try:
            return _as_class(type(tensor), _copy(tensor, region), tensor)
        except (NotImplementedError, RuntimeError, TypeError):
            name = f"{type(tensor).__name__} ({tensor.dtype})"
            self.uncopied[name] = self.uncopied.get(name, 0) + 1
            return tensor

    def know(self, tensor: Tensor, copy: Tensor) -> None:
        """Takes `copy` for the last snapshot of `tensor`."""
        if is_lazy(tensor):
            return
        region = _region_of(tensor)
        if region is not None and not tensor.is_meta and copy.stride() == tensor.stride():
            self._last[_key(tensor, region)] = copy

    def freeze(self, tree: Any, with_storage: bool = False) -> Frozen:
        """`tree` with snapshots in place of tensors; lists and dicts are copied, so that nobody
        changes them.
        """
        if isinstance(tree, Tensor):
            return self.take(tree, with_storage)
        if isinstance(tree, torch.Generator):
            return _Generator(tree.device, tree.get_state())
        if isinstance(tree, np.ndarray):
            return _Array(tree.copy())
        if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
            return _Sequence(type(tree), tuple(self.freeze(item, with_storage) for item in tree))
        if isinstance(tree, slice):
            return _Slice(
                {name: self.freeze(getattr(tree, name), with_storage) for name in SLICE_BOUNDS}
            )
        if type(tree) is dict:
            return _Mapping({key: self.freeze(item, with_storage) for key, item in tree.items()})
        return tree


def frozen_tensors(frozen: Frozen, path: Path = ()) -> Iterator[tuple[Path, Snapshot]]:
    """The snapshots in a frozen tree, with the path to each."""
    if isinstance(frozen, Snapshot):
        yield path, frozen
    elif isinstance(frozen, _Sequence):
        for index, item in enumerate(frozen.items):
            yield from frozen_tensors(item, (*path, index))
    elif isinstance(frozen, _Mapping):
        for key, item in frozen.items.items():
            yield from frozen_tensors(item, (*path, key))
    elif isinstance(frozen, _Slice):
        for name, bound in frozen.bounds.items():
            yield from frozen_tensors(bound, (*path, name))


def thaw(frozen: Frozen, tensor_of: Callable[[Path, Snapshot], Tensor], path: Path = ()) -> Any:
    """The tree that was frozen, with `tensor_of(path, snapshot)` for each tensor."""
    if isinstance(frozen, Snapshot):
        return tensor_of(path, frozen)
    if isinstance(frozen, _Generator):
        generator = torch.Generator(frozen.device)
        generator.set_state(frozen.state)
        return generator
    if isinstance(frozen, _Slice):
        return slice(
            *(thaw(bound, tensor_of, (*path, name)) for name, bound in frozen.bounds.items())
        )
    if isinstance(frozen, _Array):
        return frozen.value.copy()
    if isinstance(frozen, _Sequence):
        items = [thaw(item, tensor_of, (*path, index)) for index, item in enumerate(frozen.items)]
        if hasattr(frozen.type, "_fields"):
            return frozen.type(*items)
        try:
            return frozen.type(items)
        except TypeError:  # a list or tuple that is made in a way of its own
            return items if issubclass(frozen.type, list) else tuple(items)
    if isinstance(frozen, _Mapping):
        return {key: thaw(item, tensor_of, (*path, key)) for key, item in frozen.items.items()}
    return frozen


def is_same_as_frozen(argument: Any, frozen: Frozen) -> bool:
    """Whether an argument that is kept without its tensors (None in their place) is the one that
    was frozen.

    Two runs stand between them: of an object that the model may have made anew, only the type can
    be compared.
    """
    if isinstance(frozen, Snapshot):
        return argument is None
    if isinstance(frozen, _Sequence):
        if not isinstance(argument, list | tuple) or len(argument) != len(frozen.items):
            return False
        return all(map(is_same_as_frozen, argument, frozen.items))
    if isinstance(frozen, _Mapping):
        if not isinstance(argument, dict) or list(argument) != list(frozen.items):
            return False
        return all(map(is_same_as_frozen, argument.values(), frozen.items.values()))
    if isinstance(frozen, _Slice):
        if not isinstance(argument, slice):
            return False
        return all(
            is_same_as_frozen(getattr(argument, name), bound)
            for name, bound in frozen.bounds.items()
        )
    if isinstance(frozen, _Generator):
        return isinstance(argument, torch.Generator)
    if isinstance(frozen, _Array):
        return isinstance(argument, np.ndarray) and np.array_equal(
            argument, frozen.value, equal_nan=_has_nan(argument)
        )
    if type(argument) is not type(frozen):
        return False
    return (
        not isinstance(argument, _ATOMS)
        or argument == frozen
        or (argument != argument and frozen != frozen)
    )


def _has_nan(array: Any) -> bool:
    return bool(array.dtype.kind in "fc")


def _region_of(tensor: Tensor) -> Region | None:
    """The memory a tensor looks at; None where its elements are not simply there (sparse, nested,
    quantized).
    """
    if (
        is_lazy(tensor)
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
    ):
        return None
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or storage_of(tensor) < 0:
        return None
    return region_of(tensor)


def _key(tensor: Tensor, region: Region) -> tuple[Any, ...]:
    return (
        tensor.data_ptr(),
        region.shape,
        region.strides,
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _copy(tensor: Tensor, region: Region | None) -> Tensor:
    """A copy with the same strides: kernels choose by them, and views need them."""
    tensor = tensor.detach()
    if region is None:
        return copy_of(tensor)
    repeated = [
        dim for dim, stride in enumerate(tensor.stride()) if stride == 0 and tensor.size(dim) > 1
    ]
    if repeated:
        shape = tensor.shape
        for dim in repeated:
            tensor = tensor.narrow(dim, 0, 1)
        return _copy(tensor, region).expand(shape)
    copy = tensor.clone()
    if copy.stride() != tensor.stride() and _reach(tensor) <= 4 * tensor.numel():
        with_gaps = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        if not torch._debug_has_internal_overlap(with_gaps):
            return with_gaps.copy_(copy)
    return copy


def _as_class(kind: type[Tensor], copy: Tensor, tensor: Tensor) -> Tensor:
    """The copy as one of the same class, if that class has a say in what operations do."""
    if (
        _handler_of(kind) is _handler_of(Tensor)
        or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    ):
        return copy
    if issubclass(kind, torch.nn.Parameter | torch.nn.Buffer):
        return copy
    copy = torch._C.TensorBase.as_subclass(
        copy, kind
    )  # as it is: that of Tensor is patched during a log
    vars(copy).update(vars(tensor))
    return copy


def _handler_of(kind: type[Tensor]) -> Any:
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)


def _reach(tensor: Tensor) -> int:
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _copy_with_storage(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    torch._C.TensorBase.set_(
        copy, storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )  # as it is, likewise
    return copy
