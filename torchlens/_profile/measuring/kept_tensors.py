"""Activations kept for backward: the tensors that autograd's nodes hold on to."""

from collections.abc import Iterator
from typing import Any

import torch

from torchlens._recording.trees import plain_tensors

# Whether what nodes keep can be read without unpacking it; not in every version of torch.
CAN_TELL = hasattr(torch._C._autograd.SavedTensor, "data")
_names_by_type: dict[type, tuple[str, ...]] = {}


def saved_storages(node: Any) -> Iterator[tuple[int, int]]:
    """Each storage that a node keeps, with its bytes.

    Read as it lies there, without unpacking: that would compute a checkpointed part of the model
    anew.
    """
    kind = type(node)
    names = _names_by_type.get(kind)
    if names is None:
        names = _names_by_type[kind] = tuple(
            name for name in dir(node) if name.startswith("_raw_saved_")
        )
    for name in names:
        try:
            kept = getattr(node, name)
        except RuntimeError:  # freed: backward has been through it
            continue
        for item in kept if isinstance(kept, list | tuple) else (kept,):
            data = getattr(item, "data", None)
            # What hooks of the user's packed may be anything, a pair of a tensor and a device for
            # instance.
            for tensor in (
                (data,)
                if isinstance(data, torch.Tensor)
                else [tensor for _, tensor in plain_tensors(data)]
            ):
                yield from storages_of(tensor)


def storages_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The storage of a tensor, with its bytes; nothing for tensors without one."""
    key = storage_key(tensor)
    return [] if key is None else [(key, tensor.untyped_storage().nbytes())]


def storage_key(tensor: Any) -> int | None:
    """What tells a storage from others while it lives; None for tensors without one."""
    try:
        key: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError, ValueError):  # sparse and lazy tensors and the like
        return None
    return key
