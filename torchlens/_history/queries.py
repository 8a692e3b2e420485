"""Questions to the graph: which layers are of a kind, lead to another or lie between two.

Every function takes and returns numbers of entries; each is linear in the size of the graph.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any, TypeAlias

import torch

from torchlens._capture.selection import first_address
from torchlens._graph.paths import ancestors_of, descendants_of
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._history.lookup import Lookup
from torchlens._text.error_wording import check_count, did_you_mean, got

# A key of layers, an entry, or several of either.
Layers: TypeAlias = str | int | LayerEntry | Iterable[str | int | LayerEntry]
# A name with `*` for any part of it, a callable of torch, or several of either.
Kinds: TypeAlias = str | Callable[..., Any] | Sequence[str | Callable[..., Any]]
# The address of a module or a class of modules, or several of either.
Modules: TypeAlias = str | type[torch.nn.Module] | Sequence[str | type[torch.nn.Module]]
# None or -1 stands for any size, `...` for any number of sizes.
Shape: TypeAlias = Sequence[int | EllipsisType | None]
_Condition: TypeAlias = Callable[[int], bool]


def meant(log: Log, lookup: Lookup, name: str, layers: Layers) -> list[int]:
    """The entries that an argument means; a name with several passes means all of them."""
    if isinstance(layers, LayerEntry):
        if layers._log is not log:
            raise ValueError(f"{name} is an entry of another history: {layers.layer_label}.")
        return [layers._entry]
    if isinstance(layers, str | int):
        return lookup.many(layers, name)
    if not isinstance(layers, Iterable) or isinstance(layers, torch.Tensor | dict):
        raise TypeError(f"{name} must be a key, an entry, or a list of them, got {got(layers)}.")
    return sorted({entry for one in layers for entry in meant(log, lookup, name, one)})


# -- what is of a kind -----------------------------------------------------------------------------


def found(
    log: Log,
    kinds: Kinds | None,
    modules: Modules | None,
    shape: Shape | None,
    params: str | Sequence[str] | None,
    where: Callable[[LayerEntry], Any] | None,
) -> list[int]:
    """The listed entries for which all the conditions that are given hold.

    `where` is asked last, and only about entries that pass the others.
    """
    given = (
        (kinds, _of_kinds), (modules, _inside_modules), (params, _with_params), (shape, _of_shape),
        (where, _for_which),
    )  # fmt: skip
    holds = [make(log, condition) for condition, make in given if condition is not None]
    return [entry for entry in log.visible if all(each(entry) for each in holds)]


def _of_kinds(log: Log, kinds: Any) -> _Condition:
    patterns = [_type_pattern(kind) for kind in _each(kinds)]
    layers, layer_of = log.graph.layers, log.graph.layer_of
    types = {layer.type for layer in layers}
    wanted = {name for name in types if any(fnmatchcase(name, each) for each in patterns)}
    return lambda entry: layers[layer_of[entry]].type in wanted


def _inside_modules(log: Log, modules: Any) -> _Condition:
    own = set[int]().union(*(_calls_of(log, module) for module in _each(modules)))
    chains = enumerate(log.graph.module_chains)
    inside = {call for call, chain in chains if not own.isdisjoint(chain)}
    return lambda entry: log.row(entry).module_call in inside


def _with_params(log: Log, names: Any) -> _Condition:
    numbers, own = _parameters(log, _each(names)), log.graph.params
    return lambda entry: not numbers.isdisjoint(own[entry])


def _of_shape(log: Log, shape: Any) -> _Condition:
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise TypeError(
            "shape must be a tuple of sizes, with None for any size and ... for any number of "
            f"sizes, got {got(shape)}."
        )
    pattern = tuple(shape)
    return lambda entry: _fits(tuple(log.row(entry).shape), pattern)


def _for_which(log: Log, where: Any) -> _Condition:
    if not callable(where):
        raise TypeError(f"where must be a function of a layer entry, got {got(where)}.")
    return lambda entry: bool(where(LayerEntry(log, entry)))


def _each(given: Any) -> Iterable[Any]:
    return given if isinstance(given, list | tuple | set | frozenset) else [given]


def _type_pattern(kind: Any) -> str:
    """`maxpool2d` for 'max_pool2d', 'maxpool2d' and `torch.max_pool2d`."""
    name = getattr(kind, "__name__", None) if callable(kind) else kind
    if not isinstance(name, str) or isinstance(kind, type):
        raise TypeError(
            "type must be a type of layers such as 'conv2d' or 'conv*', or a function such as "
            f"torch.relu, got {got(kind)}. For modules of a class: module=torch.nn.Conv2d."
        )
    return name.lower().replace("_", "")


def _calls_of(log: Log, module: Any) -> set[int]:
    """The calls of the modules with an address, or of a class."""
    classes, addresses = log.recording.module_classes, log.module_call_addresses
    if isinstance(module, type):
        wanted = {name for name, kind in classes.items() if kind == module.__name__ and name}
        return {call for call, address in enumerate(addresses) if address in wanted}
    if not isinstance(module, str):
        raise TypeError(
            "module must be an address such as 'layers.3' or 'layers.*', or a class of modules, "
            f"got {got(module)}."
        )
    address = first_address(module, log.recording.module_aliases)
    names = enumerate(zip(addresses, log.module_names, strict=True))
    fitting = {
        call for call, both in names if call and any(fnmatchcase(name, address) for name in both)
    }
    if not fitting and address not in classes:
        near = did_you_mean(module, dict.fromkeys(filter(None, addresses)))
        raise KeyError(f"No module {module!r} ran. {near}".rstrip())
    return fitting


def _parameters(log: Log, names: Iterable[Any]) -> set[int]:
    """The numbers of the parameters with these addresses."""
    addresses = log.recording.param_addresses
    numbers: set[int] = set()
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"param must be an address such as 'fc.weight', got {got(name)}.")
        known = first_address(name, log.recording.module_aliases)
        own = {number for number, each in enumerate(addresses) if fnmatchcase(each, known)}
        if not own:
            raise KeyError(f"No parameter {name!r}. {did_you_mean(name, addresses)}".rstrip())
        numbers |= own
    return numbers


def _fits(shape: tuple[int, ...], pattern: tuple[Any, ...]) -> bool:
    if ... in pattern:
        place = pattern.index(...)
        before, after = pattern[:place], pattern[place + 1 :]
        if len(shape) < len(before) + len(after):
            return False
        ends = shape[: len(before)] + shape[len(shape) - len(after) :]
        return _fits(ends, before + after)
    sizes = zip(shape, pattern, strict=False)
    return len(shape) == len(pattern) and all(want in (None, -1, size) for size, want in sizes)


# -- what leads where ------------------------------------------------------------------------------


def between(log: Log, starts: Iterable[int], ends: Iterable[int]) -> list[int]:
    """The entries on the paths from any start to any end, both included."""
    parents = log.graph.parents
    after, before = descendants_of(starts, parents), ancestors_of(ends, parents)
    return [entry for entry, is_after in enumerate(after) if is_after and before[entry]]


def modules_between(log: Log, entries: Iterable[int]) -> list[str]:
    """The modules that ran only on the way: all that they computed lies among these entries."""
    chosen = set(entries)
    chains, addresses = log.graph.module_chains, log.module_call_addresses
    inside: dict[str, bool] = {}
    for entry in range(len(log.graph.recorded)):
        for call in chains[log.row(entry).module_call]:
            address = addresses[call]
            inside[address] = inside.get(address, True) and entry in chosen
    return [address for address, is_inside in inside.items() if is_inside]


def all_paths(log: Log, starts: list[int], ends: list[int], limit: int) -> list[list[int]]:
    """Every path from a start to an end, the shortest first; counted before any is made."""
    check_count("limit", limit, 1)
    on_way, targets = set(between(log, starts, ends)), set(ends)
    children = {
        entry: [child for child in log.graph.children[entry] if child in on_way] for entry in on_way
    }
    total = _num_paths(starts, children, targets)
    if total > limit:
        raise ValueError(
            f"There are {total:,} paths, more than limit={limit:,}. Raise the limit, choose nearer "
            "ends, or take history.between(a, b), which lists the layers on all of them."
        )
    found = []
    waiting = deque([start] for start in starts if start in on_way)
    while waiting:
        path = waiting.popleft()
        if path[-1] in targets:
            found.append(path)
        waiting.extend([*path, child] for child in children[path[-1]])
    return found


def _num_paths(starts: list[int], children: dict[int, list[int]], targets: set[int]) -> int:
    count: dict[int, int] = {}
    for entry in sorted(children, reverse=True):
        count[entry] = (entry in targets) + sum(count[child] for child in children[entry])
    return sum(count.get(start, 0) for start in starts)


def longest_path(log: Log, starts: Iterable[int], ends: Iterable[int]) -> list[int]:
    """The path with the most entries from a start to an end; empty if there is none."""
    first, last = set(starts), set(ends)
    on_way = between(log, first, last)
    before: dict[int, int] = {}
    length: dict[int, int] = {}
    for entry in on_way:
        known = [parent for parent in log.graph.parents[entry] if parent in length]
        if known:
            before[entry] = max(known, key=length.__getitem__)
            length[entry] = length[before[entry]] + 1
        else:
            length[entry] = 1
    reached = [entry for entry in on_way if entry in last]
    if not reached:
        return []
    path = [max(reached, key=length.__getitem__)]
    while path[-1] in before:
        path.append(before[path[-1]])
    return path[::-1]


# -- values of several passes ----------------------------------------------------------------------


def stacked_passes(log: Log, key: Any, entries: Sequence[int]) -> torch.Tensor:
    """The saved values of all passes as one tensor, the passes along its first dimension."""
    unsaved = [entry for entry in entries if not log.is_saved(entry)]
    if unsaved:
        raise ValueError(
            f"{log.label(unsaved[0])!r} was not saved, so the passes of {key!r} cannot be stacked. "
            f"Log again with layers_to_save=[{key!r}]."
        )
    values = [log.value(entry) for entry in entries]
    shapes = list(dict.fromkeys(tuple(value.shape) for value in values))
    if len(shapes) > 1:
        raise ValueError(
            f"The passes of {key!r} have several shapes, so they cannot be stacked: "
            f"{', '.join(map(str, shapes[:6]))}. Their values: "
            f"[entry.tensor_contents for entry in history[[{key!r}]]]."
        )
    return torch.stack(values)
