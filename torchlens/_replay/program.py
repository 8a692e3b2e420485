"""The recorded calls behind some entries, ready to run again and again.

What runs are the calls that a change leads to, as far as they lead to what is wanted. Calls on
memory that the model writes to run together with them, on copies of that memory. All other tensors
are those of the log, by reference; a run checks first that they are unchanged.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from torchlens._recording.interruptions import interrupts
from torchlens._recording.operation_kinds import (
    ACTIVATIONS,
    DROPOUTS,
    ELEMENTWISE,
    LOSSES,
    NORMALISATIONS,
    REDUCTIONS,
    VIEWS,
)
from torchlens._recording.operations import BUFFER, INPUT
from torchlens._recording.unseen import GradMode
from torchlens._replay.shared_memory import SharedMemory
from torchlens._replay.steps import FixedTensor, RecordedCalls, ReplayStep
from torchlens.errors import EditError, NotReplayableError

Tensor = torch.Tensor
# What takes the place of a value; None leaves it.
Exchanged = Callable[[Tensor], Tensor | None]
# Operations whose result has a shape that does not depend on values.
_OF_KNOWN_SHAPE = (
    ACTIVATIONS | DROPOUTS | ELEMENTWISE | LOSSES | NORMALISATIONS | REDUCTIONS | VIEWS
) - {"bincount", "tensorsplit"} | {
    "addmm", "baddbmm", "bmm", "cat", "clone", "contiguous", "conv1d", "conv2d", "conv3d",
    "dropout", "einsum", "float", "linear", "matmul", "mm", "pad", "roll",
    "scaleddotproductattention", "stack", "to", "tril", "triu",
}  # fmt: skip


class Cone:
    """What an edit changes: rows, in numbers of the recording.

    `edited` has the rows that are exchanged. Those in `constant` get a value that does not depend
    on the one that is there, so the calls before them need not run. Those in `held` keep their
    recorded values. Those in `replaced` start with their new values, even where a call would write
    them into memory.
    """

    def __init__(
        self,
        calls: RecordedCalls,
        edited: frozenset[int],
        constant: frozenset[int],
        held: frozenset[int],
        wanted: Sequence[int],
        replaced: frozenset[int] = frozenset(),
    ) -> None:
        graph = calls.log.graph
        self.calls = calls
        self.constant = frozenset(filter(calls.is_saved, constant))
        self.held, self.replaced = held, replaced
        self.order = sorted(graph.recorded)
        self.changed: set[int] = set()
        self._parents = {
            number: [graph.recorded[parent] for parent in own]
            for number, own in zip(graph.recorded, graph.parents, strict=True)
        }
        for number in self.order:
            is_changed = not self.changed.isdisjoint(self._parents[number])
            if number in edited or (is_changed and number not in held):
                self.changed.add(number)
        self.read = self._read_in_python(max(wanted, default=0))
        self.needed = self._needed([*wanted, *self.read])

    def depends(self, number: int) -> bool:
        """True if the value of a row, before it is exchanged itself, is another one."""
        return not self.changed.isdisjoint(self._parents[number])

    def _read_in_python(self, last: int) -> list[int]:
        """The changed rows before `last` that the program of the model may depend on: values that
        were read into Python, and shapes that depend on values.
        """
        recording = self.calls.recording
        found = []
        for number in self.changed:
            if number < last and (
                number in recording.reads
                or number in recording.booleans
                or not self._is_of_known_shape(number)
            ):
                found.append(number)
        return found

    def _is_of_known_shape(self, number: int) -> bool:
        kind = self.calls.rows[number].operation.layer_type
        is_by_tensor = kind == "getitem" and len(self.calls.references(number)) > 1  # by a mask
        return kind in _OF_KNOWN_SHAPE and not is_by_tensor

    def _needed(self, roots: Iterable[int]) -> set[int]:
        needed = {number for number in roots if number in self.changed}
        for number in reversed(self.order):
            is_given = number in self.constant and not self.is_inplace(number)
            if number in needed and not is_given:
                needed.update(own for own in self._parents[number] if own in self.changed)
        return needed

    def is_inplace(self, number: int) -> bool:
        """True if the exchanged value is written to the memory that the call wrote to."""
        return self.calls.rows[number].operation.is_inplace and number not in self.replaced


class ReplayProgram:
    """The calls of a cone, compiled; see the file's docstring. `steps` run in order.

    If it `trains`, its results stay in the autograd graph of this run.
    """

    def __init__(
        self,
        cone: Cone,
        memory: SharedMemory,
        edited: Iterable[int],
        wanted: Iterable[int],
        *,
        trains: bool = False,
    ) -> None:  # fmt: skip
        self.cone = cone
        self.calls = cone.calls
        self.trains = trains
        self.wanted = frozenset(wanted)
        self.edited = frozenset(edited) & cone.needed
        self._memory = memory
        self._run: set[int] = set()
        # Rows that start with their recorded values, and whether on memory of their own.
        self._start: dict[int, bool] = {}
        self._collect()
        live = {number for first in self._run for number in self.calls.results(first)}
        live.update(self._start)
        self.live = frozenset(live)
        self.fixed: list[FixedTensor] = []
        self.steps: list[ReplayStep] = []
        for first in sorted(self._run):
            self.steps.append(self.calls.step(first, live, self.fixed, trains=trains))
        self.guarded = [number for number in cone.read if number in live and self._is_read(number)]
        self._overwritten = list(filter(self._is_overwritten, self.wanted & live))
        for number in filter(self._is_overwritten, self._start):
            self._start[number] = True
        self._release()

    @property
    def firsts(self) -> list[int]:
        """The rows of the first results of the calls that run."""
        return sorted(self._run)

    @property
    def starts(self) -> list[int]:
        """The rows that are there from the start."""
        return list(self._start)

    def _is_read(self, number: int) -> bool:
        recording = self.calls.recording
        return number in recording.reads or number in recording.booleans

    def _is_overwritten(self, number: int) -> bool:
        """True if a step may write to the memory of a row."""
        if self._memory.is_written(number):
            return True
        return any((place, number) in step.flat for step in self.steps for place in step.written)

    # -- what runs

    def _collect(self) -> None:
        cone, calls = self.cone, self.calls
        pending = [number for number in cone.needed if number not in self.edited]
        for number in self.edited:
            is_given = number in cone.constant or not cone.depends(number)
            if cone.is_inplace(number):
                pending += [own for own in self._memory.others(number) if own <= number]
            elif is_given and self.calls.is_saved(number):
                self._start.setdefault(number, False)
            else:
                pending.append(number)
        while pending:
            number = pending.pop()
            first = calls.first(number)
            if first in self._run or number in self._start:
                continue
            if calls.rows[number].operation in (INPUT, BUFFER):
                self._start[number] = True
                continue
            if self._starts_memory(number):
                self._start[number] = True
                continue
            self._run.add(first)
            pending += self._needed_by(first)

    def _starts_memory(self, number: int) -> bool:
        """True for an unchanged row that others share memory with: it starts with its value."""
        is_changed = number in self.cone.needed and number not in self.cone.held
        is_owner = self._memory.is_written(number) and self._memory.is_owner(number)
        return not is_changed and is_owner and self.calls.is_saved(number)

    def _needed_by(self, first: int) -> list[int]:
        """The rows that must be live when a call runs."""
        calls, memory = self.calls, self._memory
        references = calls.references(first)
        written = memory.written_by(calls.results(first), references)
        found: list[int] = []
        for reference in references:
            if reference < 0:
                if memory.is_stale(reference, first):
                    raise NotReplayableError(
                        f"{calls.label(first)!r} reads a parameter or a tensor from outside that "
                        "the model wrote to. Run the model instead: history.rerun(model, x, "
                        "edits=...)."
                    )
            elif memory.is_stale(reference, first) or reference in written:
                found += self._together(reference, first)
            elif reference not in self._start and (
                reference in self.cone.needed or not calls.is_saved(reference)
            ):
                found.append(reference)
        return found

    def _together(self, reference: int, first: int) -> list[int]:
        """The rows before a call that share the memory of one of its arguments."""
        group = [own for own in self._memory.others(reference) if own < first]
        replaced = max((own for own in group if own in self.cone.replaced), default=-1)
        if reference < replaced:
            raise NotReplayableError(
                f"{self.calls.label(replaced)!r} writes to memory that {self.calls.label(first)!r} "
                "reads through another tensor, which cannot be stacked. Use batched=False."
            )
        return [own for own in group if own >= replaced]

    def _release(self) -> None:
        """Notes for each step the live values that no later one reads."""
        last: dict[int, ReplayStep] = {}
        for step in self.steps:
            for _, number in (*step.flat, *step.deep):
                last[number] = step
        kept = self.wanted
        for number, step in last.items():
            if number not in kept:
                step.last_read.append(number)

    # -- running

    def run(
        self,
        at: Mapping[int, Exchanged],
        copy: Callable[[Tensor], Tensor] = Tensor.clone,
        *,
        grad: bool | None = None,
    ) -> dict[int, Tensor]:
        """The live values at the end. `at` has what exchanges the values of rows, and `copy`
        copies a recorded value whose memory is going to be written to. Without `grad`, autograd is
        on if it was in the pass, because torch chooses kernels by it.
        """
        is_grad = self.trains or self.calls.has_gradients
        with GradMode(is_grad if grad is None else grad):
            return self._run_in_order(at, copy)

    def _run_in_order(
        self, at: Mapping[int, Exchanged], copy: Callable[[Tensor], Tensor]
    ) -> dict[int, Tensor]:
        for each in self.fixed:
            each.check()
        live: dict[int, Tensor] = {}
        copies: dict[int, Tensor] = {}
        if self._overwritten:
            at = {**at, **{one: _copying(at.get(one), one, copies) for one in self._overwritten}}
        for number, is_own in self._start.items():
            value = self._recorded(number) if number in at or is_own else None
            if value is not None:
                change = at.get(number)
                value = copy(value) if is_own else value
                new = None if change is None else change(value)
                live[number] = value if new is None else new
        for step in self.steps:
            apart = self._apart(step, at)
            results = self._results(step, live, copy, apart)
            for index, number, shape in step.numbers:
                value = results[index]
                if value.shape != shape:
                    self._refuse_shape(number, value, shape)
                change = at.get(number)
                live[number] = (
                    value if change is None else self._exchanged(number, value, change, apart)
                )
            for number in step.last_read:
                del live[number]
        live.update(copies)
        return live

    def _apart(self, step: ReplayStep, at: Mapping[int, Exchanged]) -> list[Tensor] | None:
        """A list for the tensor that a call in place would write to, if its result is exchanged and
        the call may keep it for the backward pass, which then must not be written to.
        """
        if not torch.is_grad_enabled() or len(step.written) != 1 or len(step.numbers) != 1:
            return None
        number = step.numbers[0][1]
        return [] if number in at and self.cone.is_inplace(number) else None

    def _results(
        self,
        step: ReplayStep,
        live: dict[int, Tensor],
        copy: Callable[[Tensor], Tensor],
        apart: list[Tensor] | None,
    ) -> Sequence[Tensor]:
        try:
            with GradMode(False) if step.is_without_grad else nullcontext():
                results = step.results(live, copy, apart)
        except EditError:
            raise
        except Exception as error:  # the operation may raise anything, given other values
            if interrupts(error):
                raise
            label = self.calls.label(step.numbers[0][1])
            raise NotReplayableError(
                f"{label!r} did not run again: {type(error).__name__}: {error}"
            ) from error
        if len(results) <= step.numbers[-1][0]:
            label = self.calls.label(step.numbers[0][1])
            raise NotReplayableError(f"{label!r} did not give its results when it ran again.")
        return results

    def _recorded(self, number: int) -> Tensor:
        if not self.calls.is_saved(number):
            raise NotReplayableError(
                f"The value of {self.calls.label(number)!r} was not saved, and the calls behind "
                "the edit start from it. Log the model with layers_to_save='all'."
            )
        return self.calls.saved(number) if self.trains else self.calls.given(number)

    def _exchanged(
        self, number: int, value: Tensor, change: Exchanged, apart: list[Tensor] | None
    ) -> Tensor:
        """What takes the place of a value: in its memory, if the call wrote to that."""
        if not self.cone.is_inplace(number):
            new = change(value)
            return value if new is None else new
        new = change(value.clone())
        if apart:
            return apart[0].copy_(value if new is None else new)
        if new is not None:
            value.copy_(new)
        return value

    def _refuse_shape(self, number: int, value: Tensor, shape: Sequence[Any]) -> None:
        raise NotReplayableError(
            f"{self.calls.label(number)!r} has the shape {tuple(value.shape)} after the edit, and "
            f"had {tuple(shape)}: what the model does next may depend on it. Run the model "
            "instead: history.rerun(model, x, edits=...)."
        )


def _copying(change: Exchanged | None, number: int, copies: dict[int, Tensor]) -> Exchanged:
    """Copies a value, after it was exchanged, before its memory is written to."""

    def copying(value: Tensor) -> Tensor | None:
        new = None if change is None else change(value)
        copies[number] = (value if new is None else new).clone()
        return new

    return copying
