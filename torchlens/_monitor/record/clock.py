"""Determines the training step from optimizer steps. Several optimizers each step once per training
step.
"""

import weakref
from typing import Any


class StepClock:
    """Counts training steps by the steps of optimizers.

    With one optimizer, each of its steps ends a training step. Several optimizers (of a generator
    and a discriminator, or of matrices and other parameters) take turns: the training step ends
    when each known optimizer has stepped, or before one steps for the second time. Optimizers that
    step in direct succession are partners, which share a backward pass: if a partner has stepped
    and more was computed since, the next step of the other begins a new training step. A new
    optimizer belongs to the training step that the others have just ended, unless it replaces
    another optimizer, which is gone or holds some of the same parameters.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_late = False  # the current optimizer belongs to the previous step
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._last: weakref.WeakSet[Any] = weakref.WeakSet()  # stepped in the previous step
        self._replaced: weakref.WeakSet[Any] = weakref.WeakSet()
        # Optimizers that have stepped since anything was computed.
        self._in_a_row: weakref.WeakSet[Any] = weakref.WeakSet()
        self._partners: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._has_ended_one = False

    @property
    def is_waiting(self) -> bool:
        """Whether some optimizers have stepped, but the end of the step is not known yet: the next
        step may have begun.
        """
        return len(self._stepped) > 0

    @property
    def num_made(self) -> int:
        """The number of steps made, including one in which only some optimizers have stepped."""
        return self.step + self.is_waiting

    def begins_new(self, optimizer: Any, has_computed: bool) -> bool:
        """Whether a new step begins before this optimizer's step.

        `has_computed`: anything that requires gradients was computed since the last optimizer step.
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
                self._replaced.add(other)  # if it steps again, both are in use
            if replaced:
                return False
        return len(self._known) > 0

    def has_stepped(self, optimizer: Any, is_in_backward: bool) -> bool:
        """Records that an optimizer has stepped. Returns whether this ends the training step.

        It does not in the first step if optimizers step within the backward pass, each as soon as
        its gradients are computed: more may follow.
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
        """Begins the next step. Optimizers that did not step in this one are no longer expected."""
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
