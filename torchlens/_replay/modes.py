"""The modes of torch that change what an operation does: taken at a call, put in force when it is
made again.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode


class Modes(NamedTuple):
    """Grad mode, inference mode, default dtype, autocast by device type (on or off, dtype), and
    modes of the dispatcher.

    Modes of `__torch_function__` (a default device) need no keeping: those of the model's own have
    had their say when a call is recorded, and those of the caller are still there.
    """

    grad: bool
    inference: bool
    default_dtype: torch.dtype
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    dispatch: tuple[Any, ...] = ()


def current_modes() -> Modes:
    """The modes in force in this thread."""
    devices = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
    autocast = tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in devices
    )
    dispatch = tuple(_get_current_dispatch_mode_stack())
    return Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        autocast,
        dispatch,
    )


@contextmanager
def in_force(modes: Modes) -> Iterator[None]:
    """Puts `modes` in force, from `apart`. Autocast does not cache its casts here: each call stands
    alone.
    """
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch._C._EnableTorchFunction())
        stack.enter_context(torch.inference_mode(modes.inference))
        stack.enter_context(torch.set_grad_enabled(modes.grad))
        for device, is_enabled, dtype in modes.autocast:
            if is_enabled or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype, is_enabled, cache_enabled=False))
        for mode in modes.dispatch:
            _push_mode(mode)
            stack.callback(_pop_mode)
        torch.set_default_dtype(modes.default_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
