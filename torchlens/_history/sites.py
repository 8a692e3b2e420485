"""Sites: the places in a model that can be read or edited, from a module's output to one head.

A site is a key of the history and, if it is not the whole tensor, a part of it: a head, a neuron, a
channel, a token, any index, or a subspace. A `Place` is a site that was found in a history: the
entry whose value it is a part of, and how to read and write that part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from torchlens._history.attention_parts import HANDED_ON, AttentionParts, attentions_in, way_back
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._history.lookup import Lookup
from torchlens._history.residuals import residuals
from torchlens._recording.operation_kinds import ACTIVATIONS, NORMALISATIONS
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import located
from torchlens._text.error_wording import check_choice, got, is_whole

Tensor = torch.Tensor
Part: TypeAlias = Literal["before", "after", "q", "k", "v", "weights"]
SiteKind: TypeAlias = Literal[
    "module", "operation", "residual", "head", "q", "k", "v", "neuron", "channel"
]
# Which elements along a dimension: one, several, or a slice.
Which: TypeAlias = int | slice | Sequence[int]
_AXES = ("head", "neuron", "channel", "token")
_RECURRENT = frozenset({"gru", "lstm", "rnnrelu", "rnntanh"})
# What leaves features in the last dimension, between a linear layer and the end of an activation.
_KEEPING_FEATURES = HANDED_ON | NORMALISATIONS | ACTIVATIONS - {"softmax"}
_KEEPING_FEATURES |= {"add", "chunk", "iadd", "mul", "pow", "rmul", "split", "truediv"}
_KEEPING_FEATURES -= {"permute", "transpose"}
_READ_BY_ATTENTION = ("q", "k", "v", "weights")


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A place in a model. Make one with `torchlens.edits.site(key, ...)`.

    key: a key of the history: a module, a label, a number, or an entry.
    part: `'before'` is what the module `key` was given, `'after'` what it returned; `'q'`, `'k'`,
        `'v'` and `'weights'` are what the attention in it reads, and its softmax.
    head, neuron, channel, token: which of them (a number, a slice or a list). Heads are those of
        the attention's result, before they are projected; neurons lie along the last dimension,
        channels along the second, tokens along the one before the last of an attention, and else
        along the second.
    index: any other index, as in `value[index]`.
    directions: vectors (one or more rows) along the last dimension, which span a subspace.
    """

    key: Any
    part: Part | None = None
    head: Which | None = None
    neuron: Which | None = None
    channel: Which | None = None
    token: Which | None = None
    index: Any = None
    directions: Tensor | None = None

    def __post_init__(self) -> None:
        check_choice("part", self.part, get_args(Part), or_none=True)
        for name in _AXES:
            which = getattr(self, name)
            if which is not None and not _is_which(which):
                raise TypeError(
                    f"{name} must be a number, a slice or a list of numbers, got {got(which)}."
                )
        if self.index is not None and any(getattr(self, name) is not None for name in _AXES):
            raise ValueError("Give index= or the names of dimensions (head=, token=, ...).")
        if self.directions is not None and (
            not isinstance(self.directions, Tensor) or self.directions.ndim not in (1, 2)
        ):
            raise TypeError(
                "directions must be a vector, or a matrix with one vector a row, got "
                f"{got(self.directions)}."
            )

    def __str__(self) -> str:
        key = self.key.layer_label if isinstance(self.key, LayerEntry) else self.key
        return ".".join([str(key), *([self.part] if self.part else [])]) + self.parts_text

    __repr__ = __str__

    @property
    def parts_text(self) -> str:
        """`[head 3, token -1]`; empty for a whole tensor."""
        named = [(name, getattr(self, name)) for name in (*_AXES, "index")]
        words = [f"{name} {_which_text(which)}" for name, which in named if which is not None]
        if self.directions is not None:
            count = 1 if self.directions.ndim == 1 else len(self.directions)
            words.append(f"{count} direction{'s' if count > 1 else ''}")
        return f"[{', '.join(words)}]" if words else ""

    @property
    def is_whole(self) -> bool:
        """True if it is a whole tensor."""
        return not self.parts_text


def _is_which(which: Any) -> bool:
    if isinstance(which, list | tuple | range):
        return all(map(is_whole, which))
    return isinstance(which, slice) or is_whole(which)


def _which_text(which: Any) -> str:
    if not isinstance(which, slice):
        return str(which)
    bounds = ["" if bound is None else str(bound) for bound in (which.start, which.stop)]
    step = "" if which.step is None else f":{which.step}"
    return ":".join(bounds) + step


