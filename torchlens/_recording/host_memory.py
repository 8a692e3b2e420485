"""Reads the memory of a CPU tensor in place.

`tensor.numpy()` would leave a mark: a storage that it was called on, through whatever tensor, can
never be resized again.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

# As long as anything may be: what is read of it, whoever asks for it says. Whoever made the memory
# must stay alive.
memory_at: Callable[[int], Any] = (ctypes.c_char * (1 << 46)).from_address


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor whose elements lie one after the other; the tensor lives as long as
    they do.
    """
    count = tensor.numel() * tensor.element_size()
    if not count:
        return memoryview(b"")
    if tensor.untyped_storage().nbytes() < tensor.storage_offset() * tensor.element_size() + count:
        raise RuntimeError("the memory of a tensor was given back, there is nothing left to read")
    memory = memory_at(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(np.ndarray(count, np.uint8, memory))  # type: ignore[arg-type]
