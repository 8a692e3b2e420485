"""Comparing tensors by value: bit for bit, with NaN equal to NaN."""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from torchlens._recording.wrappers import has_memory, holds_others, inner_of, local_value

Tensor = torch.Tensor

# How far a repeated computation may be off, in units of the last place of the largest element:
# kernels split their work by the alignment of memory, which differs between runs.
_ULPS = {torch.float64: 32, torch.float32: 32, torch.complex64: 32, torch.complex128: 32}
_ULPS_SHORT = 2
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_ROWS = (Tensor.crow_indices, Tensor.col_indices)
_COLUMNS = (Tensor.ccol_indices, Tensor.row_indices)
# What locates the values of a sparse tensor, by layout.
_INDICES: dict[torch.layout, tuple[Callable[[Tensor], Tensor], ...]] = {
    torch.sparse_coo: (Tensor.indices,),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


def same(first: Any, second: Any) -> bool:
    """True if two tensors have the same type, shape and elements."""
    if first is second:
        return isinstance(first, Tensor)
    return _are_plainly_equal(first, second) or _compared(first, second, _same_plain)


def _are_plainly_equal(first: Any, second: Any) -> bool:
    """True for most tensors that are the same; the quick way."""
    if type(first) not in _PLAIN or type(second) not in _PLAIN or first.dtype is not second.dtype:
        return False
    try:
        is_stored = bool(first.data_ptr() and second.data_ptr())
        return is_stored and first.layout is second.layout and torch.equal(first, second)
    except (NotImplementedError, RuntimeError):  # without values, on two devices, 4-bit numbers
        return False


def close(first: Any, second: Any) -> bool:
    """True if two tensors are the same up to rounding."""
    return same(first, second) or _compared(first, second, _close_plain)


def _compared(first: Any, second: Any, compare: Callable[[Tensor, Tensor], bool]) -> bool:
    first, second = _comparable(first, second)
    if (
        not isinstance(first, Tensor)
        or not isinstance(second, Tensor)
        or not _is_alike(first, second)
    ):
        return False
    if _is_stand_in(first) or _is_stand_in(second):
        return True
    ours, theirs = _parts(first), _parts(second)
    return len(ours) == len(theirs) and all(map(compare, ours, theirs))


def difference(first: Tensor, second: Tensor) -> str:
    """How `second` differs from `first`, as text."""
    first, second = _comparable(first, second)
    if not _is_alike(first, second):
        return brief(second)
    ours, theirs = _parts(first), _parts(second)
    if len(ours) != 1 or len(theirs) != 1 or ours[0].shape != theirs[0].shape:
        return f"{brief(second)} with other elements"
    a, b = _as_numbers(ours[0]), _as_numbers(theirs[0])
    try:
        differs = _differs(a, b)
    except (NotImplementedError, RuntimeError):  # torch cannot compare this type
        return f"{brief(second)} with other elements"
    count = int(differs.sum())
    if not count:
        return "the same"
    index = tuple(differs.nonzero()[0].tolist())
    return (
        f"{count} of {a.numel()} elements differ (at {list(index)}: {a[index].item():.6g}, here "
        f"{b[index].item():.6g})"
    )


def has_elements(tensor: Tensor) -> bool:
    """True if a tensor has elements in memory: not if it is empty, meta, fake, lazy or freed, nor
    if it represents another tensor inside a transformed or traced function.
    """
    tensor = local_value(tensor)
    if is_lazy(tensor) or tensor.is_meta or isinstance(tensor, FakeTensor) or _is_stand_in(tensor):
        return False
    return tensor.numel() > 0 and has_memory(tensor)


def _is_stand_in(tensor: Tensor) -> bool:
    """True if it represents another tensor inside a transformed (`vmap`) or traced function."""
    return torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(
        tensor
    )


def brief(tensor: Any) -> str:
    """`2x3 float32`."""
    if not isinstance(tensor, Tensor):
        return "nothing" if tensor is None else f"a {type(tensor).__name__}"
    try:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
    except RuntimeError:  # nested tensors of the strided layout; parameters of lazy modules
        shape = f"nested of {tensor.size(0)}" if tensor.is_nested else "uninitialised"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


def _comparable(first: Any, second: Any) -> tuple[Any, Any]:
    """The local parts of two tensors; distributed tensors of different shapes as they are."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return first, second
    are_distributed = inner_of(first) is not None and inner_of(second) is not None
    if are_distributed and first.shape != second.shape:
        return first, second
    return local_value(first), local_value(second)


def _is_alike(first: Tensor, second: Tensor) -> bool:
    if is_lazy(first) or is_lazy(second):
        return type(first) is type(second)
    kinds = (
        (t.is_meta, isinstance(t, FakeTensor), t.dtype, t.layout, t.is_nested)
        for t in (first, second)
    )
    return len(set(kinds)) == 1 and (first.is_nested or first.shape == second.shape)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain dense tensors that a tensor is made of; none if it has no elements to compare."""
    if not has_elements(tensor):
        return []
    inner = _inner_tensors(tensor)
    if inner is not None:
        return [part for own in inner for part in _parts(own)]
    tensor = tensor.detach()
    if tensor.is_quantized:
        return [tensor.int_repr()]
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    return [tensor.resolve_conj().resolve_neg()]


def _inner_tensors(tensor: Any) -> list[Tensor] | None:
    """The tensors that a nested, sparse or wrapping tensor is made of; None for dense ones."""
    if tensor.is_nested:
        return list(tensor.detach().unbind())
    has_own_dispatch = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if has_own_dispatch and hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    if has_own_dispatch or holds_others(tensor):
        held = [value for _, value in sorted(vars(tensor).items()) if isinstance(value, Tensor)]
        return [own for own in held if own is not tensor]
    return _sparse_parts(tensor.detach()) if tensor.layout in _INDICES else None


def _sparse_parts(tensor: Tensor) -> list[Tensor]:
    tensor = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor
    return [*(read(tensor) for read in _INDICES[tensor.layout]), tensor.values()]


def _same_plain(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.device != b.device:
        b = b.to(a.device)
    try:
        if a.dtype.itemsize > 1 or not a.dtype.is_floating_point:  # 8-bit floats: no arithmetic
            if torch.equal(*_in_long_words(a, b)):
                return True
            return _can_be_nan(a) and not bool(_differs(a, b).any())  # NaN, or 0 and -0
    except (NotImplementedError, RuntimeError):  # torch cannot compare complex32, int4, ...
        pass
    return torch.equal(_bytes_of(a), _bytes_of(b))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _in_long_words(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The same memory as 64-bit integers if it is aligned: comparing takes half the time."""
    if a.is_contiguous() and b.is_contiguous() and not a.numel() * a.element_size() % 8:
        start, other = a.storage_offset() * a.element_size(), b.storage_offset() * b.element_size()
        if a.numel() > 1024 and not start % 8 and not other % 8:
            return a.view(-1).view(torch.int64), b.view(-1).view(torch.int64)
    return a, b


def _close_plain(a: Tensor, b: Tensor) -> bool:
    if _same_plain(a, b):
        return True
    if a.shape != b.shape or not _can_be_nan(a) or a.dtype.itemsize == 1:
        return False
    try:
        differs = _differs(a, b)
        finite = a[torch.isfinite(a)]
    except (NotImplementedError, RuntimeError):
        return False
    ours, theirs = a[differs], b[differs]
    if not len(finite) or not bool((torch.isfinite(ours) & torch.isfinite(theirs)).all()):
        return False
    ulp = torch.finfo(a.dtype).eps * float(finite.abs().max())
    return float((ours - theirs).abs().max()) <= _ULPS.get(a.dtype, _ULPS_SHORT) * ulp


def _differs(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~((a != a) & (b != b))


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _as_numbers(tensor: Tensor) -> Tensor:
    return (
        tensor.float() if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor
    )
