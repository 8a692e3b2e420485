"""Which step it is. A step ends with the optimizer's; of several optimizers, each steps once in it."""

import weakref
from typing import Any

__all__ = ["StepClock"]


class StepClock:
    """Counts steps by what optimizers do.

    With one optimizer, each step of it ends one. Several (a generator's and a discriminator's, or one for matrices and one
    for the rest) take their turns: the step is over when each that is known has had its own, or before one has its second.
    One that is seen for the first time belongs to the step that the others have just ended.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_late = False  # the optimizer that is stepping belongs to the step before
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._has_ended_one = False

    def begins_new(self, optimizer: Any) -> bool:
        """Whether a new step begins before this optimizer's step, because it has had its turn in this one."""
        self.is_late = self._has_ended_one and optimizer not in self._known and not self._stepped
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
