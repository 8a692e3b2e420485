"""The modules that an entry was computed in, given to and returned by."""

from collections.abc import Mapping, Sequence

from torchlens._history.field import EntryFields, field


class EntryModules(EntryFields):
    """The modules that an entry was computed in, given to and returned by."""

    __slots__ = ()

    @field
    def containing_module_origin(self) -> list[str | None]:
        """The innermost module that was running, as `address:pass`; None in the model itself."""
        names = self._log.module_names
        return [names[call] if call else None for call in self._rows.module_call]

    @field
    def containing_modules_origin_nested(self) -> list[list[str]]:
        """All modules that were running, as `address:pass`, outermost first."""
        chains, names = self._log.graph.module_chains, self._log.module_names
        return [
            [names[outer] for outer in chains[call]] if call else []
            for call in self._rows.module_call
        ]

    @field
    def module_nesting_depth(self) -> list[int]:
        """How many nested modules were running."""
        chains = self._log.graph.module_chains
        return [len(chains[call]) for call in self._rows.module_call]

    @field
    def modules_entered(self) -> list[list[str]]:
        """Addresses of the modules it was given to."""
        return _names(self, self._log.graph.modules_entered, self._log.module_call_addresses)

    @field
    def module_passes_entered(self) -> list[list[str]]:
        """The module calls it was given to, as `address:pass`."""
        return _names(self, self._log.graph.modules_entered, self._log.module_names)

    @field
    def modules_exited(self) -> list[list[str]]:
        """Addresses of the modules that returned it, innermost first."""
        return _names(self, self._log.graph.modules_exited, self._log.module_call_addresses)

    @field
    def module_passes_exited(self) -> list[list[str]]:
        """The module calls that returned it, as `address:pass`, innermost first."""
        return _names(self, self._log.graph.modules_exited, self._log.module_names)

    @field
    def is_submodule_input(self) -> list[bool]:
        """Whether it was given to a module."""
        return list(map(self._log.graph.modules_entered.__contains__, self._numbers))

    @field
    def is_submodule_output(self) -> list[bool]:
        """Whether a module returned it."""
        return list(map(self._log.graph.modules_exited.__contains__, self._numbers))

    @field
    def bottom_level_submodule_pass_exited(self) -> list[str | None]:
        """The module without modules inside that returned it, as `address:pass`; None if none
        did.
        """
        names = self._log.module_names
        return [None if call is None else names[call] for call in _bottom_calls_exited(self)]

    @field
    def is_bottom_level_submodule_output(self) -> list[bool]:
        """Whether a module without modules inside returned it."""
        return [call is not None for call in _bottom_calls_exited(self)]


def _names(
    entries: EntryFields, calls: Mapping[int, Sequence[int]], names: Sequence[str]
) -> list[list[str]]:
    """The names of the module calls of each entry."""
    found = map(calls.get, entries._numbers)
    return [[names[call] for call in own] if own else [] for own in found]


def _bottom_calls_exited(entries: EntryFields) -> list[int | None]:
    log = entries._log
    children, addresses = log.graph.module_tree.children, log.module_call_addresses
    return [
        next((call for call in own if not children[addresses[call]]), None) if own else None
        for own in map(log.graph.modules_exited.get, entries._numbers)
    ]