class Place(NamedTuple):
    """A site in a history: an entry, the axes of its value, and the site."""

    entry: int
    axes: dict[str, int]  # the dimension of each named axis
    site: Site

    def read(self, value: Tensor) -> Tensor:
        """The part of the entry's value."""
        part = value if self.site.is_whole else value[self._index(value)]
        if self.site.directions is None:
            return part
        return part @ _inverse(self.site.directions, part)

    def write(self, value: Tensor, part: Tensor) -> Tensor:
        """A new value with the part replaced; the gradient flows through both."""
        if self.site.is_whole:
            return part
        index = self._index(value)
        if self.site.directions is not None:
            old = value[index]
            moved = part - old @ _inverse(self.site.directions, old)
            part = old + moved @ _rows(self.site.directions, old)
        new = value.clone()
        new[index] = part
        return new

    def _index(self, value: Tensor) -> Any:
        site = self.site
        if site.index is not None:
            return site.index
        index: list[Any] = [slice(None)] * value.ndim
        for name, axis in self.axes.items():
            which = getattr(site, name)
            _check_range(name, which, int(value.shape[axis]), site)
            index[axis] = list(which) if isinstance(which, tuple | range) else which
        return tuple(index)


def _check_range(name: str, which: Any, size: int, site: Site) -> None:
    numbers = [] if isinstance(which, slice) else [which] if is_whole(which) else list(which)
    for number in numbers:
        if not -size <= number < size:
            raise IndexError(
                f"{site} has {size} {name}s, numbered 0 to {size - 1}; there is no {number}."
            )


def _rows(directions: Tensor, like: Tensor) -> Tensor:
    rows = directions.to(like.device, like.dtype)
    return rows[None] if rows.ndim == 1 else rows


def _inverse(directions: Tensor, like: Tensor) -> Tensor:
    """What a vector is multiplied with to get its coordinates in the subspace."""
    rows = _rows(directions, like)
    wide = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    return torch.linalg.pinv(wide).to(like.dtype)


def axes_of(site: Site, shape: Sequence[int]) -> dict[str, int]:
    """The dimension of each named axis of a site, in a value of this shape."""
    ndim = len(shape)
    in_heads = ndim == 4 and (site.head is not None or site.part in _READ_BY_ATTENTION)
    where = {"head": 1, "neuron": ndim - 1, "channel": 1, "token": 2 if in_heads else 1}
    least = {"head": 4, "neuron": 1, "channel": 2, "token": 3}
    axes = {name: where[name] for name in _AXES if getattr(site, name) is not None}
    for name in axes:
        if ndim < least[name]:
            raise ValueError(
                f"{site}: the value has the shape {tuple(shape)}, in which no dimension is known "
                f"to hold {name}s. Say which elements with index=(...)."
            )
    if len(set(axes.values())) < len(axes):
        raise ValueError(f"{site} names one dimension of the value twice: {', '.join(axes)}.")
    return axes


# -- finding a site in a history -------------------------------------------------------------------


