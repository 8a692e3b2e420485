"""The field of a unit: found by structure, from operation to operation, and checked by gradient."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge

from torchlens._graph.paths import ancestors_of, descendants_of
from torchlens._history.log import Log
from torchlens._receptive.dependence import reading_of
from torchlens._receptive.reading import ReadCall, Reading, everything, narrow, same, sizes
from torchlens._recording.recording import located
from torchlens._recording.regions import Region
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._text.error_wording import got

Tensor = torch.Tensor
# An index of a tensor, as in `tensor[unit]`; several units if it has slices.
Unit: TypeAlias = int | slice | tuple[int | slice, ...]


@dataclass(frozen=True)
class Field:
    """Which elements of other layers a unit reads (receptive) or leads to (projective).

    `masks` says it for each of these layers, by label: a tensor of booleans of its shape. `mask`,
    `bounds`, `size`, `centre` and `gradient` are of the only one; if there are several, `of(label)`
    is the field in one of them. `assumed` lists the types of operations of which it is not known
    what their results depend on, so that all is taken to depend on all.
    """

    layer: str
    unit: tuple[int | slice, ...]
    masks: dict[str, Tensor]
    assumed: tuple[str, ...] = ()
    is_projective: bool = False
    _log: Log | None = field(default=None, repr=False, compare=False)
    _ends: tuple[int, ...] = field(default=(), repr=False, compare=False)  # the unit's entry first

    def of(self, label: str) -> "Field":
        """The field in one layer."""
        if label not in self.masks:
            raise KeyError(f"No field in {label!r}. There are: {', '.join(self.masks)}.")
        number = list(self.masks).index(label)
        return Field(
            self.layer, self.unit, {label: self.masks[label]}, self.assumed, self.is_projective,
            self._log, (self._ends[0], self._ends[1 + number]),
        )  # fmt: skip

    @property
    def mask(self) -> Tensor:
        """True for each element that can matter."""
        return self.masks[self._only()]

    @property
    def bounds(self) -> tuple[slice, ...] | None:
        """The smallest box around the field, as an index; None if the field is empty."""
        places = self.mask.nonzero()
        if not len(places):
            return None
        low, high = places.amin(0).tolist(), places.amax(0).tolist()
        return tuple(slice(a, b + 1) for a, b in zip(low, high, strict=True))

    @property
    def size(self) -> tuple[int, ...]:
        """The sides of that box."""
        return tuple(own.stop - own.start for own in self.bounds or ())

    @property
    def centre(self) -> tuple[float, ...]:
        """The middle of that box."""
        return tuple((own.start + own.stop - 1) / 2 for own in self.bounds or ())

    @cached_property
    def gradient(self) -> Tensor:
        """Receptive: the derivative of the unit with respect to each element. Projective: the
        derivative of each element with respect to the unit. Of several units: the sum.

        Raises ValueError if the log has no gradients to compute it from, and RuntimeError if it is
        other than zero outside the mask.
        """
        self._only()
        assert self._log is not None
        entry, source = self._ends[::-1] if self.is_projective else self._ends
        with unseen(), NoTorchFunction():
            found = _gradient(self._log, entry, source, self.unit, self.is_projective)
        if bool((found[~self.mask.to(found.device)] != 0).any()):
            raise RuntimeError(
                f"The gradient of {self.layer!r} is other than zero outside its field. "
                "Please report this as a bug of torchlens."
            )
        return found

    def _only(self) -> str:
        if not self.masks:
            leads = "leads to" if self.is_projective else "depends on"
            raise ValueError(f"The unit of {self.layer!r} {leads} none of these layers.")
        if len(self.masks) != 1:
            raise ValueError(
                f"There are {len(self.masks)} fields, in {', '.join(self.masks)}: "
                "choose one with field.of(label), or take field.masks."
            )
        return next(iter(self.masks))

    def __repr__(self) -> str:
        counts = [
            f"{int(mask.sum()):,} of {mask.numel():,} in {label}"
            for label, mask in self.masks.items()
        ]
        kind = "projective" if self.is_projective else "receptive"
        return f"<Field ({kind}) of {self.layer}: {'; '.join(counts) or 'nothing'}>"


def receptive_field(log: Log, entry: int, unit: Unit | None, sources: Iterable[int]) -> Field:
    """What a unit of an entry reads of the sources."""
    wanted = [source for source in sources if log.row(source).shape is not None]
    mask, index = _unit_mask(log, entry, unit)
    is_ancestor = ancestors_of([entry], log.graph.parents)
    is_reached = descendants_of(wanted, log.graph.parents)
    masks, assumed = {entry: mask}, set[str]()
    with unseen(), NoTorchFunction():
        for reader in range(entry, -1, -1):
            if reader not in masks or not is_reached[reader]:
                continue
            for parent, link in _links(log, reader):
                if is_ancestor[parent] and is_reached[parent]:
                    _added(masks, parent, link.backward(masks[reader]))
                    assumed |= link.assumed
            if reader not in wanted:
                del masks[reader]
    return _field(log, entry, index, wanted, masks, assumed)


def projective_field(log: Log, entry: int, unit: Unit | None, targets: Iterable[int]) -> Field:
    """What a unit of an entry leads to in the targets."""
    wanted = list(targets)
    mask, index = _unit_mask(log, entry, unit)
    is_after = descendants_of([entry], log.graph.parents)
    is_needed = ancestors_of(wanted, log.graph.parents)
    masks, assumed = {entry: mask}, set[str]()
    with unseen(), NoTorchFunction():
        for reader in range(entry + 1, len(is_after)):
            if not (is_after[reader] and is_needed[reader]):
                continue
            for parent, link in _links(log, reader):
                if parent in masks:
                    _added(masks, reader, link.forward(masks[parent]))
                    assumed |= link.assumed
    return _field(log, entry, index, wanted, masks, assumed, is_projective=True)


def _field(
    log: Log, entry: int, unit: tuple[int | slice, ...], ends: Sequence[int],
    masks: dict[int, Tensor], assumed: set[str], is_projective: bool = False,
) -> Field:  # fmt: skip
    found = [end for end in ends if end in masks]
    named = {log.label(end): masks[end].contiguous() for end in found}
    return Field(
        log.label(entry), unit, named, tuple(sorted(assumed)), is_projective, log, (entry, *found)
    )


def _unit_mask(log: Log, entry: int, unit: Any) -> tuple[Tensor, tuple[int | slice, ...]]:
    """The mask of the units, and their index; by default, of the one in the middle."""
    shape, label = sizes(log.row(entry).shape), log.label(entry)
    if log.recording.framework != "torch":
        raise ValueError("Only models of PyTorch have fields so far.")
    if unit is None:
        unit = tuple(size // 2 for size in shape)
    index = unit if isinstance(unit, tuple) else (unit,)
    if not all(isinstance(one, int | slice) and not isinstance(one, bool) for one in index):
        raise TypeError(
            f"unit must be an index of {label!r} made of numbers and slices, got {got(unit)}."
        )
    mask = torch.zeros(shape, dtype=torch.bool)
    try:
        mask[index] = True
    except IndexError as error:
        raise IndexError(f"No unit {index} in {label!r}, whose shape is {shape}.") from error
    return mask, index


# -- from one entry to the next --------------------------------------------------------------------


class _Link:
    """How one parent of an entry leads to it: by an argument, or by what it wrote to the memory of
    that argument.
    """

    def __init__(
        self, call: ReadCall, reading: Reading, written: tuple[Region, Region] | None
    ) -> None:
        self._call, self._reading, self._written = call, reading, written

    @property
    def assumed(self) -> set[str]:
        return set() if self._reading.is_known else {self._call.kind}

    def backward(self, mask: Tensor) -> Tensor:
        """What of the parent the marked part of the result reads."""
        own = self._pulled(mask)
        return own if self._written is None else _carried(own, *self._written)

    def forward(self, mask: Tensor) -> Tensor:
        """What of the result the marked part of the parent leads to."""
        if self._written is not None:
            mask = _carried(mask, *self._written[::-1])
        return (narrow(self._run(_as_numbers(mask))) != 0).expand(self._call.out)

    def _pulled(self, mask: Tensor) -> Tensor:
        if self._reading.run is same and self._call.shape == self._call.out:
            return mask
        with torch.enable_grad():
            given = torch.zeros((), requires_grad=True).expand(self._call.shape)
            found = self._run(given)
            if not found.requires_grad:
                return torch.zeros((), dtype=torch.bool).expand(self._call.shape)
            (gradient,) = torch.autograd.grad(found, given, _as_numbers(mask))
        return (narrow(gradient) != 0).expand(self._call.shape)

    def _run(self, tensor: Tensor) -> Tensor:
        try:
            return self._reading.run(tensor).expand(self._call.out)
        except (IndexError, LookupError, RuntimeError, TypeError, ValueError):
            # The call is not as its rule expects.
            self._reading = everything(is_known=False)
            return self._reading.run(tensor).expand(self._call.out)


def _as_numbers(mask: Tensor) -> Tensor:
    return narrow(mask).float().expand(mask.shape)


def _added(masks: dict[int, Tensor], entry: int, mask: Tensor) -> None:
    """Adds to the mask of an entry. What is the same everywhere takes no memory."""
    own = narrow(mask)
    if entry in masks:
        own = own | narrow(masks[entry])
    if own.numel() > 1 and bool(own.all()):
        own = torch.ones((), dtype=torch.bool)
    masks[entry] = own.expand(mask.shape)


def _links(log: Log, entry: int) -> Iterable[tuple[int, _Link]]:
    """The parents of an entry, and how each leads to it."""
    graph, recording = log.graph, log.recording
    number, row = graph.recorded[entry], log.row(entry)
    given = dict(located(row.references))
    reads = graph.located_reads.get(number) or located(row.references)
    for location, source in reads:
        argument = given.get(location, source)
        if source not in graph.entry_of or argument is None:
            continue
        known = argument if argument >= 0 else source
        call = ReadCall(log, entry, location, known)
        found = reading_of(call)
        if found is None:
            continue
        written = None
        if source != argument:
            regions = recording.regions.get(known), recording.regions.get(source)
            if regions[0] is None or regions[1] is None:
                found = everything(is_known=False)
                call = ReadCall(log, entry, location, source)
            else:
                written = regions[0], regions[1]
        yield graph.entry_of[source], _Link(call, found, written)


def _carried(mask: Tensor, region: Region, other: Region) -> Tensor:
    """A mask of one region of a storage as a mask of another."""
    size = max(_length(region), _length(other))
    places = torch.arange(size)
    memory = torch.zeros(size, dtype=torch.bool)
    memory[_view(places, region)[mask.reshape(region.shape)]] = True
    return memory[_view(places, other)]


def _length(region: Region) -> int:
    return region.end // region.item_bytes


def _view(places: Tensor, region: Region) -> Tensor:
    return places.as_strided(region.shape, region.strides, region.offset)


# -- by gradient -----------------------------------------------------------------------------------


def _gradient(
    log: Log, entry: int, source: int, unit: tuple[int | slice, ...], is_projective: bool
) -> Tensor:
    """The derivative of a unit of `entry` with respect to `source`, or of `entry` with respect to
    a unit of `source`.
    """
    value, given = log.value(entry), log.value(source)
    edge = _edge(log, source, given)
    if not isinstance(value, Tensor) or value.grad_fn is None or edge is None:
        raise ValueError(
            f"There is no gradient from {log.label(entry)!r} to {log.label(source)!r}: log with "
            "gradients enabled, everything saved, and an input of floats that requires one "
            "(x.requires_grad_())."
        )
    start = torch.zeros_like(value)
    if not is_projective:
        start[unit] = 1
        (found,) = torch.autograd.grad(value, edge, start, retain_graph=True, allow_unused=True)
        return torch.zeros_like(given) if found is None else found.detach()
    start.requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(value, edge, start, create_graph=True, allow_unused=True)
        if found is None or not found.requires_grad:
            return torch.zeros_like(value)
        (column,) = torch.autograd.grad(found[unit].sum(), start, allow_unused=True)
    return torch.zeros_like(value) if column is None else column


def _edge(log: Log, source: int, value: Any) -> GradientEdge | None:
    """Where the gradient of an entry arrives; that of a saved copy is not on the way."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return None
    edge = torch.autograd.graph.get_gradient_edge(value)
    if log.graph.recorded[source] in log.recording.copies:
        node, number = edge.node.next_functions[0]
        return None if node is None else GradientEdge(node, number)
    return edge
