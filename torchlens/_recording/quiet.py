"""Looking at tensors without anybody noticing: neither autograd nor modes of the user's or of
torch's own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

_num_function_modes = torch._C._len_torch_function_stack
_num_dispatch_modes = torch._C._len_torch_dispatch_stack


def is_quiet() -> bool:
    """Whether nobody listens: what is done to a tensor of torch's own types, detached, needs no
    `quietly`.
    """
    return not (
        peek_interpreter_stack() is not None or _num_function_modes() or _num_dispatch_modes()
    )


def quietly(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function with autograd, `__torch_function__` and dispatch modes off.

    Inside a transform of torch.func it is not called: tensors have no values there. A dispatch mode
    may be one that counts what runs, and expects as much when it runs again: selective
    checkpointing.
    """
    if peek_interpreter_stack() is not None:
        return None
    was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        with torch._C.DisableTorchFunction():
            if _num_dispatch_modes():
                with _disable_current_modes():
                    return function(*args)
            return function(*args)
    finally:
        torch._C._set_grad_enabled(was_enabled)
