"""Columns of the modules that an entry was computed in, given to and returned by."""

from torchlens.history.columns.making import Entries
from torchlens.history.log import Log


def _addresses(log: Log, found: dict[int, list[int]], entries: Entries) -> list[list[str]]:
    records = log.recording.module_calls
    return [[records[call].address for call in own] if own else [] for own in map(found.get, entries)]


def _passes(log: Log, found: dict[int, list[int]], entries: Entries) -> list[list[str]]:
    names = log.module_names
    return [[names[call] for call in own] if own else [] for own in map(found.get, entries)]


def containing_module_origin(log: Log, entries: Entries) -> list[str | None]:
    names = log.module_names
    return [names[row.module_call] if row.module_call else None for row in log.rows(entries)]


def containing_modules_origin_nested(log: Log, entries: Entries) -> list[list[str]]:
    chains, names = log.graph.module_chains, log.module_names
    calls = [row.module_call for row in log.rows(entries)]
    return [[names[outer] for outer in chains[call]] if call else [] for call in calls]


def module_nesting_depth(log: Log, entries: Entries) -> list[int]:
    chains = log.graph.module_chains
    return [len(chains[row.module_call]) for row in log.rows(entries)]


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
    children, records = log.graph.module_tree.children, log.recording.module_calls
    found: list[int | None] = []
    for calls in map(log.graph.modules_exited.get, entries):
        for call in calls or ():
            if not children[records[call].address]:
                found.append(call)
                break
        else:
            found.append(None)
    return found
