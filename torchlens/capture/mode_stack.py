"""torch's stack of modes in the current thread."""

from typing import Any

import torch

__all__ = ["push_mode", "remove_mode"]


def push_mode(mode: Any) -> None:
    """Puts a mode on the stack: torch tells it of every call, unless one above it does not pass the call on."""
    torch._C._push_on_torch_function_stack(mode)


def remove_mode(mode: Any) -> None:
    """Takes a mode off the stack, if it is there; others that the model may have put above it stay."""
    above = []
    depth = torch._C._len_torch_function_stack()
    if any(torch._C._get_function_stack_at(level) is mode for level in range(depth)):
        while (top := torch._C._pop_torch_function_stack()) is not mode:
            above.append(top)
        for other in reversed(above):
            torch._C._push_on_torch_function_stack(other)
