"""The methods of JAX, and of module classes, that are replaced while a function is logged or
validated.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.array import ArrayImpl

from torchlens._jax.internals import SCAN_CELL, EvalTrace, Primitive, ShardMapPrimitive
from torchlens._jax.modules import call_owners, watched_call
from torchlens._jax.programs import INLINED
from torchlens._jax.recorder import CURRENT


class _Patch(NamedTuple):
    """One name, what stood there, and who still needs what stands there now."""

    owner: Any
    name: str
    old: Any
    users: set[int]


_LOCK = threading.RLock()
_PATCHES: dict[tuple[int, str], _Patch] = {}

# Ways to take a value out of an array, to go on with in Python.
_READS = ("__float__", "__int__", "__index__", "__complex__", "item", "tolist", "__array__")


def apply_patches(user: object, modules: list[Any]) -> None:
    """Puts everything in place, unless another thread's log did so before. Until `undo_patches`
    with the same user.
    """
    with _LOCK:
        _patch(EvalTrace, "process_primitive", _watched_process, user)
        _patch(EvalTrace, "process_shard_map", _watched_shard_map, user)
        _patch(ArrayImpl, "__bool__", _watched_bool, user)
        for name in _READS:
            _patch(ArrayImpl, name, _watched_read, user)
        for owner in call_owners(modules):
            _patch(owner, "__call__", watched_call, user)


@contextmanager
def without_jit(user: object) -> Iterator[None]:
    """Runs what is inside with jit off, and loops of no turn as well, which JAX refuses there."""
    try:
        with _LOCK:
            if SCAN_CELL is not None:
                _patch(SCAN_CELL, "cell_contents", _scan_of_any_length, user)
        with jax.disable_jit():
            yield
    finally:
        undo_patches(user)


def undo_patches(user: object) -> None:
    """Puts back what nobody else needs, in reverse order. Safe to repeat."""
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
    old = owner.cell_contents if owner is SCAN_CELL else vars(owner)[name]
    _PATCHES[key] = _Patch(owner, name, old, {id(user)})
    setattr(owner, name, watched(old))


def _watched_process(original: Any) -> Any:
    def process_primitive(self: Any, primitive: Any, args: Any, params: Any, /) -> Any:
        recorder = CURRENT.recorder
        if recorder is None:
            return original(self, primitive, args, params)
        return recorder.process(original, self, primitive, args, params)

    return process_primitive


def _scan_of_any_length(original: Any) -> Any:
    """With jit off, JAX runs the body to learn what a scan returns, and so has no answer where
    there is no turn.

    With jit on it traces the body. Nothing of it runs, so that a log misses nothing, and no module
    in it is called.
    """

    @wraps(original)
    def scan(
        f: Any, init: Any, xs: Any = None, length: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        is_empty = length == 0 or any(
            np.shape(leaf)[:1] == (0,) for leaf in jax.tree_util.tree_leaves(xs)
        )
        if not is_empty or not jax.config.jax_disable_jit:
            return original(f, init, xs, length, *args, **kwargs)
        tracker, CURRENT.tracker = CURRENT.tracker, None
        try:
            with jax.disable_jit(False):
                return original(f, init, xs, length, *args, **kwargs)
        finally:
            CURRENT.tracker = tracker

    return scan


def _watched_shard_map(original: Any) -> Any:
    """What runs on each device at once is one operation, which has the function as an argument
    (`subfuns`).
    """

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
    def __bool__(self: Any) -> bool:  # noqa: N807 (it stands in the place of one)
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
    """One primitive that ran: its name, what it was given, what it returned."""

    primitive: Any
    args: list[Any]
    params: dict[str, Any]
    results: list[Any]


@contextmanager
def witnessed() -> Iterator[list[SeenCall]]:
    """Collects the outermost primitives that run in this thread while it logs. What runs a program
    is looked into.
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
