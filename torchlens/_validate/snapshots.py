"""Copies of the arguments of a call, from which the call can be made again.

Copies do not rely on the log's record of writes in place, because that is what validation checks.
A tensor that still has the value of the last snapshot of the same memory shares that copy.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from torchlens._recording.regions import Region, region_of, storage_of
from torchlens._recording.trees import SLICE_BOUNDS, Path
from torchlens._recording.wrappers import copy_of, has_memory, holds_others, inner_of
from torchlens._replay.values import same

Tensor = torch.Tensor
# Arguments with snapshots in place of tensors: see `Snapshots.freeze`.
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
    """The value of a tensor at one moment, and the memory that it viewed (`region` is None if it
    has no strided memory).

    With `is_conj` or `is_neg`, the value is the conjugate or the negative of what is in memory.
    `identity` is the id of the tensor, and `inner` the ids of the tensors that it wraps (see
    `_recording/wrappers.py`).
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
class _Generator:
    device: torch.device
    state: Tensor


# The types of most leaves; what else has no items is one, too.
_LEAVES = frozenset({Snapshot, Tensor, torch.nn.Parameter, type(None), *_ATOMS})


class Snapshots:
    """Takes snapshots inside `unseen`, and remembers the last one of each region of memory."""

    def __init__(self) -> None:
        self._last: dict[tuple[Any, ...], Tensor] = {}
        # Keeps tensors alive until `forget`, so that no other gets their id or their memory.
        self._seen: dict[int, Tensor] = {}
        # Types of tensors that cannot be copied, with counts; their snapshots are the tensors.
        self.uncopied: dict[str, int] = {}

    def forget(self) -> None:
        """Releases what was kept to tell tensors apart."""
        self._last.clear()
        self._seen.clear()

    def take(self, tensor: Tensor, with_storage: bool = False) -> Snapshot:
        """A snapshot of `tensor`; `with_storage` copies its whole storage, for functions that read
        beyond the tensor.
        """
        self._seen.setdefault(id(tensor), tensor)
        region = _region_of(tensor)
        storage = storage_of(tensor)
        if with_storage and region is not None:
            return Snapshot(
                _copy_with_storage(tensor), storage, region, tensor.requires_grad, id(tensor)
            )
        is_conj, is_neg = (False, False) if region is None else (tensor.is_conj(), tensor.is_neg())
        return Snapshot(
            self._last_copy(tensor, region),
            storage,
            region,
            tensor.requires_grad,
            id(tensor),
            self._inner_of(tensor),
            is_conj,
            is_neg,
        )

    def _last_copy(self, tensor: Tensor, region: Region | None) -> Tensor:
        """A copy of the tensor: the last one of its memory, if it still has these values."""
        if region is None or tensor.is_meta or not has_memory(tensor):
            return self._copy(tensor, region)
        key = _key(tensor, region)
        last = self._last.get(key)
        if last is None or not same(last, tensor):
            last = self._last[key] = self._copy(tensor, region)
        return last

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
        if not has_memory(tensor):
            return torch.empty_like(tensor, device="meta")
        try:
            copy = _as_class(type(tensor), _copy(tensor, region), tensor)
        except (NotImplementedError, RuntimeError, TypeError):
            copy = None
        # Some wrappers, such as of packed weights, become what they stand for when they are copied.
        if copy is not None and (type(copy) is type(tensor) or not holds_others(tensor)):
            return copy
        name = f"{type(tensor).__name__} ({tensor.dtype})"
        self.uncopied[name] = self.uncopied.get(name, 0) + 1
        return tensor

    def know(self, tensor: Tensor, copy: Tensor) -> None:
        """Registers `copy` as the last snapshot of `tensor`."""
        if is_lazy(tensor):
            return
        region = _region_of(tensor)
        if region is not None and not tensor.is_meta and copy.stride() == tensor.stride():
            self._last[_key(tensor, region)] = copy

    def freeze(self, tree: Any, with_storage: bool = False) -> Frozen:
        """A copy of `tree` with snapshots in place of tensors, so that later changes do not reach
        it.
        """

        def frozen(path: Path, leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.take(leaf, with_storage)
            if isinstance(leaf, torch.Generator):
                return _Generator(leaf.device, leaf.get_state())
            return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

        return _rebuilt(tree, frozen)


def frozen_tensors(frozen: Frozen) -> Iterator[tuple[Path, Snapshot]]:
    """The snapshots in a frozen tree, with the path to each."""
    return ((path, leaf) for path, leaf in _leaves(frozen) if isinstance(leaf, Snapshot))


def thaw(frozen: Frozen, tensor_of: Callable[[Path, Snapshot], Tensor]) -> Any:
    """The tree that was frozen, with `tensor_of(path, snapshot)` for each tensor."""

    def thawed(path: Path, leaf: Any) -> Any:
        if isinstance(leaf, Snapshot):
            return tensor_of(path, leaf)
        if isinstance(leaf, _Generator):
            generator = torch.Generator(leaf.device)
            generator.set_state(leaf.state)
            return generator
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return _rebuilt(frozen, thawed)


def is_same_as_frozen(argument: Any, frozen: Frozen) -> bool:
    """True if an argument, kept with None in place of its tensors, equals the one that was frozen.

    The two may come from different runs: of an object that the model may have made anew, only the
    type is compared.
    """
    ours, theirs = list(_leaves(argument)), list(_leaves(frozen))
    return [path for path, _ in ours] == [path for path, _ in theirs] and all(
        _is_same_leaf(own, other) for (_, own), (_, other) in zip(ours, theirs, strict=True)
    )


def _is_same_leaf(argument: Any, frozen: Any) -> bool:
    if isinstance(frozen, Snapshot):
        return argument is None
    if isinstance(frozen, _Generator):
        return isinstance(argument, torch.Generator)
    if type(argument) is not type(frozen):
        return False
    if isinstance(frozen, np.ndarray):
        return np.array_equal(argument, frozen, equal_nan=frozen.dtype.kind in "fc")
    is_nan = isinstance(frozen, float | complex) and argument != argument and frozen != frozen
    return not isinstance(argument, _ATOMS) or argument == frozen or is_nan


# -- trees of arguments
# --------------------------------------------------------------------------------------------------


def _children(tree: Any) -> list[tuple[Any, Any]] | None:
    """The items of a list, tuple, dict or slice, with their keys; None for anything else."""
    if type(tree) in _LEAVES:
        return None
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return list(enumerate(tree))
    if isinstance(tree, slice):
        return [(name, getattr(tree, name)) for name in SLICE_BOUNDS]
    return list(tree.items()) if type(tree) is dict else None


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    children = _children(tree)
    if children is None:
        yield path, tree
    else:
        for key, item in children:
            yield from _leaves(item, (*path, key))


def _rebuilt(tree: Any, leaf: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """A copy of a tree with `leaf(path, item)` in place of each leaf."""
    children = _children(tree)
    if children is None:
        return leaf(path, tree)
    items = [_rebuilt(item, leaf, (*path, key)) for key, item in children]
    if isinstance(tree, slice):
        return slice(*items)
    if isinstance(tree, dict):
        return dict(zip(tree, items, strict=True))
    try:
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    except TypeError:  # the class has a constructor of its own
        return items if isinstance(tree, list) else tuple(items)


# -- copies
# --------------------------------------------------------------------------------------------------


def _region_of(tensor: Tensor) -> Region | None:
    """The memory that a tensor views; None for sparse, nested, quantized and wrapping tensors."""
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
    """A copy with the same strides, on which kernels and views depend."""
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
    """The copy as an instance of the same class, if that class overrides operations."""
    if (
        _handler_of(kind) is _handler_of(Tensor)
        or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    ):
        return copy
    if issubclass(kind, torch.nn.Parameter | torch.nn.Buffer):
        return copy
    # The base class's method: that of Tensor is patched during a log.
    copy = torch._C.TensorBase.as_subclass(copy, kind)
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
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    torch._C.TensorBase.set_(copy, storage, *place)  # the base class's method, as above
    return copy
