"""The calls of modules (Equinox, flax nnx, flax linen): recorded while the function runs or is
traced, then ordered.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import jax

from torchlens._jax.call_parts import CallParts
from torchlens._jax.internals import concrete, lacks_values, name_scope
from torchlens._jax.primitive_recorder import CURRENT, PrimitiveRecorder
from torchlens._jax.primitives import is_backward
from torchlens._jax.pytrees import parts_of
from torchlens._recording.recording import ModuleCall, Row


class JaxModuleTracker:
    """Records each call of a module.

    jit, grad and vmap take modules apart and build new objects. So the address of an object comes
    from its identity, or from the attributes of the running module, or from its weights.
    """

    def __init__(self, parts: CallParts, recorder: PrimitiveRecorder) -> None:
        self.entries: list[tuple[int, list[int]]] = []
        self.exits: list[tuple[int, list[int]]] = []
        self.classes = parts.classes
        self.modules: dict[str, Any] = {}  # address → the object that was called first
        self._parts = parts
        self._recorder = recorder
        self._num_calls: dict[str, int] = {}
        self.traced: list[int] = []  # calls with arguments without values
        # The running objects and their addresses, outermost first.
        self._running: list[tuple[Any, str]] = []
        self.weight_addresses = dict(zip(map(id, parts.params), parts.param_addresses, strict=True))

    def call(
        self, module: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a module; a `super().__call__()` inside it is not another call."""
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
        """Runs a module at an address: None if it is unknown, "" for the model itself."""
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
        self.modules.setdefault(address, module)
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
        """The address of its first weight, without the weight's path inside the module."""
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
    """The classes that define `__call__` for these objects, except JAX's own."""
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
    """A replacement for the `__call__` of a class that also reports to the log of this thread."""

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None:
            return original(self, *args, **kwargs)
        return tracker.call(self, original.__get__(self, type(self)), args, kwargs)

    return call


# -- ordering calls
# -------------------------------------------------------------------------------------------------


# Calls, each with the rows that entered or left it.
CallRows = list[tuple[int, list[int]]]


def _sources(row: Row) -> list[int]:
    """The rows that a row reads."""
    return [number for number in row.references if number is not None and number >= 0]


def _chains(calls: Sequence[ModuleCall]) -> list[frozenset[int]]:
    """Each call together with the calls around it."""
    chains: list[frozenset[int]] = [frozenset()]
    for number, call in enumerate(calls[1:], start=1):
        chains.append(chains[call.parent] | {number})
    return chains


def unused_calls(
    calls: Sequence[ModuleCall], rows: Sequence[Row], traced: Iterable[int]
) -> set[int]:
    """The traced calls whose results no operation outside of them reads.

    JAX and flax trace a function to learn the shapes of its results, and trace it again to run it.
    A module without any other call is kept: it may return its argument.
    """
    chains = _chains(calls)
    used: set[int] = set()
    for row in rows:
        for source in _sources(row):
            used |= chains[rows[source].module_call] - chains[row.module_call]
    counted = {calls[call].address for call in used}
    return {call for call in traced if call not in used and calls[call].address in counted}


def settled_calls(
    calls: Sequence[ModuleCall], rows: Sequence[Row], gone: Collection[int], in_order_of_rows: bool
) -> tuple[list[ModuleCall], list[int]]:
    """The calls that are not `gone`, with their pass numbers; and for every call its new number, or
    that of the remaining call around it.
    """

    def home(call: int) -> int:
        while call in gone:
            call = calls[call].parent
        return call

    kept = [number for number in range(len(calls)) if number not in gone]
    if in_order_of_rows:
        first = _first_rows(calls, rows, home)
        kept.sort(key=lambda number: first.get(number, (len(rows), 0)))
    new = {number: place for place, number in enumerate(kept)}
    num_passes: Counter[str] = Counter()
    found = [calls[0]]
    for number in kept[1:]:
        record = calls[number]
        num_passes[record.address] += 1
        found.append(
            record._replace(pass_num=num_passes[record.address], parent=new[home(record.parent)])
        )
    return found, [new[home(number)] for number in range(len(calls))]


