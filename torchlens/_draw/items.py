"""What becomes one node: an entry, a layer, a module, a run of operations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torchlens._draw.folding import Folding
from torchlens._graph.rolling import roll
from torchlens._history.log import Log
from torchlens._recording.operations import BUFFER

# From so many on, inputs or outputs of one name are one node: the keys and values of three layers.
_FEWEST_IN_BUNDLE = 6


class ItemKind(Enum):
    """What a node stands for."""

    OPERATION = "operation"  # one entry, or the passes of one layer
    MODULE = "module"
    BUNDLE = "bundle"  # inputs or outputs of one name, as the keys and values of a cache
    RUN = "run"  # operations one after the other, in a drawing that would be too large otherwise


@dataclass(frozen=True, slots=True)
class Choices:
    """How much is drawn as one."""

    is_rolled: bool
    depth: int
    shows_buffers: bool
    is_collapsed: Callable[[str], bool] | None = None  # of a module address
    folding: Folding | None = None
    run_length: int = (
        1  # more than 1: that many operations in a row are one node, and modules are not drawn
    )


@dataclass(slots=True)
class Item:
    """One node to be. `path` are the module calls drawn as boxes around it, outermost first.

    `entries` are those drawn, `copies` those folded into them. `call` is the module call that the
    item is.
    """

    kind: ItemKind
    path: tuple[int, ...]
    call: int | None
    entries: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    passes: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Grouping:
    """The items, and for each entry its item (-1 if it is not drawn) and which pass of that it
    belongs to.
    """

    choices: Choices
    items: list[Item]
    item_of: list[int]
    pass_of: list[int]


def group_entries(log: Log, choices: Choices) -> Grouping:
    """Sorts the entries into items, in order of first execution."""
    graph, calls, folding = log.graph, log.recording.module_calls, choices.folding
    count = len(graph.recorded)
    chains = _chains(log)
    plain = _plain_calls(log, chains)
    rolled = roll(log.recording, graph) if choices.is_rolled else None
    bundles = _bundles(log)
    items: list[Item] = []
    number_of: dict[Any, int] = {}
    item_of, pass_of = [-1] * count, [1] * count
    for entry in range(count):
        if log.row(entry).operation is BUFFER and not choices.shows_buffers:
            continue
        drawn = entry if folding is None else folding.drawn_for(entry)
        chain = chains[drawn] if choices.run_length == 1 else ()
        level = _collapse_level(log, choices, chain, plain)
        if level is not None:
            kind, path, call = ItemKind.MODULE, chain[:level], chain[level]
            place: Any = (
                tuple(calls[above].address for above in chain[: level + 1])
                if choices.is_rolled
                else call
            )
            key: Any = (kind, place)
            pass_of[entry] = calls[call].pass_num if choices.is_rolled else 1
        elif entry in bundles:
            kind, path, call = ItemKind.BUNDLE, (), None
            key = (kind, bundles[entry])
        else:
            kind, call = ItemKind.OPERATION, None
            path = chain
            if chain and chain[-1] in plain:
                path, call = chain[:-1], chain[-1]
            key = (kind, drawn if rolled is None else rolled.first_of[drawn])
            pass_of[entry] = 1 if rolled is None else rolled.pass_of[drawn]
            if choices.run_length > 1 and is_operation(log, entry):
                kind = ItemKind.RUN
                key = (kind, entry // choices.run_length)
        number = number_of.get(key)
        if number is None:
            number = number_of[key] = len(items)
            items.append(Item(kind, path, call))
        item = items[number]
        (item.entries if drawn == entry else item.copies).append(entry)
        item.passes.add(pass_of[entry])
        item_of[entry] = number
    return Grouping(choices, items, item_of, pass_of)


def is_operation(log: Log, entry: int) -> bool:
    """Whether the entry is an operation's result rather than an input, buffer or output."""
    graph = log.graph
    return (
        len(graph.inputs) + len(graph.buffers) <= entry < len(graph.recorded) - len(graph.outputs)
    )


def _bundles(log: Log) -> dict[int, str]:
    """The inputs and outputs that have a name in common with many others, with that name:
    `output.past_key_values`.
    """
    named: dict[str, list[int]] = {}
    for entry in (*log.graph.inputs, *log.graph.outputs):
        parts = log.boundary_addresses[entry][0].split(".")
        if len(parts) > 2:
            named.setdefault(".".join(parts[:2]), []).append(entry)
    return {
        entry: name for name, own in named.items() if len(own) >= _FEWEST_IN_BUNDLE for entry in own
    }


def _chains(log: Log) -> list[tuple[int, ...]]:
    """The module calls around each entry; around a buffer, those that all its readers are in."""
    chains = [log.module_chain(entry) for entry in range(len(log.graph.recorded))]
    for buffer in log.graph.buffers:
        chains[buffer] = _common([chains[child] for child in log.graph.children[buffer]])
    return chains


def _common(chains: list[tuple[int, ...]]) -> tuple[int, ...]:
    shared = chains[0] if chains else ()
    for chain in chains[1:]:
        length = 0
        while length < min(len(shared), len(chain)) and shared[length] == chain[length]:
            length += 1
        shared = shared[:length]
    return shared


def _plain_calls(log: Log, chains: list[tuple[int, ...]]) -> set[int]:
    """Calls of modules that are one operation: the node says it all, a box around it would say it
    again.
    """
    counts: dict[int, int] = {}
    for entry, chain in enumerate(chains):
        if is_operation(log, entry):
            for call in chain:
                counts[call] = counts.get(call, 0) + 1
    parents = {call.parent for call in log.recording.module_calls[1:]}
    return {call for call, number in counts.items() if number == 1 and call not in parents}


def _collapse_level(
    log: Log, choices: Choices, chain: tuple[int, ...], plain: set[int]
) -> int | None:
    """Which of the calls around an entry is drawn as one node, if any; the outermost wins."""
    for level, call in enumerate(chain):
        if level + 1 >= choices.depth and call not in plain:
            return level
        if choices.is_collapsed is not None and choices.is_collapsed(
            log.recording.module_calls[call].address
        ):
            return level
    return None
