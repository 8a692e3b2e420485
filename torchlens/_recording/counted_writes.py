"""Saved values of inference mode are exchanged for tensors whose writes torch counts.

torch counts no writes to tensors that were made under `torch.inference_mode()`, so that a write to
one that the user got from a log would change its saved value unnoticed.
"""

from weakref import WeakValueDictionary

import torch

from torchlens._recording.recording import Recording
from torchlens._recording.regions import is_plain_memory, storage_of
from torchlens._recording.unseen import NoTorchFunction, unseen

# By storage, one of the tensors in it that share a count. A live one keeps the storage's number.
_COUNTED: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()


def count_writes(recording: Recording, number: int) -> None:
    """Exchanges the saved value of a row, if it is a tensor of inference mode.

    All values in the same memory count the same writes, also those that are exchanged later.
    """
    value = recording.values[number]
    if not isinstance(value, torch.Tensor) or not value.is_inference():
        return
    if is_plain_memory(value):
        with unseen(), NoTorchFunction():
            recording.values[number] = _counted(value)
        recording.versions[number] = 0


def _counted(value: torch.Tensor) -> torch.Tensor:
    """A tensor in the same memory; before any write, its version is 0."""
    storage = storage_of(value)
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    # `data` begins a count of its own; a view continues that of its base.
    base = _COUNTED.get(storage, empty.set_(value.untyped_storage(), 0, (0,), (1,)).data)
    memory = base.as_strided((0,), (1,), 0).view(value.dtype)
    counted = memory.as_strided(value.shape, value.stride(), value.storage_offset())
    _COUNTED[storage] = counted
    return counted