class Sites:
    """The sites of one log."""

    def __init__(self, log: Log, lookup: Lookup) -> None:
        self._log = log
        self._lookup = lookup
        self._found: dict[int, list[AttentionParts]] = {}

    def place(self, site: Any) -> Place:
        """The place that a site, a key or an entry means."""
        if not isinstance(site, Site):
            site = Site(site)
        entry, call = self._entry(site.key)
        needs_attention = site.head is not None or site.part in _READ_BY_ATTENTION
        if site.part == "before":
            entry = self._given(site, call)
        elif needs_attention:
            entry = self._of_attention(site, entry, call)
        return Place(entry, axes_of(site, self._log.row(entry).shape), site)

    def _entry(self, key: Any) -> tuple[int, int | None]:
        """The entry of a key, and the call of a module that the key names."""
        if isinstance(key, LayerEntry):
            if key._log is not self._log:
                raise ValueError(f"The site is an entry of another history: {key.layer_label}.")
            return key._entry, None
        entry = self._lookup.one(key)
        names = str(key), f"{key}:1"
        calls = self._log.graph.modules_exited.get(entry, ())
        same = [call for call in calls if self._log.module_pass(call) in names]
        if not same:
            same = [call for call in calls if self._log.module_call_addresses[call] == key]
        return entry, same[0] if same else None

    def _given(self, site: Site, call: int | None) -> int:
        """The entry that a module was given."""
        for number, numbers in self._log.recording.module_entries:
            if call is not None and number == call:
                given = [self._log.graph.entry_of.get(each) for each in numbers]
                for entry in given:
                    if entry is not None:
                        return entry
        raise KeyError(
            f"part='before' is what a module was given, and {site.key!r} is no module that was "
            "given a tensor. Name the module by its address, such as 'h.3'."
        )

    def _of_attention(self, site: Site, entry: int, call: int | None) -> int:
        """The entry with the heads: the attention's result, or what it reads."""
        if call is None:
            if len(self._log.row(entry).shape) == 4 and site.part is None:
                return entry
            calls = self._log.graph.modules_exited.get(entry, ())
            found = [one for one in self._attentions(0) if entry == one.out or one.call in calls]
        else:
            found = self._attentions(call)
        if len(found) != 1:
            what = "no attention" if not found else f"{len(found)} attentions"
            near = [self._log.module_call_addresses[one.call] for one in found]
            cure = (
                f" Name one of them: {', '.join(near)}."
                if near
                else (" A head is a slice of the value along a dimension: index=(...) takes any.")
            )
            raise KeyError(f"{site} asks for an attention, and {site.key!r} has {what}.{cure}")
        part = site.part if site.part in _READ_BY_ATTENTION else "out"
        chosen: int | None = getattr(found[0], part)
        if chosen is None:
            raise KeyError(
                f"{site}: this attention is one fused call, which does not show its {part}. Build "
                "the model with attn_implementation='eager' (transformers) to see it."
            )
        return chosen

    def _attentions(self, call: int) -> list[AttentionParts]:
        if call not in self._found:
            self._found[call] = attentions_in(self._log, call)
        return self._found[call]

    # -- listing -----------------------------------------------------------------------------------

    def listed(self, kind: SiteKind | None, within: str) -> list[Site]:
        """The sites of a kind, or of all kinds but operations, neurons and channels."""
        kinds: tuple[Any, ...] = get_args(SiteKind)
        check_choice("kind", kind, kinds, or_none=True)
        wanted = ("module", "residual", "head", "q", "k", "v") if kind is None else (kind,)
        found = [site for name in wanted for site in self._of_kind(name)]
        return [site for site in found if self._is_within(site, within)]

    def _is_within(self, site: Site, within: str) -> bool:
        if within == "*" or fnmatchcase(str(site.key), within):
            return True
        chain = self._log.module_chain(self.place(site).entry)
        return any(fnmatchcase(self._log.module_call_addresses[call], within) for call in chain)

    def _of_kind(self, kind: str) -> Iterator[Site]:
        if kind == "module":
            yield from (Site(self._module_key(call)) for call in sorted(self._log.graph.first_exit))
        elif kind == "residual":
            found = residuals(self._log)
            stream = {each.start._entry for each in found} | {each.end._entry for each in found}
            yield from (Site(self._log.label(entry)) for entry in sorted(stream))
        elif kind in ("head", "q", "k", "v"):
            for one in self._attentions(0):
                key = self._module_key(one.call) or self._log.label(one.out)
                part: Any = None if kind == "head" else kind
                site = Site(key, part=part)
                shape = self._log.row(self.place(replace(site, head=0)).entry).shape
                yield from (replace(site, head=number) for number in range(shape[1]))
        else:
            yield from self._elements(kind)

    def _elements(self, kind: str) -> Iterator[Site]:
        for entry in self._log.visible:
            row = self._log.row(entry)
            type_, label = row.operation.layer_type, self._log.label(entry)
            if kind == "operation" and row.operation not in (INPUT, BUFFER, OUTPUT):
                yield Site(label)
            elif kind == "neuron" and self._has_neurons(entry):
                key = self._of_activation(entry) or label
                yield from (Site(key, neuron=number) for number in range(row.shape[-1]))
            elif kind == "channel" and type_.startswith("conv") and len(row.shape) > 2:
                yield from (Site(label, channel=number) for number in range(row.shape[1]))

    def _has_neurons(self, entry: int) -> bool:
        """True for the result of an activation, or of a recurrent net, with features last."""
        row = self._log.row(entry)
        type_ = row.operation.layer_type
        if type_ in _RECURRENT:
            return not row.output_index
        if type_ not in ACTIVATIONS - {"softmax"} or len(row.shape) > 3:
            return False
        *_, source = way_back(self._log, entry, _KEEPING_FEATURES)
        source_row = self._log.row(source)
        if source_row.operation.layer_type == "matmul" and self._log.graph.params[source]:
            return next((place for place, _ in located(source_row.references)), None) == 0
        return source_row.operation.layer_type in ("addmm", "linear")

    def _of_activation(self, entry: int) -> str | None:
        """The module that is an activation, such as a GELU written out with `tanh`."""
        graph, log = self._log.graph, self._log
        call = log.row(entry).module_call
        end = graph.first_exit.get(call, -1)
        inside = range(entry, end + 1)
        if not inside or not all(log.row(own).module_call == call for own in inside):
            return None
        is_plain = not any(graph.params[own] for own in inside)
        return self._module_key(call) if is_plain else None

    def _module_key(self, call: int) -> str:
        """The address of a module, with the pass if it ran several times."""
        address = self._log.module_call_addresses[call]
        is_repeated = self._log.graph.module_tree.num_passes.get(address, 1) > 1
        return self._log.module_pass(call) if is_repeated else address
