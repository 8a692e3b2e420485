"""Which module calls an entry went into, came out of, and was made in."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchlens._recording.recording import ModuleCall


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """The modules that ran, by address: how often, and which ran inside which."""

    num_passes: dict[str, int]
    children: dict[str, list[str]]
    top_level: list[str]


def module_tree(calls: Sequence[ModuleCall]) -> ModuleTree:
    """The modules in order of their first call. The root (call 0) is none of them."""
    num_passes: dict[str, int] = {}
    children: dict[str, dict[str, None]] = {"": {}}
    for call in calls[1:]:
        num_passes[call.address] = call.pass_num
        children.setdefault(call.address, {})
        above = calls[call.parent].address
        if above != call.address:
            children[above][call.address] = None
    return ModuleTree(
        num_passes,
        {address: list(below) for address, below in children.items() if address},
        list(children[""]),
    )


def call_chains(calls: Sequence[ModuleCall]) -> list[tuple[int, ...]]:
    """For each module call, the calls it is nested in, outermost first, itself last; the root is
    left out.
    """
    chains: list[tuple[int, ...]] = [()]
    for number, call in enumerate(calls[1:], start=1):
        chains.append((*chains[call.parent], number))
    return chains


def calls_by_entry(
    calls: Sequence[tuple[int, list[int]]], entry_of: dict[int, int]
) -> dict[int, list[int]]:
    """For each entry, the module calls it is listed with."""
    found: dict[int, list[int]] = {}
    for call, numbers in calls:
        for number in dict.fromkeys(numbers):
            entry = entry_of.get(number)
            if entry is not None:
                found.setdefault(entry, []).append(call)
    return found


def first_exits(calls: Sequence[tuple[int, list[int]]], entry_of: dict[int, int]) -> dict[int, int]:
    """For each module call, the first of the entries it returned."""
    found = {}
    for call, numbers in calls:
        entries = [entry_of[number] for number in numbers if number in entry_of]
        if entries:
            found[call] = entries[0]
    return found
