"""One side of a comparison with what matching needs of it: fingerprints of its values, and the
weights that led to each.
"""

from collections.abc import Sequence
from functools import cached_property
from math import prod

import numpy as np
import torch

from torchlens._diff.families import acts, family
from torchlens._diff.fingerprints import Fingerprint, fingerprint, roots
from torchlens._replay.entries import Entries


class Subject:
    """A side with what matching needs of it."""

    def __init__(
        self,
        side: Entries,
        groups: dict[int, int],
        shared: Sequence[int],
        old: "Subject | None" = None,
    ) -> None:
        self.side = side
        self._groups = groups
        self._shared = {group: place for place, group in enumerate(shared)}
        self.prints: list[Fingerprint | None] = []
        for entry in range(side.size):
            if old is not None and entry not in side._replaced:
                self.prints.append(old.prints[entry])
            else:
                value = side.value(entry)
                self.prints.append(None if value is None else fingerprint(value))
        self.root = roots(side, self.prints)
        self.cones: list[bytes] = self._cones() if old is None else old.cones

    def again(self, values: "dict[int, torch.Tensor | None]") -> "Subject":
        """The same with other values."""
        return Subject(Entries(self.side.log, values), self._groups, list(self._shared), self)

    def _cones(self) -> list[bytes]:
        """For each entry, which weights led to it, and how often one after the other: in whatever
        steps that was done.
        """
        zero = np.zeros(len(self._shared), dtype=np.int16)
        found: list[np.ndarray] = []
        for entry in range(self.side.size):
            parents = self.side.parents[entry]
            own = {self._shared[g] for g in self.own_groups(entry) if g in self._shared}
            if not parents:
                count = zero
            elif len(parents) == 1:
                count = found[parents[0]]
            else:
                count = np.maximum.reduce([found[parent] for parent in parents])
            if own:
                count = count.copy()
                count[list(own)] += 1
            found.append(count)
        texts: dict[int, bytes] = {}
        return [texts.setdefault(id(count), count.tobytes()) for count in found]

    def own_groups(self, entry: int) -> set[int]:
        return {
            self._groups[weight]
            for weight in self.side.own_weights[entry]
            if weight in self._groups
        }

    def group_sizes(self) -> dict[int, int]:
        """How many numbers the largest weight of each group has."""
        found: dict[int, int] = {}
        for weight, group in self._groups.items():
            found[group] = max(found.get(group, 0), prod(self.side.weights[weight].shape))
        return found

    @cached_property
    def computed(self) -> list[int]:
        """The entries that computed a value of their own, inputs among them."""
        return [
            entry
            for entry in range(self.side.size)
            if self.root[entry] == entry
            and self.prints[entry] is not None
            and self._is_worth(entry)
        ]

    def _is_worth(self, entry: int) -> bool:
        print_ = self.prints[entry]
        return print_ is not None and not print_.is_constant and entry not in self.side._buffers

    @cached_property
    def features(self) -> "Features":
        return Features(self)


class Features:
    """What is compared of entries, as arrays."""

    def __init__(self, subject: Subject) -> None:
        side, entries = subject.side, subject.computed
        self.place = {entry: number for number, entry in enumerate(entries)}
        prints = [subject.prints[entry] for entry in entries]
        self.size = np.array([p.size for p in prints if p is not None], dtype=np.int64)
        self.scale = np.array([p.scale for p in prints if p is not None])
        self.nonfinite = np.array([p.nonfinite for p in prints if p is not None], dtype=np.int64)
        self.features = np.array([p.features for p in prints if p is not None]).reshape(
            len(entries), -1
        )
        self.type = np.array([hash(side.type_of(entry)) for entry in entries])
        self.family = np.array([hash(family(side.type_of(entry))) for entry in entries])
        self.acts = np.array([acts(side.type_of(entry)) for entry in entries], dtype=bool)
        shapes = [
            tuple(sorted(size for size in side.rows[entry].shape if size != 1)) for entry in entries
        ]
        self.dims = np.array([hash(shape) for shape in shapes])
        chained = _chained_groups(subject)
        own = [tuple(sorted(chained[entry])) for entry in entries]
        self.own = np.array([hash(groups) if groups else 0 for groups in own])
        self.has_own = np.array([bool(groups) for groups in own])
        sizes = subject.group_sizes()
        self.main = np.array(
            [max(groups, key=sizes.__getitem__) if groups else -1 for groups in own]
        )
        self.exits = np.array([side.exits(entry) for entry in entries], dtype=bool)
        digits = [
            tuple(c for c in _words(side.module_of(entry)) if c.isdigit()) for entry in entries
        ]
        self.digits = np.array([hash(words) for words in digits])


def _chained_groups(subject: Subject) -> list[set[int]]:
    """The weights that each entry reads, with those of the product that a bias is added to or that
    a part is taken of.
    """
    found: list[set[int]] = []
    from_input = subject.side.graph.has_input_ancestor
    for entry in range(subject.side.size):
        own = set(subject.own_groups(entry))
        # What is made of weights alone (`weight.T`) is as good as a weight.
        own.update(
            group
            for parent in subject.side.parents[entry]
            if not from_input[parent]
            for group in found[parent]
        )
        parents = [parent for parent in subject.side.parents[entry] if from_input[parent]]
        if len(parents) == 1 and family(subject.side.type_of(entry)) in (
            "add",
            "view",
            "lookup",
            "cast",
        ):
            own = own | found[parents[0]]
        found.append(own)
    return found


def _words(address: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in address).split()
