"""Comparing tensors by value: bit for bit, with NaN equal to NaN."""

from typing import Any

import torch

from torchlens.capture.valueless import why_valueless
from torchlens.capture.wrappers import holds_others, inner_of, local_value

__all__ = ["brief", "close", "difference", "same"]

Tensor = torch.Tensor

# How far, in units of the last place of the largest element, a repeated computation may be off. Kernels split their work
# by the alignment of the memory they are given, and memory cannot be put where it was.
_ULPS = {torch.float64: 32, torch.float32: 32, torch.complex64: 32, torch.complex128: 32}
_ULPS_SHORT = 2


def same(first: Any, second: Any) -> bool:
    """Whether two tensors have the same type, shape and elements."""
    if first is second:
        return isinstance(first, Tensor)
    first, second = _comparable(first, second)
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or not _is_alike(first, second):
        return False
    ours, theirs = _parts(first), _parts(second)
    return len(ours) == len(theirs) and all(map(_same_plain, ours, theirs))


def close(first: Any, second: Any) -> bool:
    """Whether two tensors are the same but for rounding."""
    if same(first, second):
        return True
    first, second = _comparable(first, second)
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or not _is_alike(first, second):
        return False
    ours, theirs = _parts(first), _parts(second)
    return len(ours) == len(theirs) and all(map(_close_plain, ours, theirs))


def difference(first: Tensor, second: Tensor) -> str:
    """How `second` differs from `first`, in a few words."""
    first, second = _comparable(first, second)
    if not _is_alike(first, second):
        return brief(second)
    ours, theirs = _parts(first), _parts(second)
    if len(ours) != 1 or len(theirs) != 1 or ours[0].shape != theirs[0].shape:
        return f"{brief(second)} with other elements"
    a, b = _as_numbers(ours[0]), _as_numbers(theirs[0])
    differs = _differs(a, b)
    count = int(differs.sum())
    if not count:
        return "the same"
    index = tuple(differs.nonzero()[0].tolist())
    return f"{count} of {a.numel()} elements differ (at {list(index)}: {a[index].item():.6g}, here {b[index].item():.6g})"


def brief(tensor: Any) -> str:
    """`2x3 float32`."""
    if not isinstance(tensor, Tensor):
        return "nothing" if tensor is None else f"a {type(tensor).__name__}"
    try:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
    except RuntimeError:  # nested tensors of the strided layout
        shape = f"nested of {tensor.size(0)}"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


def _comparable(first: Any, second: Any) -> tuple[Any, Any]:
    """The parts of two tensors that this process holds; as they are where they are spread in different ways."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return first, second
    is_spread = inner_of(first) is not None and inner_of(second) is not None
    return (first, second) if is_spread and first.shape != second.shape else (local_value(first), local_value(second))


def _is_alike(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.layout != second.layout or first.is_nested != second.is_nested:
        return False
    return first.is_nested or first.shape == second.shape


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain dense tensors that a tensor is made of; none where it has no values to compare."""
    if holds_others(tensor):
        return [part for own in vars(tensor).values() if isinstance(own, Tensor) for part in _parts(own)]
    tensor = tensor.detach()
    if why_valueless(tensor) is not None:
        return []
    if tensor.is_nested:
        return [part for own in tensor.unbind() for part in _parts(own)]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), *_parts(tensor.values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), *_parts(tensor.values())]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), *_parts(tensor.values())]
    if tensor.is_quantized:
        return [tensor.int_repr()]
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    return [tensor.resolve_conj().resolve_neg()]


def _same_plain(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.device != b.device:
        b = b.to(a.device)
    if a.dtype.itemsize == 1 and a.dtype.is_floating_point:  # 8-bit floats know no arithmetic
        return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    if torch.equal(*_in_long_words(a, b)):
        return True
    return _can_be_nan(a) and not bool(_differs(a, b).any())  # NaN, or 0 and -0


def _in_long_words(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The same memory read eight bytes at a time, where it can be: comparing takes half the time then."""
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
    differs = _differs(a, b)
    ours, theirs = a[differs], b[differs]
    finite = a[torch.isfinite(a)]
    if not len(finite) or not bool((torch.isfinite(ours) & torch.isfinite(theirs)).all()):
        return False
    ulp = torch.finfo(a.dtype).eps * float(finite.abs().max())
    return float((ours - theirs).abs().max()) <= _ULPS.get(a.dtype, _ULPS_SHORT) * ulp


def _differs(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~((a != a) & (b != b))


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _as_numbers(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor
