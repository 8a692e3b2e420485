"""torch's stack of modes in the current thread."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def push_mode(mode: Any) -> None:
    """Puts a mode on the stack: torch tells it of every call, unless one above it does not pass the
    call on.
    """
    torch._C._push_on_torch_function_stack(mode)


def remove_mode(mode: Any) -> None:
    """Takes a mode off the stack, if it is there; others that the model may have put above it
    stay.
    """
    above = []
    depth = torch._C._len_torch_function_stack()
    if any(torch._C._get_function_stack_at(level) is mode for level in range(depth)):
        while (top := torch._C._pop_torch_function_stack()) is not mode:
            above.append(top)
        for other in reversed(above):
            torch._C._push_on_torch_function_stack(other)


@contextmanager
def without_mode(mode: Any) -> Iterator[None]:
    """Takes a mode off for a while, if it is there, and puts it back in its place."""
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
    """Makes a call that `mode` was told of as the classes of its arguments have it
    (`__torch_function__`).

    What they do is reported to the mode in its turn: a class that is no tensor, as a dictionary of
    tensors is, computes by calls of its own.
    """
    kinds = set(types)
    given = {
        type(leaf): leaf
        for leaf in tree_leaves((args, kwargs), is_leaf=lambda item: type(item) in kinds)
    }
    push_mode(mode)
    try:
        for kind in types:  # some old ones ask the object, and not its class
            result = given.get(kind, kind).__torch_function__(func, types, args, kwargs or {})
            if result is not NotImplemented:
                return result
    finally:
        torch._C._pop_torch_function_stack()
    return func(*args, **(kwargs or {}))  # which says what is wrong
