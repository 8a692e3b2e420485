"""Runs torchlens's own computations during the user's run, hidden from modes and autograd.

The user's run may be under torch modes (fake tensors, a default device, selective checkpointing,
which counts operations), autograd, `torch.jit.trace` or a transform of torch.func. These must
neither change nor record torchlens's computations.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
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


class GradMode(torch._C._InferenceMode):
    """A context with another grad mode and inference mode; by default, inference mode stays.

    It ends in C++, which gives back both. Ctrl-C may cut torch's own context managers short where
    they begin or end, and they would leave grad mode off.
    """

    def __init__(self, grad: bool, inference: bool | None = None) -> None:
        super().__init__(torch.is_inference_mode_enabled() if inference is None else inference)
        self._grad = grad

    def __enter__(self) -> None:
        super().__enter__()
        torch._C._set_grad_enabled(self._grad)


def unseen() -> AbstractContextManager[Any]:
    """A context in which computing is hidden from autograd, dispatch modes and tracing, and, with
    NoTorchFunction, from function modes. That one is C, too, and stands beside it for that reason.

    >>> with unseen(), NoTorchFunction():
    ...     mean = value.mean()
    """
    tracing = torch._C._get_tracing_state()
    has_modes = _is_meta() or _num_dispatch_modes() or _len_torch_dispatch_stack_pre_dispatch()
    if tracing is None and not has_modes:
        return GradMode(False, inference=False)
    stack = ExitStack()
    if tracing is not None:
        _set_tracing_state(None)
        stack.callback(_set_tracing_state, tracing)
    if has_modes:
        stack.enter_context(torch._C._PreserveDispatchKeyGuard())
        stack.enter_context(_disable_current_modes())
        # In the middle of a fake operation, every new tensor would be on the meta device.
        torch._C._set_meta_in_tls_dispatch_include(False)
    stack.enter_context(GradMode(False, inference=False))
    return stack


def call_unseen(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function `unseen`. Returns None, without a call, inside a transform of torch.func:
    tensors have no values there.
    """
    if peek_interpreter_stack() is not None:
        return None
    with unseen(), NoTorchFunction():
        return function(*args)
