"""The calls of modules (Equinox, flax nnx, flax linen): found while the function runs or is traced,
then put in order.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import jax

from torchlens._jax.internals import concrete, lacks_values, name_scope
from torchlens._jax.parts import Parts
from torchlens._jax.primitives import is_backward
from torchlens._jax.pytrees import parts_of
from torchlens._jax.recorder import CURRENT, Recorder
from torchlens._recording.recording import ModuleCall, Row


class ModuleTracker:
    """Records each call of a module.

    JAX has no modules, and what calls itself one is taken apart and put together again by jit, grad
    and vmap. So the address of an object is known by its identity; or by the attributes of the
    module that is running; or by its weights.
    """

    def __init__(self, parts: Parts, recorder: Recorder) -> None:
        self.entries: list[tuple[int, list[int]]] = []
        self.exits: list[tuple[int, list[int]]] = []
        self.classes = parts.classes
        self._parts = parts
        self._recorder = recorder
        self._num_calls: dict[str, int] = {}
        self.traced: list[int] = []  # calls that were given arrays without values
        self._running: list[
            tuple[Any, str]
        ] = []  # the objects and their addresses, outermost first
        self.weight_addresses = dict(zip(map(id, parts.params), parts.param_addresses, strict=True))

    def call(
        self, module: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a module; `super().__call__()` is part of the call that it stands in."""
        if self._running and self._running[-1][0] is module:
            return run(*args, **kwargs)
        address = self._address_of(module)
        return self.call_at(address, module, run, args, kwargs)

    def call_at(
        self,
        address: str | None,
        module: Any,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The same where the address is known: None for a module that cannot be told, "" for the
        model itself.
        """
        if address is None:
            return run(*args, **kwargs)
        self._running.append((module, address))
        try:
            if not address:
                return run(*args, **kwargs)
            return self._call_logged(address, module, run, args, kwargs)
        finally:
            self._running.pop()

    def _call_logged(
        self,
        address: str,
        module: Any,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        recorder = self._recorder
        pass_num = self._num_calls[address] = self._num_calls.get(address, 0) + 1
        call, outer = len(recorder.module_calls), recorder.running
        place = recorder.places.here(sys._getframe(4))
        recorder.module_calls.append(ModuleCall(address, pass_num, outer, *place))
        name = getattr(module, "__name__", None)  # of a function
        self.classes.setdefault(address, name if isinstance(name, str) else type(module).__name__)
        self.entries.append((call, self._entries_in((args, kwargs))))
        if lacks_values((args, kwargs)):
            self.traced.append(call)
        scope = f"{address}:{pass_num}"
        recorder.call_of_scope[scope] = call
        recorder.running = call
        try:
            with name_scope(scope):
                result = run(*args, **kwargs)
            self.exits.append((call, self._entries_in(result)))
            return result
        finally:
            recorder.running = outer

    def _entries_in(self, tree: Any) -> list[int]:
        leaves = jax.tree_util.tree_leaves(tree)
        found = (self._recorder.number_of(concrete(leaf)) for leaf in leaves)
        return list(dict.fromkeys(number for number in found if number is not None and number >= 0))

    # -- addresses
    # ----------------------------------------------------------------------------------------------

    def _address_of(self, module: Any) -> str | None:
        known = self._parts.addresses.get(id(module))
        if known is not None:
            return known
        for holder, address in reversed(self._running):
            for part in parts_of(holder):
                if part.value is module and part.path:
                    return _joined(address, part.path)
        return self._address_by_weights(module)

    def _address_by_weights(self, module: Any) -> str | None:
        """Where the first of its weights stands, without the part of the way that leads from the
        module to it.
        """
        for part in parts_of(module):
            address = self.weight_addresses.get(id(concrete(part.value)))
            if address is not None:
                own = _joined("", part.path)
                if address == own:
                    return ""
                if address.endswith(f".{own}"):
                    return address[: -len(own) - 1]
        return None


def _joined(address: str, path: tuple[Any, ...]) -> str:
    return ".".join([*([address] if address else []), *map(str, path)])


def call_owners(modules: list[Any]) -> list[type]:
    """The classes that define `__call__` for these objects, without those of JAX itself."""
    owners: dict[type, None] = {}
    for module in modules:
        owner = next((kind for kind in type(module).__mro__ if "__call__" in vars(kind)), None)
        is_own = owner is not None and isinstance(vars(owner)["__call__"], FunctionType)
        if (
            owner is not None
            and is_own
            and owner.__module__.partition(".")[0] not in ("jax", "jaxlib", "functools")
        ):
            owners[owner] = None
    return list(owners)


def watched_call(original: Any) -> Any:
    """Replaces `__call__` of a class during a log: also reports to the log of this thread."""

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None:
            return original(self, *args, **kwargs)
        return tracker.call(self, original.__get__(self, type(self)), args, kwargs)

    return call


# -- in order
# -------------------------------------------------------------------------------------------------


# A call, and the rows that went into it or came out.
CallRows = list[tuple[int, list[int]]]


def unused_calls(
    calls: Sequence[ModuleCall], rows: Sequence[Row], traced: Iterable[int]
) -> set[int]:
    """Of these calls, which were traced, those that came to nothing: no other operation reads what
    they made.

    JAX and flax trace a function to learn what it returns, and trace it again to run it. A module
    of which there is no other call is kept: what it returns may be what it was given.
    """
    chains: dict[int, frozenset[int]] = {0: frozenset()}

    def chain(call: int) -> frozenset[int]:
        if call not in chains:
            chains[call] = chain(calls[call].parent) | {call}
        return chains[call]

    used: set[int] = set()
    for row in rows:
        for number in row.references:
            if number is not None and number >= 0 and rows[number].module_call != row.module_call:
                used |= chain(rows[number].module_call) - chain(row.module_call)
    counted = {calls[call].address for call in used}
    return {call for call in traced if call not in used and calls[call].address in counted}


def settled_calls(
    calls: Sequence[ModuleCall], rows: Sequence[Row], gone: Collection[int], in_order_of_rows: bool
) -> tuple[list[ModuleCall], list[int]]:
    """The calls that are not `gone`, each with its pass; and every call's new number, or that of
    the one around it.
    """

    def home(call: int) -> int:
        while call in gone:
            call = calls[call].parent
        return call

    kept = [number for number in range(len(calls)) if number not in gone]
    if in_order_of_rows:
        first: dict[int, tuple[int, int]] = {0: (-1, 0)}
        for number, row in enumerate(rows):
            around = [home(row.module_call)]
            while around[-1] not in first:
                around.append(home(calls[around[-1]].parent))
            for depth, call in enumerate(reversed(around)):
                first.setdefault(call, (number, depth))
        kept.sort(key=lambda number: first.get(number, (len(rows), 0)))
    new = {number: place for place, number in enumerate(kept)}
    num_passes: dict[str, int] = {}
    found = [calls[0]]
    for number in kept[1:]:
        record = calls[number]
        num_passes[record.address] = pass_num = num_passes.get(record.address, 0) + 1
        found.append(record._replace(pass_num=pass_num, parent=new[home(record.parent)]))
    return found, [new[home(number)] for number in range(len(calls))]


def order_of_leaving(calls: Sequence[ModuleCall]) -> list[int]:
    """Every call's place among all of them by when it is over: what is inside a call comes before
    it.
    """

    def way(call: int) -> tuple[int, ...]:
        steps = [len(calls), call]
        while calls[call].parent:
            call = calls[call].parent
            steps.append(call)
        return tuple(reversed(steps))

    places = [0] * len(calls)
    for place, call in enumerate(sorted(range(len(calls)), key=way)):
        places[call] = place
    return places


def fill_in(
    calls: Sequence[ModuleCall], rows: Sequence[Row], entries: CallRows, exits: CallRows
) -> None:
    """For calls of which no row went in or came out: what their operations read from outside, and
    the last they made.

    What a module is given and returns while it is traced are variables of a program, which a
    transformation (`grad`, `checkpoint`) may write anew. The operations still tell which call they
    belong to.
    """
    wanted = {call for found in (entries, exits) for call, own in found if not own}
    if not wanted:
        return
    read: dict[int, dict[int, None]] = {call: {} for call in wanted}
    last: dict[int, int] = {}
    for number, row in enumerate(rows):
        call = row.module_call
        if not call or is_backward(row.operation):
            continue
        around = {call}
        while calls[call].parent:
            call = calls[call].parent
            around.add(call)
        for call in around & wanted:
            last[call] = number
            outside = (other for other in row.references if other is not None and other >= 0)
            read[call].update(
                (other, None)
                for other in outside
                if not _is_in(calls, rows[other].module_call, call)
            )
    entries[:] = [(call, own or list(read[call])) for call, own in entries]
    exits[:] = [(call, own or ([last[call]] if call in last else [])) for call, own in exits]


def _is_in(calls: Sequence[ModuleCall], call: int, other: int) -> bool:
    while call and call != other:
        call = calls[call].parent
    return call == other


# -- the turns of loops that were traced once
# -------------------------------------------------------------------------------------------------


# The turns of the loops around a step, outermost first.
Turn = tuple[int, ...]


class Turns:
    """The current turns, and the module calls of each turn. `calls` are those that were traced."""

    def __init__(self, calls: list[ModuleCall]) -> None:
        self.current: Turn = ()
        self._calls = calls
        self._around: list[int] = []  # the call that each of the loops stands in
        self._at: dict[int, dict[Turn, int]] = {}  # a call that was traced → each turn's own

    @contextmanager
    def turn(self, around: int, index: int) -> Iterator[None]:
        """Enters one turn of a loop that is inside the call `around`."""
        outer = self.current
        self._around.append(around)
        self.current = (*outer, index)
        try:
            yield
        finally:
            self._around.pop()
            self.current = outer

    def call_at(self, call: int) -> int:
        """The call at the current turn. What stands around a loop is the same at each turn of
        it.
        """
        num_inside = 0
        while num_inside < len(self._around) and self._is_inside(call, self._around[num_inside]):
            num_inside += 1
        if not num_inside:
            return call
        turn, own = self.current[:num_inside], self._at.setdefault(call, {})
        if turn not in own:
            record = self._calls[call]
            above = self.call_at(record.parent)
            own[turn] = len(self._calls)
            self._calls.append(record._replace(parent=above))
        return own[turn]

    def calls_of(self, call: int) -> list[tuple[Turn, int]]:
        """The turns at which a call that was traced ran, and the call at each."""
        return list(self._at[call].items()) if call in self._at else [((), call)]

    def _is_inside(self, call: int, other: int) -> bool:
        while call > other:
            call = self._calls[call].parent
            if call == other:
                return True
        return False

    @property
    def traced(self) -> list[int]:
        """The calls that were traced in a loop: those of its turns stand for them."""
        return list(self._at)
