"""The methods of JAX, and of module classes, that are replaced while a function is logged or
validated.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from jax._src.array import ArrayImpl

from torchlens._jax.internals import EvalTrace, Primitive, ShardMapPrimitive
from torchlens._jax.module_calls import call_owners, watched_call
from torchlens._jax.primitive_recorder import CURRENT
from torchlens._jax.programs import INLINED


class _Patch(NamedTuple):
    """One replaced name, its original, and the ids of the users that still need the patch."""

    owner: Any
    name: str
    old: Any
    users: set[int]


_LOCK = threading.RLock()
_PATCHES: dict[tuple[int, str], _Patch] = {}

# Methods that turn an array into a Python or NumPy value.
_READS = ("__float__", "__int__", "__index__", "__complex__", "item", "tolist", "__array__")


def apply_patches(user: object, modules: list[Any]) -> None:
    """Applies all patches, until `undo_patches` with the same user. Logs in several threads share
    them.
    """
    with _LOCK:
        _patch(EvalTrace, "process_primitive", _watched_process, user)
        _patch(EvalTrace, "process_shard_map", _watched_shard_map, user)
        _patch(ArrayImpl, "__bool__", _watched_bool, user)
        for name in _READS:
            _patch(ArrayImpl, name, _watched_read, user)
        for owner in call_owners(modules):
            _patch(owner, "__call__", watched_call, user)


def undo_patches(user: object) -> None:
    """Undoes the patches without another user, in reverse order. Safe to repeat."""
    with _LOCK:
        for key in reversed(list(_PATCHES)):
            patch = _PATCHES[key]
            patch.users.discard(id(user))
            if not patch.users:
                setattr(patch.owner, patch.name, patch.old)
                del _PATCHES[key]


def _patch(owner: Any, name: str, watched: Callable[[Any], Any], user: object) -> None:
    key = (id(owner), name)
    known = _PATCHES.get(key)
    if known is not None:
        known.users.add(id(user))
        return
    old = vars(owner)[name]
    _PATCHES[key] = _Patch(owner, name, old, {id(user)})
    setattr(owner, name, watched(old))


def _watched_process(original: Any) -> Any:
    def process_primitive(self: Any, primitive: Any, args: Any, params: Any, /) -> Any:
        recorder = CURRENT.recorder
        if recorder is None:
            return original(self, primitive, args, params)
        return recorder.process(original, self, primitive, args, params)

    return process_primitive


def _watched_shard_map(original: Any) -> Any:
    """Logs a `shard_map` as one operation, with the function as an argument (`subfuns`)."""

    def process_shard_map(self: Any, primitive: Any, fun: Any, args: Any, /, **params: Any) -> Any:
        recorder = CURRENT.recorder
        if recorder is None:
            return original(self, primitive, fun, args, **params)

        def run(trace: Any, primitive: Any, args: Any, params: dict[str, Any]) -> Any:
            (fun,), rest = (
                params["subfuns"],
                {name: value for name, value in params.items() if name != "subfuns"},
            )
            return original(trace, primitive, fun, args, **rest)

        return recorder.process(run, self, primitive, args, {"subfuns": (fun,), **params})

    return process_shard_map


def _watched_bool(original: Any) -> Any:
    def __bool__(self: Any) -> bool:  # noqa: N807 (it replaces one)
        value: bool = original(self)
        if CURRENT.recorder is not None:
            CURRENT.recorder.note_boolean(self, value)
        return value

    return __bool__


def _watched_read(original: Any) -> Any:
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        if CURRENT.recorder is not None:
            CURRENT.recorder.note_read(self)
        return original(self, *args, **kwargs)

    return read


# -- the witness of validation
# -------------------------------------------------------------------------------------------------


class SeenCall(NamedTuple):
    """One primitive that ran, with its arguments and results."""

    primitive: Any
    args: list[Any]
    params: dict[str, Any]
    results: list[Any]


@contextmanager
def witnessed() -> Iterator[list[SeenCall]]:
    """Collects the primitives that run in this thread while it logs, but not those inside another
    one. Of a loop, condition or call, it collects the steps.
    """
    seen: list[SeenCall] = []
    own_thread = threading.get_ident()
    is_inside = False

    def watched(original: Any) -> Any:
        def bind_with_trace(self: Any, trace: Any, args: Any, *rest: Any) -> Any:
            nonlocal is_inside
            is_logging = threading.get_ident() == own_thread and CURRENT.recorder is not None
            if is_inside or not is_logging or type(trace) is not EvalTrace or self in INLINED:
                return original(self, trace, args, *rest)
            is_inside = True
            try:
                result = original(self, trace, args, *rest)
            finally:
                is_inside = False
            seen.append(
                SeenCall(
                    self,
                    list(args),
                    dict(rest[-1]),
                    list(result) if self.multiple_results else [result],
                )
            )
            return result

        return bind_with_trace

    originals = [(owner, owner.bind_with_trace) for owner in (Primitive, ShardMapPrimitive)]
    try:
        for owner, original in originals:
            owner.bind_with_trace = watched(original)
        yield seen
    finally:
        for owner, original in originals:
            owner.bind_with_trace = original
