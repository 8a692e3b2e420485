"""In which steps more is measured than times.

Listening to the allocators makes a small operation half as slow again, and a log does much worse. So memory is measured in
the first steps of each kind, FLOPs at module level in the first of those, and times are taken from the others. Where there
are many kinds, as with inputs of ever new lengths, every other step is spared, so that there are others.
"""

from collections import Counter
from typing import NamedTuple

from torchlens.profiling.measuring.calls import Signature
from torchlens.profiling.steps import MOST_KINDS

__all__ = ["Details", "Wanted"]

# The first step of a kind may leave behind what the others find there: gradients, the state of an optimizer.
_NUM_LISTENED = 3
_NUM_LISTENED_OF_RUNS = 1  # of our own, which all begin alike


class Wanted(NamedTuple):
    """What is to be measured in a step beside times, if it is asked for."""

    memory: bool
    flops: bool


class Details:
    """Says of each step what is to be measured; is told where memory was."""

    def __init__(self, has_inputs: bool) -> None:
        self._most_listened = _NUM_LISTENED_OF_RUNS if has_inputs else _NUM_LISTENED
        self._num_listened: Counter[Signature] = Counter()
        self._kinds: dict[tuple[bool, bool], set[Signature]] = {}  # with and without training and gradients
        self._spares_next: set[tuple[bool, bool]] = set()

    def wanted(self, signature: Signature) -> Wanted:
        """Of a step that begins."""
        phase = signature[:2]
        kinds = self._kinds.setdefault(phase, set())
        kinds.add(signature)
        if phase in self._spares_next:
            self._spares_next.remove(phase)
            return Wanted(memory=False, flops=False)
        is_listened = self._num_listened[signature] < self._most_listened
        if is_listened and len(kinds) >= MOST_KINDS:
            self._spares_next.add(phase)
        return Wanted(memory=is_listened, flops=True)

    def has_listened(self, signature: Signature) -> None:
        """Memory is being measured in a step that counts."""
        self._num_listened[signature] += 1
