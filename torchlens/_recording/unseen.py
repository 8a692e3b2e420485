"""Runs torchlens's own computations during the user's run, hidden from modes and autograd.

The user's run may be under torch modes (fake tensors, a default device, selective checkpointing,
which counts operations), autograd, `torch.jit.trace` or a transform of torch.func. These must
neither change nor record torchlens's computations.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

# Hides calls from torch function modes. The log patches torch's own name for it.
NoTorchFunction = torch._C.DisableTorchFunction
_num_function_modes = torch._C._len_torch_function_stack
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_meta = torch._C._meta_in_tls_dispatch_include
_set_tracing_state: Callable[[Any], None] = torch._C._set_tracing_state  # type: ignore[attr-defined]


def is_seen() -> bool:
    """True if a torch mode or a transform of torch.func is active.

    If not, what is done to a detached tensor of torch's own types needs no `unseen`.
    """
    return bool(
        peek_interpreter_stack() is not None or _num_function_modes() or _num_dispatch_modes()
    )


def unseen() -> ExitStack:
    """A context in which computing is hidden from modes, autograd and tracing.

    >>> with unseen():
    ...     mean = value.mean()
    """
    stack = ExitStack()
    tracing = torch._C._get_tracing_state()
    if tracing is not None:
        _set_tracing_state(None)
        stack.callback(_set_tracing_state, tracing)
    if _is_meta() or _num_dispatch_modes() or _len_torch_dispatch_stack_pre_dispatch():
        stack.enter_context(torch._C._PreserveDispatchKeyGuard())
        stack.enter_context(_disable_current_modes())
        # In the middle of a fake operation, every new tensor would be on the meta device.
        torch._C._set_meta_in_tls_dispatch_include(False)
    stack.enter_context(NoTorchFunction())
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def call_unseen(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function `unseen`. Returns None, without a call, inside a transform of torch.func:
    tensors have no values there.
    """
    if peek_interpreter_stack() is not None:
        return None
    with unseen():
        return function(*args)
