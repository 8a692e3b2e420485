"""torch's stack of modes in the current thread."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves

from torchlens._recording.unseen import NoTorchFunction


def push_mode(mode: Any) -> None:
    """Pushes a mode: torch passes it every call, unless a mode above does not pass it on."""
    torch._C._push_on_torch_function_stack(mode)


def function_modes() -> list[Any]:
    """The modes of this thread: the last one is the first to be passed a call."""
    depth = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(level) for level in range(depth)]


def _is_of_user(mode: Any) -> bool:
    """False for torch's default device, which is always the lowest mode."""
    return not isinstance(mode, DeviceContext)


def push_below(mode: Any) -> None:
    """Pushes a mode below those that the user has entered.

    They act first, as without the mode, and do not see what it does.
    """
    before = function_modes()
    num_devices = len(before) - len(list(filter(_is_of_user, before)))
    _set_modes([*before[:num_devices], mode, *before[num_devices:]], before)


def remove_mode(mode: Any) -> None:
    """Removes a mode if present; all others stay."""
    before = function_modes()
    others = [other for other in before if other is not mode]
    if len(others) < len(before):
        _set_modes(others, others)


def _set_modes(modes: list[Any], if_interrupted: list[Any]) -> None:
    try:
        _replace_modes(modes)
    except BaseException:
        _replace_modes(if_interrupted)
        raise


def _replace_modes(modes: list[Any]) -> None:
    kept = 0
    for mode, own in zip(modes, function_modes(), strict=False):
        if mode is not own:
            break
        kept += 1
    while torch._C._len_torch_function_stack() > kept:
        torch._C._pop_torch_function_stack()
    for mode in modes[kept:]:
        push_mode(mode)


def hidden_from_user() -> AbstractContextManager[Any]:
    """A context in which the modes of the user see no calls."""
    return NoTorchFunction() if any(map(_is_of_user, function_modes())) else nullcontext()


@contextmanager
def without_user_modes() -> Iterator[None]:
    """Removes the modes of the user for the duration of a context."""
    before = function_modes()
    _set_modes([mode for mode in before if not _is_of_user(mode)], before)
    try:
        yield
    finally:
        _set_modes(before, before)


@contextmanager
def without_mode(mode: Any) -> Iterator[None]:
    """Removes a mode, if present, for the duration of a context."""
    before = function_modes()
    remove_mode(mode)
    try:
        yield
    finally:
        if mode in before:
            place = before.index(mode)
            now = function_modes()
            _set_modes([*now[:place], mode, *now[place:]], before)


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
