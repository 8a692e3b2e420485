"""Lets torchlens compute in the middle of the user's run, isolated from the user's modes and from
autograd.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

_len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
_is_meta = torch._C._meta_in_tls_dispatch_include
_set_tracing_state: Callable[[Any], None] = torch._C._set_tracing_state  # type: ignore[attr-defined]


@contextmanager
def apart() -> Iterator[None]:
    """Hides what runs inside from autograd and from the model's modes (fake tensors, a default
    device).
    """
    tracing = torch._C._get_tracing_state()
    if tracing is not None:
        _set_tracing_state(None)
    try:
        if _is_meta() or _len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():
            with torch._C._PreserveDispatchKeyGuard(), _disable_current_modes(), _alone():
                torch._C._set_meta_in_tls_dispatch_include(
                    False
                )  # in the middle of a fake operation, all would be meta
                yield
        else:
            with _alone():
                yield
    finally:
        if tracing is not None:
            _set_tracing_state(tracing)


@contextmanager
def _alone() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        yield
