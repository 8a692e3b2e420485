"""Which step it is. A step ends with the optimizer's; of several optimizers, each steps once in it."""

import weakref
from typing import Any

__all__ = ["StepClock"]


class StepClock:
    """Counts steps by what optimizers do.

    With one optimizer, each step of it ends one. Several (a generator's and a discriminator's, or one for matrices and one
    for the rest) take their turns: the step is over when each that is known has had its own, or before one has its second.
    One that is seen for the first time belongs to the step that the others have just ended, unless it takes the place of
    another, which is gone or holds some of the same parameters.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_late = False  # the optimizer that is stepping belongs to the step before
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._replaced: weakref.WeakSet[Any] = weakref.WeakSet()
        self._has_ended_one = False

    def begins_new(self, optimizer: Any) -> bool:
        """Whether a new step begins before this optimizer's step, because it has had its turn in this one."""
        is_new = self._has_ended_one and optimizer not in self._known and not self._stepped
        if is_new and optimizer not in self._replaced:
            own = _parameters_of(optimizer)
            for other in list(self._known):
                if not own.isdisjoint(_parameters_of(other)):
                    self._known.discard(other)
                    self._replaced.add(other)  # unless it comes again: then both are at work
                    is_new = False
        self.is_late = is_new and len(self._known) > 0
        return optimizer in self._stepped

    def has_stepped(self, optimizer: Any) -> bool:
        """An optimizer has stepped. Whether the step is over with that."""
        self._known.add(optimizer)
        if self.is_late:
            return False
        self._stepped.add(optimizer)
        return len(self._stepped) >= len(self._known)

    def advance(self) -> None:
        """The next step begins. Optimizers that had no turn in this one are not waited for again."""
        if self._stepped:
            self._known = weakref.WeakSet(self._stepped)
        self._stepped = weakref.WeakSet()
        self._has_ended_one = True
        self.step += 1


def _parameters_of(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
