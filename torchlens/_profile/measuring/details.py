"""In which steps more is measured than times.

Listening to the allocators makes a small operation half as slow again, a log makes it several times
as slow, and no estimate of that is as good as a step without it. So steps are of two sorts:
detailed ones, in which memory is measured, operations are recorded and values are checked; and
timed ones, in which none of this runs and which times are taken from. What is patched for a log
makes Python learn anew where it finds the methods of tensors: the step after a detailed one is
cold, takes up to half as long again, and counts only if there is no better one. Steps of one kind
(training or not, with gradients or not, inputs of some shapes) take turns, a detailed one first:

- at module level until memory was measured in three; from then on all are timed;
- at operation level, too; from then on two follow each detailed one, until five were timed that are
  not cold; then all are detailed, as checks and counts are to miss few;
- not at all if the first NaN is to stop the training, because only a detailed step knows which
operation made it.

Where there are many kinds, as with inputs of ever new lengths, two others follow each detailed
step.
"""

from collections import Counter
from typing import NamedTuple

from torchlens._health.checking import Checking
from torchlens._profile.measuring.calls import Signature
from torchlens._profile.options import ProfileOptions
from torchlens._profile.steps import MOST_KINDS

# The first step of a kind may leave behind what the others find there: gradients, the state of an
# optimizer.
_NUM_LISTENED = 3
_NUM_TIMED = 5  # at operation level
_NUM_SPARED = 2


class Wanted(NamedTuple):
    """What is to be measured in a step beside times, if it is asked for."""

    memory: bool
    log: bool
    checking: Checking = Checking.EVERYTHING


class Details:
    """Says of each step what is to be measured; is told what was."""

    def __init__(self, options: ProfileOptions) -> None:
        self._options = options
        self._is_operation_level = options.level == "operation"
        self._num_runs = 0
        self._num_listened: Counter[Signature] = Counter()
        self._num_logged: Counter[Signature] = Counter()
        self._num_detailed: Counter[Signature] = Counter()
        self._num_light: Counter[Signature] = Counter()
        self._num_timed: Counter[Signature] = Counter()  # those of them that were not cold
        self._kinds: dict[
            tuple[bool, bool], set[Signature]
        ] = {}  # with and without training and gradients
        self._is_cold = False  # whether the last step was detailed
        self._num_spared: Counter[tuple[bool, bool]] = (
            Counter()
        )  # how many of the next are, where there are many kinds

    def wanted(self, signature: Signature, is_warmup: bool, is_compiled: bool) -> Wanted:
        """Of a step that begins."""
        if self._options.has_inputs:
            return self._wanted_of_run(is_warmup)
        if is_warmup:
            return Wanted(memory=True, log=self._is_operation_level)
        if not self._is_detailed(signature, is_compiled):
            return self.of_timed
        return Wanted(memory=self._num_listened[signature] < _NUM_LISTENED, log=True)

    @property
    def of_timed(self) -> Wanted:
        """Of a step that times are taken from."""
        return Wanted(
            False, False, Checking.NONFINITE if self._is_operation_level else Checking.EVERYTHING
        )

    def has_run(
        self, signature: Signature, has_log: bool, has_memory: bool, has_raised: bool = False
    ) -> None:
        """A step that is no warm-up is over. A log may not have been had, nor memory been
        measured.
        """
        self._num_logged[signature] += has_log and not has_raised
        self._num_listened[signature] += has_memory
        was_cold, self._is_cold = self._is_cold, has_log or has_memory
        if has_log or (has_memory and not self._is_operation_level):
            self._num_detailed[signature] += 1
        else:
            self._num_light[signature] += 1
            self._num_timed[signature] += not (was_cold or self._is_cold)

    def _wanted_of_run(self, is_warmup: bool) -> Wanted:
        """Of one of our own runs. They are all alike: a check of some tells as much as one of
        all.
        """
        if not is_warmup:
            self._num_runs += 1
        if is_warmup or self._num_runs > self._options.num_detailed_runs:
            return Wanted(memory=False, log=False, checking=Checking.NOTHING)
        return Wanted(memory=self._num_runs == 1, log=True)

    def _is_detailed(self, signature: Signature, is_compiled: bool) -> bool:
        phase = signature[:2]
        kinds = self._kinds.setdefault(phase, set())
        kinds.add(signature)
        has_many = len(kinds) >= MOST_KINDS
        is_spared = self._num_spared[phase] > 0
        self._num_spared[phase] -= is_spared
        lacks_log = not (is_compiled or self._num_logged[signature])
        is_needed = lacks_log or (
            self._options.memory and self._num_listened[signature] < _NUM_LISTENED
        )
        if self._is_operation_level:
            # What is compiled is run from its source in a detailed step: the others would time
            # something else.
            if (
                self._options.stop
                or is_compiled
                or self._has_timed_enough(kinds if has_many else {signature})
            ):
                return True
            is_needed = True
        num_detailed = self._num_detailed[signature]
        if num_detailed < _NUM_LISTENED:
            is_turn = lacks_log or num_detailed <= self._num_light[signature]
        else:
            is_turn = lacks_log or num_detailed - _NUM_LISTENED < self._num_timed[signature]
        if is_spared or not (is_needed and is_turn):
            return False
        if has_many:
            self._num_spared[phase] = _NUM_SPARED
        return True

    def _has_timed_enough(self, kinds: set[Signature]) -> bool:
        return sum(self._num_timed[kind] for kind in kinds) >= _NUM_TIMED
