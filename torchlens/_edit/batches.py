"""Edits of one entry in one run: their values are stacked along a new dimension of the cone.

The recorded calls run under `torch.vmap`, which gives every operation its meaning for one row:
recorded sizes stay those of one row, and batch statistics are those of each row alone. What it
cannot do (a write of stacked values into memory that is not stacked, a value that is read into
Python) is refused.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from time import perf_counter

import torch

from torchlens._edit.certificate import Certificate
from torchlens._edit.plan import Target
from torchlens._edit.replayer import Replayer, Task
from torchlens._history.sites import Place
from torchlens._recording.interruptions import interrupts
from torchlens._recording.tolerance import relative_error
from torchlens.errors import EditError, NotReplayableError

Tensor = torch.Tensor
# More than this, relative to the output, is no rounding.
_MOST_ROUNDING = 1e-3
_NUM_CHECKED = 1


@dataclass
class Batch:
    """Targets at one entry, by their numbers in the sweep."""

    replayer: Replayer
    targets: list[Target]
    holds: list[Target]
    places: dict[str, Place]
    numbers: list[int]
    random: Random
    seconds: float = field(default=0.0, init=False)
    num_calls: int = field(default=0, init=False)  # for all rows together

    def run(self) -> list[tuple[int, list[Tensor], Certificate]]:
        """The number of each row, the values of its outputs, and its certificate."""
        start = perf_counter()
        replayer, holds, places = self.replayer, self.holds, self.places
        tasks = [replayer.task_of([target], holds, places) for target in self.targets]
        stacked = replayer.task_of(self.targets[:1], holds, places, is_given=True)
        self.num_calls = len(stacked.program.steps)
        outputs = self._outputs(tasks, stacked)
        self.seconds = perf_counter() - start
        rows = [[values[place] for values in outputs] for place in range(len(tasks))]
        certificate = self._certificate(tasks, rows)
        return [(number, row, certificate) for number, row in zip(self.numbers, rows, strict=True)]

    def _outputs(self, tasks: Sequence[Task], task: Task) -> list[Tensor]:
        """The outputs of all rows, stacked; an output that nothing changed is repeated. The program
        of `task` starts with the value at the entry.
        """
        replayer = self.replayer
        new = torch.stack([replayer.new_value(own) for own in tasks])
        number = task.targets[0].number
        checks = task.program.guarded
        marks = torch.ones(len(new), dtype=torch.bool, device=new.device)

        def outputs(value: Tensor, mark: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            at = {**replayer.exchanges_of(task.holds), number: lambda _: value}
            live = task.program.run(at, lambda own: torch.where(mark, own, own), grad=False)
            found = [replayer.value_at(place, live) for place in task.outputs.values()]
            return found, [live[each] for each in checks]

        try:
            with replayer.alone(task.program), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of operations that run row by row
                values, checked = torch.vmap(outputs, randomness="same")(new, marks)
        except EditError as error:
            raise NotReplayableError(f"{error} Or use batched=False.") from error
        except Exception as error:  # whatever vmap cannot do
            if interrupts(error):
                raise
            raise NotReplayableError(
                f"These edits cannot run in one batch: {str(error).partition(chr(10))[0]} Use "
                "batched=False."
            ) from error
        for each, rows in zip(checks, checked, strict=True):
            for row in rows:
                replayer.guard(each)(row)
        return list(values)

    def _certificate(self, tasks: Sequence[Task], rows: Sequence[list[Tensor]]) -> Certificate:
        """Compares random rows with single runs."""
        chosen = self.random.sample(range(len(rows)), min(_NUM_CHECKED, len(rows)))
        error = 0.0
        is_equal = True
        for place in chosen:
            single = self.replayer.run(tasks[place])
            if single.certificate.kind != "bit-equal":
                return single.certificate
            for old, new in zip(single.outputs.values(), rows[place], strict=True):
                is_equal = is_equal and torch.equal(old, new)
                error = max(error, relative_error(old, new))
        what = f"{len(chosen)} of {len(rows)} rows of the batch checked against single runs"
        if error > _MOST_ROUNDING:
            return Certificate(
                "not shown", f"{what}: they differ by {error:.1e}. Use batched=False"
            )
        if is_equal:
            return Certificate("rounding", f"{what}: equal bit for bit; the others may be rounded")
        return Certificate(
            "rounding", f"{what}: they differ by {error:.1e}, relative to the output"
        )


def batches_of(
    replayer: Replayer,
    targets: Sequence[Target],
    holds: list[Target],
    places: Mapping[str, Place],
    size: int,
) -> Iterator[Batch]:
    """The targets in batches of one entry each, of at most `size` rows."""
    groups: dict[int, list[int]] = {}
    for number, target in enumerate(targets):
        groups.setdefault(target.number, []).append(number)
    random = Random(0)
    for own in groups.values():
        for start in range(0, len(own), size):
            numbers = own[start : start + size]
            own_targets = [targets[number] for number in numbers]
            yield Batch(replayer, own_targets, holds, dict(places), numbers, random)
