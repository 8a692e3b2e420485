"""torch's stack of modes in the current thread."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def push_mode(mode: Any) -> None:
    """Pushes a mode: torch passes it every call, unless a mode above does not pass it on."""
    torch._C._push_on_torch_function_stack(mode)


def remove_mode(mode: Any) -> None:
    """Removes a mode if present; modes that the model pushed above it stay."""
    above = []
    depth = torch._C._len_torch_function_stack()
    if any(torch._C._get_function_stack_at(level) is mode for level in range(depth)):
        while (top := torch._C._pop_torch_function_stack()) is not mode:
            above.append(top)
        for other in reversed(above):
            torch._C._push_on_torch_function_stack(other)


@contextmanager
def without_mode(mode: Any) -> Iterator[None]:
    """Removes a mode, if present, for the duration of a context."""
    depth = torch._C._len_torch_function_stack()
    place = next(
        (level for level in range(depth) if torch._C._get_function_stack_at(level) is mode), None
    )
    remove_mode(mode)
    try:
        yield
    finally:
        if place is not None:
            above = [
                torch._C._pop_torch_function_stack()
                for _ in range(torch._C._len_torch_function_stack() - place)
            ]
            for other in (mode, *reversed(above)):
                push_mode(other)


def run_overridden(
    mode: Any,
    func: Callable[..., Any],
    types: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> Any:
    """Dispatches a call that `mode` received to `__torch_function__` of the argument types.

    Their own calls are reported to the mode: a class that is no tensor, such as a dictionary of
    tensors, computes by further calls.
    """
    kinds = set(types)
    given = {
        type(leaf): leaf
        for leaf in tree_leaves((args, kwargs), is_leaf=lambda item: type(item) in kinds)
    }
    push_mode(mode)
    try:
        for kind in types:  # some old classes define it for instances only
            result = given.get(kind, kind).__torch_function__(func, types, args, kwargs or {})
            if result is not NotImplemented:
                return result
    finally:
        torch._C._pop_torch_function_stack()
    return func(*args, **(kwargs or {}))  # raises torch's own error
