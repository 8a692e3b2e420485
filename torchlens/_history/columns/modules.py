"""Columns of the modules that an entry was computed in, given to and returned by."""

from torchlens._history.columns.making import Entries
from torchlens._history.log import Log


def _addresses(log: Log, found: dict[int, list[int]], entries: Entries) -> list[list[str]]:
    return _named(log.module_call_addresses, found, entries)


def _passes(log: Log, found: dict[int, list[int]], entries: Entries) -> list[list[str]]:
    return _named(log.module_names, found, entries)


def _named(names: list[str], found: dict[int, list[int]], entries: Entries) -> list[list[str]]:
    groups = list(map(found.get, entries))
    if not any(groups):
        return [[] for _ in groups]
    return [[names[call] for call in own] if own else [] for own in groups]


def containing_module_origin(log: Log, entries: Entries) -> list[str | None]:
    names = log.module_names
    return [names[call] if call else None for call in log.fields(entries).module_call]


def containing_modules_origin_nested(log: Log, entries: Entries) -> list[list[str]]:
    chains, names = log.graph.module_chains, log.module_names
    return [
        [names[outer] for outer in chains[call]] if call else []
        for call in log.fields(entries).module_call
    ]


def module_nesting_depth(log: Log, entries: Entries) -> list[int]:
    chains = log.graph.module_chains
    return [len(chains[call]) for call in log.fields(entries).module_call]


def modules_entered(log: Log, entries: Entries) -> list[list[str]]:
    return _addresses(log, log.graph.modules_entered, entries)


def module_passes_entered(log: Log, entries: Entries) -> list[list[str]]:
    return _passes(log, log.graph.modules_entered, entries)


def modules_exited(log: Log, entries: Entries) -> list[list[str]]:
    return _addresses(log, log.graph.modules_exited, entries)


def module_passes_exited(log: Log, entries: Entries) -> list[list[str]]:
    return _passes(log, log.graph.modules_exited, entries)


def is_submodule_input(log: Log, entries: Entries) -> list[bool]:
    return list(map(log.graph.modules_entered.__contains__, entries))


def is_submodule_output(log: Log, entries: Entries) -> list[bool]:
    return list(map(log.graph.modules_exited.__contains__, entries))


def bottom_level_submodule_pass_exited(log: Log, entries: Entries) -> list[str | None]:
    names = log.module_names
    return [None if call is None else names[call] for call in _bottom_calls_exited(log, entries)]


def is_bottom_level_submodule_output(log: Log, entries: Entries) -> list[bool]:
    return [call is not None for call in _bottom_calls_exited(log, entries)]


def _bottom_calls_exited(log: Log, entries: Entries) -> list[int | None]:
    children, addresses = log.graph.module_tree.children, log.module_call_addresses
    groups = map(log.graph.modules_exited.get, entries)
    return [
        next((call for call in own if not children[addresses[call]]), None) if own else None
        for own in groups
    ]
