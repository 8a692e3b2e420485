"""The modes of torch that change what an operation does: taken at a call, put in force when it is made again."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

__all__ = ["Modes", "current_modes", "in_force"]


class Modes(NamedTuple):
    """Grad mode, inference mode, default dtype, and autocast by device type (on or off, dtype)."""

    grad: bool
    inference: bool
    default_dtype: torch.dtype
    autocast: tuple[tuple[str, bool, torch.dtype], ...]


def current_modes() -> Modes:
    """The modes in force in this thread."""
    devices = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
    autocast = tuple((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices)
    return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), autocast)


@contextmanager
def in_force(modes: Modes) -> Iterator[None]:
    """Puts `modes` in force. Autocast does not cache its casts here: each call stands alone."""
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(modes.inference))
        stack.enter_context(torch.set_grad_enabled(modes.grad))
        for device, is_enabled, dtype in modes.autocast:
            if is_enabled or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype, is_enabled, cache_enabled=False))
        torch.set_default_dtype(modes.default_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
