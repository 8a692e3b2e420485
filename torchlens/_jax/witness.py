"""Sees the primitives that run by another way than the recorder: where each is bound, not where it
is evaluated.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torchlens._jax.inlining import INLINED
from torchlens._jax.internals import EvalTrace, Primitive, ShardMapPrimitive
from torchlens._jax.recorder import CURRENT


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