def _first_rows(
    calls: Sequence[ModuleCall], rows: Sequence[Row], home: Callable[[int], int]
) -> dict[int, tuple[int, int]]:
    """For each call, its first row, and its depth among the calls that begin there."""
    first: dict[int, tuple[int, int]] = {0: (-1, 0)}
    for number, row in enumerate(rows):
        around = [home(row.module_call)]
        while around[-1] not in first:
            around.append(home(calls[around[-1]].parent))
        for depth, call in enumerate(reversed(around)):
            first.setdefault(call, (number, depth))
    return first


def order_of_leaving(calls: Sequence[ModuleCall]) -> list[int]:
    """The place of each call in the order in which they end: inner calls end before outer ones."""
    chains = _chains(calls)
    # Parents have smaller numbers than the calls inside them.
    ends = [(*sorted(chain), len(calls)) for chain in chains]
    places = [0] * len(calls)
    for place, call in enumerate(sorted(range(len(calls)), key=ends.__getitem__)):
        places[call] = place
    return places


def fill_in(
    calls: Sequence[ModuleCall], rows: Sequence[Row], entries: CallRows, exits: CallRows
) -> None:
    """Completes calls without entry or exit rows: from the rows that their operations read outside
    the call, and the last row that they made.

    A transformation (`grad`, `checkpoint`) may rewrite the traced arguments and results of a module
    to other variables; the operations still have their module call.
    """
    wanted = {call for found in (entries, exits) for call, own in found if not own}
    if not wanted:
        return
    read, last = _reads_of_calls(calls, rows, wanted)
    entries[:] = [(call, own or list(read[call])) for call, own in entries]
    exits[:] = [(call, own or ([last[call]] if call in last else [])) for call, own in exits]


def _reads_of_calls(
    calls: Sequence[ModuleCall], rows: Sequence[Row], wanted: set[int]
) -> tuple[dict[int, dict[int, None]], dict[int, int]]:
    """For each wanted call, the rows from outside that it reads, and its last row."""
    chains = _chains(calls)
    read: dict[int, dict[int, None]] = {call: {} for call in wanted}
    last: dict[int, int] = {}
    for number, row in enumerate(rows):
        if is_backward(row.operation):
            continue
        for call in chains[row.module_call] & wanted:
            last[call] = number
            outside = (n for n in _sources(row) if call not in chains[rows[n].module_call])
            read[call] |= dict.fromkeys(outside)
    return read, last


# -- iterations of loops that were traced once
# -------------------------------------------------------------------------------------------------


# The iterations of the loops around a step, outermost first.
Turn = tuple[int, ...]


class Turns:
    """The current iterations, and the module calls of each. `calls` are those of the trace."""

    def __init__(self, calls: list[ModuleCall]) -> None:
        self.current: Turn = ()
        self._calls = calls
        self._around: list[int] = []  # the module call around each loop
        self._at: dict[int, dict[Turn, int]] = {}  # traced call → the call of each iteration

    @contextmanager
    def turn(self, around: int, index: int) -> Iterator[None]:
        """Enters one iteration of a loop inside the call `around`."""
        outer = self.current
        self._around.append(around)
        self.current = (*outer, index)
        try:
            yield
        finally:
            self._around.pop()
            self.current = outer

    def call_at(self, call: int) -> int:
        """The call in the current iteration; calls around a loop have one for all iterations."""
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
        """The iterations in which a traced call ran, and the call in each."""
        return list(self._at[call].items()) if call in self._at else [((), call)]

    def _is_inside(self, call: int, other: int) -> bool:
        while call > other:
            call = self._calls[call].parent
            if call == other:
                return True
        return False

    @property
    def traced(self) -> list[int]:
        """The traced calls inside loops, which the calls of the iterations replace."""
        return list(self._at)
