"""Entering and leaving modules: objects with `__call__` (Equinox, nnx, anybody's), and flax
linen's.
"""

import sys
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import jax

from torchlens._jax.internals import concrete, lacks_values, name_scope
from torchlens._jax.parts import Parts
from torchlens._jax.recorder import CURRENT, Recorder
from torchlens._jax.trees import parts_of
from torchlens._recording.recording import ModuleCall


class ModuleTracker:
    """Writes down each call of the modules.

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
    """The classes that say what calling these objects means. Those of JAX's own are left alone."""
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
    """What stands in a class for `__call__` while anybody logs: as before, and the log of this
    thread is told.
    """

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None:
            return original(self, *args, **kwargs)
        return tracker.call(self, original.__get__(self, type(self)), args, kwargs)

    return call
