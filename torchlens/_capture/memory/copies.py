"""Copies of tensors. Tensors that share memory share one copy of it, if that is less to copy."""

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torchlens._recording.regions import region_of, storage_of
from torchlens._recording.wrappers import copy_of

Tensor = torch.Tensor
_clone_all = getattr(torch, "_foreach_clone", None)  # not in every version of torch
_ALIGNMENT = 16  # bytes; no element is larger
# Below this total size, copies do not share memory.
_SMALL = 1 << 16  # bytes


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in the autograd graph of the tensors; copies of real tensors are never fake."""
    # The writing code may run under no_grad, like the forward of a custom function.
    with unset_fake_temporarily(), torch.enable_grad():
        return _copies_of(tensors)


def _copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    # Other tensors may have symbolic sizes, which must not be compared.
    simple = [tensor for tensor in tensors if type(tensor) is Tensor and not tensor.is_nested]
    if sum(tensor.numel() * tensor.element_size() for tensor in simple) < _SMALL:
        return _copies_apart(tensors)
    copies: dict[int, Tensor] = {}
    together: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if _is_plain(tensor):
            together.setdefault(storage_of(tensor), []).append(tensor)
    for group in together.values():
        regions = list(map(region_of, group))
        start, end = min(region.start for region in regions), max(region.end for region in regions)
        start -= start % _ALIGNMENT
        if (
            sum(tensor.numel() * tensor.element_size() for tensor in group)
            > end - start + _ALIGNMENT
        ):
            memory = _bytes_between(group[0], start, end)
            copies.update({id(tensor): _same_view(tensor, memory, start) for tensor in group})
    alone = [tensor for tensor in tensors if id(tensor) not in copies]
    copies.update(zip(map(id, alone), _copies_apart(alone), strict=True))
    return [copies[id(tensor)] for tensor in tensors]


def _is_plain(tensor: Tensor) -> bool:
    """True if the tensor is plain memory: dense, without gradients, conj or neg bits."""
    return (
        type(tensor) is Tensor
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_meta)
        and storage_of(tensor) >= 0
    )


def _bytes_between(tensor: Tensor, start: int, end: int) -> Tensor:
    """A copy of some bytes of the tensor's storage."""
    memory = torch.empty(
        -(-(end - start) // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8, device=tensor.device
    )
    source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    source.set_(tensor.untyped_storage(), start, (end - start,), (1,))
    memory[: end - start].copy_(source)
    return memory


def _same_view(tensor: Tensor, memory: Tensor, start: int) -> Tensor:
    """A tensor in `memory`, laid out like `tensor` in its own memory from byte `start` on."""
    offset = int(tensor.storage_offset()) - start // tensor.element_size()
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset)


def _copies_apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    if len(tensors) == 1:  # takes less time than a list of one
        return [_copy_apart(tensors[0])]
    if _clone_all is not None and all(
        type(tensor) is Tensor and not tensor.requires_grad for tensor in tensors
    ):
        try:
            return list(_clone_all(list(tensors)))
        except (NotImplementedError, RuntimeError):
            # A kind of tensor that can only be cloned alone.
            pass
    return list(map(_copy_apart, tensors))


def _copy_apart(tensor: Tensor) -> Tensor:
    try:
        return copy_of(tensor)
    except NotImplementedError:  # sub-byte types, which torch cannot copy
        return tensor
    except RuntimeError:  # one of several views of one call, whose base was written since
        return tensor.detach().clone()
