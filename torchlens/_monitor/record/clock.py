"""Which step it is. A step ends with the optimizer's; of several optimizers, each steps once in
it.
"""

import weakref
from typing import Any


class StepClock:
    """Counts steps by what optimizers do.

    With one optimizer, each step of it ends one. Several (a generator's and a discriminator's, or
    one for matrices and one for the rest) take their turns: the step is over when each that is
    known has had its own, or before one has its second. Two that step one right after the other
    share a backward pass: once more was computed, what either does is of the next step, whether or
    not the other has had its turn. One that is seen for the first time belongs to the step that the
    others have just ended, unless it takes the place of another, which is gone or holds some of the
    same parameters.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_late = False  # the optimizer that is stepping belongs to the step before
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._last: weakref.WeakSet[Any] = weakref.WeakSet()  # that stepped in the step before
        self._replaced: weakref.WeakSet[Any] = weakref.WeakSet()
        self._in_a_row: weakref.WeakSet[Any] = (
            weakref.WeakSet()
        )  # that stepped since something was computed
        self._partners: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._has_ended_one = False

    @property
    def is_waiting(self) -> bool:
        """Whether some optimizers have had their turn, and others may or may not: the next step may
        have begun.
        """
        return len(self._stepped) > 0

    @property
    def num_made(self) -> int:
        """How many steps were made: that of the last optimizer that has stepped, and those before
        it.
        """
        return self.step + self.is_waiting

    def begins_new(self, optimizer: Any, has_computed: bool) -> bool:
        """Whether a new step begins before this optimizer's step.

        `has_computed`: whether anything that has gradients was computed since the last step of an
        optimizer.
        """
        if has_computed:
            self._in_a_row.clear()
        partners = self._partners_of(optimizer)
        for other in list(self._in_a_row):
            if other is not optimizer:
                partners.add(other)
                self._partners_of(other).add(optimizer)
        is_after_partner = has_computed and any(
            other in partners for other in list(self._stepped or self._last)
        )
        self.is_late = not is_after_partner and self._joins_late(optimizer)
        return optimizer in self._stepped or (self.is_waiting and is_after_partner)

    def _joins_late(self, optimizer: Any) -> bool:
        """Whether an optimizer that steps for the first time belongs to the step that the others
        have just ended. Not if it replaces one of them, which holds some of the same parameters.
        """
        if not self._has_ended_one or optimizer in self._known or self._stepped:
            return False
        if optimizer not in self._replaced:
            own = _parameters_of(optimizer)
            replaced = [
                other for other in list(self._known) if not own.isdisjoint(_parameters_of(other))
            ]
            for other in replaced:
                self._known.discard(other)
                self._replaced.add(other)  # unless it comes again: then both are at work
            if replaced:
                return False
        return len(self._known) > 0

    def has_stepped(self, optimizer: Any, is_in_backward: bool) -> bool:
        """An optimizer has stepped. Whether the step is over with that.

        In the first backward pass that optimizers step in (each as soon as its gradient is there)
        more are to come.
        """
        self._known.add(optimizer)
        self._in_a_row.add(optimizer)
        if self.is_late:
            self._last.add(optimizer)
            return False
        self._stepped.add(optimizer)
        is_last = self._has_ended_one or not is_in_backward
        return is_last and all(other in self._stepped for other in list(self._known))

    def advance(self) -> None:
        """The next step begins. Optimizers that had no turn in this one are not waited for
        again.
        """
        if self._stepped:
            self._known = weakref.WeakSet(self._stepped)
        self._last, self._stepped = self._stepped, weakref.WeakSet()
        self._has_ended_one = True
        self.step += 1

    def _partners_of(self, optimizer: Any) -> "weakref.WeakSet[Any]":
        found = self._partners.get(optimizer)
        if found is None:
            found = self._partners[optimizer] = weakref.WeakSet()
        return found


def _parameters_of(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
