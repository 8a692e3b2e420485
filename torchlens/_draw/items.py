"""Groups entries into items, each drawn as one node: an entry, a layer, a module, a run of
operations.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum

from torchlens._draw.repeated_modules import Folding
from torchlens._graph.rolling import roll
from torchlens._history.log import Log
from torchlens._recording.operations import BUFFER

# From so many on, inputs or outputs of the same name are one node, such as a cache.
_FEWEST_IN_BUNDLE = 6


class ItemKind(Enum):
    """What a node shows."""

    OPERATION = "operation"  # one entry, or the passes of one layer
    MODULE = "module"
    BUNDLE = "bundle"  # inputs or outputs of one name, as the keys and values of a cache
    RUN = "run"  # operations one after the other, in a drawing that would be too large otherwise


@dataclass(frozen=True, slots=True)
class Choices:
    """What is drawn as one node."""

    is_rolled: bool
    depth: int
    shows_buffers: bool
    is_collapsed: Callable[[str], bool] | None = None  # of a module address
    folding: Folding | None = None
    run_length: int = 1  # if more, that many operations in a row are one node, without modules


@dataclass(slots=True)
class Item:
    """What one node shows. `path` has the module calls drawn as boxes around it, outermost first.

    `entries` are drawn, `copies` are folded into them. `call` is the module call shown as this
    item, if any.
    """

    kind: ItemKind
    path: tuple[int, ...]
    call: int | None
    entries: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    passes: set[int] = field(default_factory=set)

    @property
    def all_entries(self) -> list[int]:
        """The entries that are drawn, and those folded into them."""
        return self.entries + self.copies


@dataclass(frozen=True, slots=True)
class Grouping:
    """The items, and for each entry its item (-1 if it is not drawn) and the pass of it."""

    choices: Choices
    items: list[Item]
    item_of: list[int]
    pass_of: list[int]


def group_entries(log: Log, choices: Choices) -> Grouping:
    """Sorts the entries into items, in order of first execution."""
    count, folding = len(log.graph.recorded), choices.folding
    sorter = _Sorter(log, choices)
    items: list[Item] = []
    number_of: dict[Hashable, int] = {}
    item_of, pass_of = [-1] * count, [1] * count
    for entry in range(count):
        if log.row(entry).operation is BUFFER and not choices.shows_buffers:
            continue
        drawn = entry if folding is None else folding.drawn_for(entry)
        key, item, pass_of[entry] = sorter.item_for(entry, drawn)
        number = number_of.setdefault(key, len(items))
        if number == len(items):
            items.append(item)
        item = items[number]
        (item.entries if drawn == entry else item.copies).append(entry)
        item.passes.add(pass_of[entry])
        item_of[entry] = number
    return Grouping(choices, items, item_of, pass_of)


class _Sorter:
    """Finds the item that an entry belongs to."""

    def __init__(self, log: Log, choices: Choices) -> None:
        self.log, self.choices = log, choices
        self.chains = _chains(log)
        self.plain = _plain_calls(log, self.chains)
        self.rolled = roll(log.recording, log.graph) if choices.is_rolled else None
        self.bundles = _bundles(log)

    def item_for(self, entry: int, drawn: int) -> tuple[Hashable, Item, int]:
        """The key of the item, equal for all entries of it; a new item; and the pass of it that
        the entry, drawn as the entry `drawn`, belongs to.
        """
        chain = self.chains[drawn] if self.choices.run_length == 1 else ()
        level = self._collapse_level(chain)
        if level is not None:
            return self._module(chain, level)
        if entry in self.bundles:
            return self.bundles[entry], Item(ItemKind.BUNDLE, (), None), 1
        key, pass_num = drawn, 1
        if self.rolled is not None:
            key, pass_num = self.rolled.first_of[drawn], self.rolled.pass_of[drawn]
        if self.choices.run_length > 1 and is_operation(self.log, entry):
            run = entry // self.choices.run_length
            return (ItemKind.RUN, run), Item(ItemKind.RUN, chain, None), pass_num
        if chain and chain[-1] in self.plain:
            return key, Item(ItemKind.OPERATION, chain[:-1], chain[-1]), pass_num
        return key, Item(ItemKind.OPERATION, chain, None), pass_num

    def _module(self, chain: tuple[int, ...], level: int) -> tuple[Hashable, Item, int]:
        calls, call = self.log.recording.module_calls, chain[level]
        item = Item(ItemKind.MODULE, chain[:level], call)
        if not self.choices.is_rolled:
            return (ItemKind.MODULE, call), item, 1
        addresses = tuple(calls[above].address for above in chain[: level + 1])
        return (ItemKind.MODULE, addresses), item, calls[call].pass_num

    def _collapse_level(self, chain: tuple[int, ...]) -> int | None:
        """The level of the outermost call around an entry that is drawn as one node, if any."""
        calls, is_collapsed = self.log.recording.module_calls, self.choices.is_collapsed
        for level, call in enumerate(chain):
            if level + 1 >= self.choices.depth and call not in self.plain:
                return level
            if is_collapsed is not None and is_collapsed(calls[call].address):
                return level
        return None


def is_operation(log: Log, entry: int) -> bool:
    """True if the entry is an operation's result rather than an input, buffer or output."""
    graph = log.graph
    return (
        len(graph.inputs) + len(graph.buffers) <= entry < len(graph.recorded) - len(graph.outputs)
    )


def _bundles(log: Log) -> dict[int, str]:
    """Inputs and outputs that share a name with many others → that name, such as
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
    """Calls of modules that are one operation. They need no box around their node."""
    counts: dict[int, int] = {}
    for entry, chain in enumerate(chains):
        if is_operation(log, entry):
            for call in chain:
                counts[call] = counts.get(call, 0) + 1
    parents = {call.parent for call in log.recording.module_calls[1:]}
    return {call for call, number in counts.items() if number == 1 and call not in parents}
