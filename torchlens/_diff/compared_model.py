"""One of the two models of a comparison: its entries, with a fingerprint of each value, the entry
that computed it, and the weights that led to it.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch

from torchlens._diff.fingerprints import Fingerprint, fingerprint
from torchlens._history.log import Log
from torchlens._recording.operation_kinds import ACTIVATIONS, VIEWS
from torchlens._recording.operations import IDENTITY, OUTPUT
from torchlens._recording.tolerance import are_whole
from torchlens._replay.numbered_entries import Entries

Tensor = torch.Tensor
_SAME_NUMBERS = 1e-12  # fingerprints of the same numbers differ by less

# Operations that mean the same in different libraries: `matmul`, `dot_general` and `einsum` are
# products.
_FAMILIES = {
    "product": "matmul mm bmm addmm addmv addbmm baddbmm linear dot mv einsum tensordot "
    "dotgeneral bilinear scaleddotproductattention innerproduct rmatmul conv1d conv2d conv3d "
    "convtranspose1d convtranspose2d convtranspose3d convgeneraldilated convolution",
    "add": "add iadd radd addany",
    "sub": "sub isub rsub subtract",
    "mul": "mul imul rmul multiply",
    "div": "div truediv itruediv rtruediv divide rdiv",
    "negative": "neg negative",
    "power": "pow ipow rpow integerpow square",
    "maximum": "relu relu6 max maximum clampmin amax reducemax clamp clip hardtanh",
    "minimum": "min minimum clampmax amin reducemin",
    "sigmoid": "sigmoid logistic expit",
    "normalisation": "layernorm batchnorm groupnorm instancenorm rmsnorm nativelayernorm "
    "nativebatchnorm fusedrmsnorm",
    "softmax": "softmax logsoftmax specialsoftmax speciallogsoftmax safesoftmax",
    "sum": "sum reducesum cumsum",
    "mean": "mean avgpool1d avgpool2d avgpool3d adaptiveavgpool1d adaptiveavgpool2d "
    "adaptiveavgpool3d",
    "pool": "maxpool1d maxpool2d maxpool3d maxpool2dwithindices reducewindowmax adaptivemaxpool2d",
    "lookup": "embedding gather indexselect take dynamicslice embeddingbag getitem slice narrow "
    "select",
    "join": "cat concat concatenate stack hstack vstack",
    "choose": "where maskedfill selectn",
    "recurrent": "lstm gru rnntanh rnnrelu lstmcell grucell",
    "cast": "to type float half double bfloat16 convertelementtype typeas",
    "resize": "interpolate upsample upsamplenearest2d upsamplebilinear2d upsamplebicubic2d "
    "repeatinterleave",
}
_FAMILY_OF = {name: family for family, names in _FAMILIES.items() for name in names.split()}


def family(layer_type: str) -> str:
    """The family of a layer type; the type itself if it has none."""
    if layer_type in _FAMILY_OF:
        return _FAMILY_OF[layer_type]
    return "view" if layer_type in VIEWS else layer_type


def is_activation(layer_type: str) -> bool:
    """True for elementwise functions, which ports confuse."""
    return layer_type in ACTIVATIONS or _FAMILY_OF.get(layer_type) in ("maximum", "sigmoid")


class ComparedModel(Entries):
    """The entries of one side of a comparison."""

    def __init__(
        self,
        log: Log,
        values: dict[int, Tensor | None] | None = None,
        old: "ComparedModel | None" = None,
    ) -> None:
        super().__init__(log, values)
        self.prints: list[Fingerprint | None] = []
        for entry in range(self.size):
            if old is not None and entry not in self._replaced:
                self.prints.append(old.prints[entry])
            else:
                value = self.value(entry)
                self.prints.append(None if value is None else fingerprint(value))
        self.root = self._roots()
        self._groups: dict[int, int] = {} if old is None else old._groups
        self.weight_history: list[bytes] = [] if old is None else old.weight_history

    def with_values(self, values: dict[int, Tensor | None]) -> "ComparedModel":
        """The same model with other values; buffers keep theirs."""
        others = {entry: value for entry, value in values.items() if entry not in self.buffers}
        return ComparedModel(self.log, others, self)

    # -- values
    # ----------------------------------------------------------------------------------------------

    def _roots(self) -> list[int]:
        """For each entry, the one that computed its value: itself, or the one whose numbers it
        passes on (a reshape, a permutation, a dropout in evaluation, an exact cast).
        """
        found = list(range(self.size))
        for entry, parents in enumerate(self.parents):
            if len(parents) == 1 and self._passes_on(entry, parents[0]):
                found[entry] = found[parents[0]]
        return found

    def _passes_on(self, entry: int, parent: int) -> bool:
        if self.rows[entry].operation in (OUTPUT, IDENTITY):
            return True
        mine, theirs = self.prints[entry], self.prints[parent]
        if mine is None or theirs is None or self.own_weights[entry]:
            return False
        if mine.size < 2 or mine.is_constant or mine.apart(theirs) > _SAME_NUMBERS:
            return False
        return self._have_same_sum(entry, parent)

    def _have_same_sum(self, entry: int, parent: int) -> bool:
        """False for whole numbers with different sums: large ones may have one fingerprint."""
        a, b = self.value(entry), self.value(parent)
        if a is None or b is None or not are_whole(a, b):
            return True
        return bool(a.sum(dtype=torch.int64) == b.sum(dtype=torch.int64))

    @cached_property
    def computed(self) -> list[int]:
        """The entries that computed a value, and inputs; without constants and buffers."""
        return [
            entry
            for entry, mine in enumerate(self.prints)
            if self.root[entry] == entry
            and mine is not None
            and not mine.is_constant
            and entry not in self.buffers
        ]

    # -- weights
    # ----------------------------------------------------------------------------------------------

    def used_weights(self) -> set[int]:
        """The weights that any entry reads."""
        return {weight for own in self.own_weights for weight in own}

    def set_groups(self, groups: dict[int, int], shared: Sequence[int]) -> None:
        """Sets the group of each weight: weights of both models that correspond are in one group.

        `weight_history` becomes, for each entry, how often each of the `shared` groups was applied
        on the longest path to it.
        """
        self._groups = groups
        place_of = {group: place for place, group in enumerate(shared)}
        counts: list[np.ndarray] = []
        texts: dict[int, bytes] = {}
        for entry, parents in enumerate(self.parents):
            above = [counts[parent] for parent in parents]
            count = above[0] if len(above) == 1 else np.zeros(len(shared), dtype=np.int16)
            if len(above) > 1:
                count = np.maximum.reduce(above)
            own = [place_of[group] for group in self.groups_of(entry) if group in place_of]
            if own:
                count = count.copy()
                count[own] += 1
            counts.append(count)
        self.weight_history = [texts.setdefault(id(c), c.tobytes()) for c in counts]

    def groups_of(self, entry: int) -> set[int]:
        """The groups of the weights that an entry reads itself."""
        return {self._groups[w] for w in self.own_weights[entry] if w in self._groups}

    @cached_property
    def features(self) -> "EntryFeatures":
        return EntryFeatures(self)


class EntryFeatures:
    """The properties of computed entries by which they are aligned, as arrays."""

    def __init__(self, model: ComparedModel) -> None:
        entries = model.computed
        self.place = {entry: number for number, entry in enumerate(entries)}

        def each(value: Callable[[int], Any]) -> np.ndarray:
            return np.array([value(entry) for entry in entries])

        prints = {entry: own for entry in entries if (own := model.prints[entry]) is not None}
        self.size = each(lambda entry: prints[entry].size)
        self.scale = each(lambda entry: prints[entry].scale)
        self.nonfinite = each(lambda entry: prints[entry].nonfinite)
        self.moments = each(lambda entry: prints[entry].features).reshape(len(entries), -1)
        self.type = each(lambda entry: hash(model.type_of(entry)))
        self.family = each(lambda entry: hash(family(model.type_of(entry))))
        self.is_activation = each(lambda entry: is_activation(model.type_of(entry)))
        self.dims = each(lambda entry: hash(_dims(model.rows[entry].shape)))
        self.exits = each(model.exits)
        self.digits = each(lambda entry: hash(_digits(model.module_of(entry))))
        weights = _weight_groups(model)
        self.own = each(lambda entry: hash(tuple(sorted(weights[entry]))))
        self.has_own = each(lambda entry: bool(weights[entry]))
        sizes: dict[int, int] = {}
        for weight, group in model._groups.items():
            sizes[group] = max(sizes.get(group, 0), prod(model.weights[weight].shape))
        largest = {entry: max(sorted(weights[entry]), key=sizes.__getitem__, default=-1)
                   for entry in entries}  # fmt: skip
        self.largest = each(largest.__getitem__)


def _dims(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size != 1))


def _digits(address: str) -> tuple[str, ...]:
    words = "".join(c if c.isalnum() else " " for c in address).split()
    return tuple(word for word in words if word.isdigit())


def _weight_groups(model: ComparedModel) -> list[set[int]]:
    """The groups of the weights that each entry reads; adding a bias and taking a part include the
    weights of their input.
    """
    found: list[set[int]] = []
    from_input = model.graph.has_input_ancestor
    for entry, parents in enumerate(model.parents):
        own = set(model.groups_of(entry))
        for parent in parents:
            if not from_input[parent]:  # made of weights alone, such as `weight.T`
                own |= found[parent]
        computed = [parent for parent in parents if from_input[parent]]
        passes_on = family(model.type_of(entry)) in ("add", "view", "lookup", "cast")
        if len(computed) == 1 and passes_on:
            own |= found[computed[0]]
        found.append(own)
    return found
