"""Checks that recorded calls give their recorded values when they run again.

A call may depend on something that no log records: a mode of torch, a function with a memory of its
own, memory that something else wrote to. Each call is run once on its recorded values before its
result is relied on; what it gives then must be what was recorded, bit for bit.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch

from torchlens._recording.operation_kinds import DROPOUTS, RANDOM
from torchlens._recording.recording import Row
from torchlens._recording.unseen import GradMode
from torchlens._replay.program import ReplayProgram
from torchlens._replay.steps import RecordedCalls, ReplayStep
from torchlens._replay.values import close, difference, same
from torchlens.errors import NotReplayableError

Tensor = torch.Tensor
# These draw random numbers if one of their numbers, the probability of a dropout, is not 0.
_WITH_DROPOUT = frozenset({
    "gru", "gumbelsoftmax", "lstm", "rnnrelu", "rnntanh", "rrelu", "scaleddotproductattention",
})  # fmt: skip


class Proof:
    """Which calls of a log have given their recorded values again."""

    def __init__(self, calls: RecordedCalls) -> None:
        self._calls = calls
        # By whether they trained: torch chooses kernels by what needs gradients.
        self._proven: dict[bool, set[int]] = {False: set(), True: set()}
        self._unsaved: set[int] = set()
        # Rows that gave their recorded values up to rounding only.
        self.rounded: dict[int, str] = {}

    def prepare(self, program: ReplayProgram) -> None:
        """Gives the steps that draw random numbers the states of the generators before them."""
        for step in program.steps:
            number = step.numbers[0][1]
            if draws(self._calls.rows[number]):
                step.generators = self._generators.get(number, ())

    def check(self, program: ReplayProgram) -> None:
        """Runs the calls that were not checked so far; raises if one gives another value."""
        if self._proven[program.trains].issuperset(program.firsts):
            return
        at = {
            number: partial(self._compare, number)
            for step in program.steps
            for _, number, _ in step.numbers
            if number in self._calls.entry_of
        }
        at |= {number: partial(self._compare, number) for number in program.starts}
        program.run(at)
        self._proven[program.trains].update(program.firsts)

    def unproven(self, program: ReplayProgram) -> list[int]:
        """Wanted rows whose recorded value was not saved, so that nothing could be compared."""
        return sorted(program.wanted & self._unsaved & program.live)

    def _compare(self, number: int, value: Tensor) -> Tensor | None:
        if not self._calls.is_saved(number):
            self._unsaved.add(number)
            return None
        saved = self._calls.saved(number)
        if same(saved, value):
            return None
        if not close(saved, value):
            raise NotReplayableError(self._why_other(number, saved, value))
        self.rounded[number] = difference(saved, value)
        return saved.clone()  # what follows is compared on recorded values

    def _why_other(self, number: int, saved: Tensor, value: Tensor) -> str:
        label = self._calls.label(number)
        why = (
            "draws random numbers, from a generator whose state the log does not have"
            if draws(self._calls.rows[number])
            else "depends on something that the log does not record (a mode of torch, memory that "
            "NumPy or another library wrote to, the state of an object)"
        )
        return (
            f"{label!r} {why}: when it runs alone on its recorded arguments, "
            f"{difference(saved, value)}. Run the model instead: history.rerun(model, x, "
            "edits=...)."
        )

    # -- random numbers

    @cached_property
    def _generators(self) -> dict[int, Sequence[Tensor]]:
        """The states before each call that draws random numbers: these calls run again, in order,
        from the state that the pass began with, until one gives another value than was recorded.
        """
        calls = self._calls
        found: dict[int, Sequence[Tensor]] = {}
        states = calls.recording.generators
        for number, row in enumerate(calls.rows):
            if not draws(row) or calls.first(number) != number:
                continue
            try:
                step = calls.step(number, frozenset(), [])
            except NotReplayableError:
                break
            if not states or not calls.is_saved(number):
                break
            step.generators, found[number] = states, states
            states = self._states_after(step, number)
        return found

    def _states_after(self, step: ReplayStep, number: int) -> tuple[Tensor, ...]:
        try:
            with GradMode(self._calls.has_gradients):
                result: Any = step.results({})[0]
        except (RuntimeError, TypeError, ValueError):
            return ()
        if not same(self._calls.saved(number), result):
            return ()
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return torch.get_rng_state(), *devices


def draws(row: Row) -> bool:
    """True if a call may draw random numbers."""
    kind = row.operation.layer_type
    given = [*row.args, *(row.kwargs or {}).values()]
    if kind in DROPOUTS:
        return True in given
    if kind in _WITH_DROPOUT:
        return any(isinstance(each, float) and each > 0 for each in given)
    return kind in RANDOM
