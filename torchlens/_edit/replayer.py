"""The recorded calls behind some edits, run again: what the model would return, and why that is so.

`Replayer` belongs to one history. It compiles a program for each set of edited places, checks once
that the calls in it give their recorded values again, and runs it with the edits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from numbers import Number
from time import perf_counter
from typing import Any, NamedTuple

import torch

from torchlens._capture.patches.mode_stack import without_user_modes
from torchlens._edit.certificate import Certificate, certificate_of, compared
from torchlens._edit.changes import At, Edited
from torchlens._edit.plan import Target, pairs_of, target_of
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._history.lookup import Lookup
from torchlens._history.sites import Place, Site, Sites
from torchlens._recording.unseen import GradMode
from torchlens._replay.program import Cone, Exchanged, ReplayProgram
from torchlens._replay.proof import Proof
from torchlens._replay.replay import kept_generator
from torchlens._replay.shared_memory import SharedMemory
from torchlens._replay.steps import RecordedCalls
from torchlens._replay.values import same
from torchlens.errors import NotReplayableError

Tensor = torch.Tensor
_MOST_PROGRAMS = 64


class Task(NamedTuple):
    """A replay that was asked for: its targets and outputs, and the program that does it."""

    targets: list[Target]
    holds: list[Target]
    outputs: dict[str, Place]
    program: ReplayProgram
    doubt: str  # why the result may be another; "" if nothing speaks for it


class Replayed:
    """What recorded calls gave with edits. Index it by an output, as it was asked for.

    >>> out = history.replay({'relu_3': 0.0}, outputs=['output_1', 'linear_2'])
    >>> out['linear_2'], out.output, out.certificate

    `num_calls` of the `num_calls_of_pass` calls of the model ran again, in `seconds`.
    """

    def __init__(
        self,
        values: dict[str, Tensor],
        places: dict[str, Place],
        certificate: Certificate,
        costs: tuple[int, int, float],
        sites: Sites,
        history: Callable[[], Any],
        edits: list[Edited],
    ) -> None:
        self._values = values
        self._places = places
        self._sites = sites
        self._history = history
        self._edits = edits
        self.certificate = certificate
        self.num_calls, self.num_calls_of_pass, self.seconds = costs

    @property
    def output(self) -> Tensor:
        """The value of the first output."""
        return next(iter(self._values.values()))

    @property
    def outputs(self) -> dict[str, Tensor]:
        """All outputs, by the names that they were asked for."""
        return dict(self._values)

    def check(
        self,
        model: torch.nn.Module,
        input_args: Any = None,
        input_kwargs: Mapping[str, Any] | None = None,
        random_seed: int | None = None,
    ) -> Certificate:
        """Runs the whole model with the same edits, and compares: the certificate then says what
        was seen. The arguments are those of the pass that was logged.
        """
        history = self._history()
        edits = {own.place.site: own.edit for own in self._edits}
        new = history.rerun(model, input_args, input_kwargs, edits=edits, random_seed=random_seed)
        recorded, graph = history._log.graph.recorded, new._log.graph
        numbers = [recorded[place.entry] for place in self._places.values()]
        found = [new._log.value(graph.entry_of[number]) for number in numbers]
        places = self._places.values()
        values = [place.read(value) for place, value in zip(places, found, strict=True)]
        self.certificate = compared(list(self._values.values()), values)
        return self.certificate

    def __getitem__(self, key: Any) -> Tensor:
        if isinstance(key, str) and key in self._values:
            return self._values[key]
        place = self._sites.place(key)
        for name, own in self._places.items():
            if own.entry == place.entry and str(own.site.parts_text) == place.site.parts_text:
                return self._values[name]
        raise KeyError(
            f"{key!r} is none of the outputs of this replay: {', '.join(self._values)}. Ask for it:"
            f" history.replay(edits, outputs=[{key!r}])."
        )

    def __repr__(self) -> str:
        names = ", ".join(self._values)
        return (
            f"<Replayed {names}: {self.certificate.kind}, {self.num_calls} of "
            f"{self.num_calls_of_pass} calls>"
        )


class Replayer:
    """Replays of one history."""

    def __init__(self, log: Log, lookup: Lookup) -> None:
        if log.recording.framework != "torch":
            raise NotImplementedError(
                f"replay is for PyTorch: the calls of this history are of "
                f"{log.recording.framework}. Change the function, and log it again."
            )
        if log.recording.failure is not None:
            raise NotReplayableError("The model raised in this pass, so it has no outputs to give.")
        self.log = log
        self.sites = Sites(log, lookup)
        self._calls = RecordedCalls(log)
        self._memory = SharedMemory(log.recording)
        self.proof = Proof(self._calls)
        self._programs: dict[Any, ReplayProgram] = {}
        self._num_calls = sum(
            not row.output_index for row in log.rows(range(len(log.graph.recorded)))
        )

    def replay(self, edits: Any, outputs: Any = None, hold: Any = (), *, grad: bool) -> Replayed:
        return self.run(self.task(edits, outputs, hold, trains=grad))

    # -- from what is asked for to a program

    def task(
        self, edits: Any, outputs: Any = None, hold: Any = (), *, trains: bool = False
    ) -> Task:
        """What an edit at these places takes; raises where it cannot be exact."""
        targets = [self._target(site, edit) for site, edit in pairs_of(edits)]
        return self.task_of(targets, self.held(hold), self.outputs_of(outputs), trains=trains)

    def task_of(
        self,
        targets: list[Target],
        holds: list[Target],
        outputs: dict[str, Place],
        *,
        is_given: bool = False,
        trains: bool = False,
    ) -> Task:
        """The task of these targets. If they are given, the program starts with their new values
        and makes none of them, even by a write. If it `trains`, outputs keep the autograd graph.
        """
        doubts = [self._doubt_about(target) for target in (*targets, *holds)]
        wanted = [self.log.graph.recorded[place.entry] for place in outputs.values()]
        whole = frozenset(each.number for each in holds if each.edited.place.site.is_whole)
        parts = frozenset(each.number for each in holds) - whole
        edited = frozenset(each.number for each in targets)
        if not whole.isdisjoint(edited):
            both = next(each for each in targets if each.number in whole)
            raise ValueError(f"{both.edited.place.site} is edited and held. Leave one of them out.")
        constant = edited - {each.number for each in targets if not _is_constant(each.edited)}
        constant = edited if is_given else constant
        key = (edited | parts, constant, whole, tuple(wanted), is_given, trains)
        program = self._programs.get(key)
        if program is None:
            replaced = edited if is_given else frozenset()
            cone = Cone(self._calls, edited | parts, constant, whole, wanted, replaced)
            program = ReplayProgram(
                cone, self._memory, edited | parts, wanted, trains=trains or is_given
            )
            self.proof.prepare(program)
            if not is_given:  # rows of a batch are compared with single runs
                with self.alone(program):
                    self.proof.check(program)
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            self._programs[key] = program
        return Task(targets, holds, outputs, program, next(filter(None, doubts), ""))

    def _doubt_about(self, target: Target) -> str:
        """Why the log cannot be sure what reads a value; "" if it is. Raises if several may."""
        calls, number = self._calls, target.number
        if not calls.hands_back(number):
            return ""
        what = f"{calls.label(number)!r} returned its argument itself"
        if calls.num_reads(number) > 1:
            before = calls.label(calls.references(number)[0])
            raise NotReplayableError(
                f"{target.edited.place.site} is an output of a call that made no tensor: {what}, "
                "and the log cannot tell what reads the result and what reads the argument. Edit "
                f"{before!r} for both, or run the model instead: history.rerun(model, x, "
                "edits=...)."
            )
        return f"{what}: bit-equal if what is read next is the result, not the argument"

    def _target(self, site: Site, edit: Any) -> Target:
        return target_of(self.log, self.sites.place(site), edit)

    def target(self, site: Any, edit: Any) -> Target:
        """An edit at a site, checked."""
        ((own, checked),) = pairs_of({site: edit})
        return self._target(own, checked)

    def held(self, hold: Any) -> list[Target]:
        """Sites that keep their recorded values, as targets."""
        return [self._held(site) for site in listed(hold)]

    def _held(self, site: Any) -> Target:
        place = self.sites.place(site)
        return self._target(place.site, LayerEntry(self.log, place.entry))

    def outputs_of(self, outputs: Any) -> dict[str, Place]:
        """The places of outputs by name: as they were asked for, or by their labels."""
        if outputs is None:
            entries = self.log.graph.outputs
            return {
                label: self.sites.place(LayerEntry(self.log, entry))
                for label, entry in zip(self.log.labels(entries), entries, strict=True)
            }
        places = {str(_site(each)): self.sites.place(each) for each in listed(outputs)}
        if not places:
            raise ValueError("outputs is empty. Leave it out for the outputs of the model.")
        return places

    # -- running

    def run(self, task: Task) -> Replayed:
        """Runs the program of a task with its edits."""
        start = perf_counter()
        program = task.program
        with self.alone(program), GradMode(program.trains):
            live = program.run(self.exchanges(task))
            found = {name: self.value_at(place, live) for name, place in task.outputs.items()}
        values = found if program.trains else {name: own.detach() for name, own in found.items()}
        seconds = perf_counter() - start
        certificate = certificate_of(self.proof, program, self._calls, task.doubt)
        costs = (len(program.steps), self._num_calls, seconds)
        edits = [target.edited for target in (*task.targets, *task.holds)]
        return Replayed(
            values, task.outputs, certificate, costs, self.sites, self.log.history, edits
        )

    @contextmanager
    def alone(self, program: ReplayProgram) -> Iterator[None]:
        """Runs calls without the modes of the user, and leaves torch's generators as they are."""
        draws = any(step.generators for step in program.steps)
        with without_user_modes(), GradMode(False), kept_generator() if draws else nullcontext():
            yield

    def value_at(self, place: Place, live: Mapping[int, Tensor]) -> Tensor:
        """The value at a place: a live one, or the recorded one if nothing changed it."""
        number = self.log.graph.recorded[place.entry]
        value = live.get(number)
        if value is None:
            if not self._calls.is_saved(number):
                raise NotReplayableError(
                    f"{self._calls.label(number)!r} does not depend on the edits, and its value "
                    "was not saved. Log the model with layers_to_save='all'."
                )
            value = self._calls.saved(number)
        return place.read(value)

    def exchanges(self, task: Task) -> dict[int, Exchanged]:
        """What is exchanged at which row, and what is checked there."""
        found = self.exchanges_of([*task.targets, *task.holds])
        for number in task.program.guarded:
            found[number] = _in_turn(found.get(number), self.guard(number))
        return found

    def exchanges_of(self, targets: Iterable[Target]) -> dict[int, Exchanged]:
        """What is exchanged at which row."""
        found: dict[int, Exchanged] = {}
        for target in targets:
            change = self._change(target)
            found[target.number] = _in_turn(found.get(target.number), change)
        return found

    def new_value(self, task: Task) -> Tensor:
        """The value that the one target of a task has with its edit."""
        (target,) = task.targets
        recorded = target.edited.recorded()
        new = self._change(target)(recorded)
        if self._calls.rows[target.number].operation.is_inplace and new is not None:
            return recorded.clone().copy_(new)  # with the strides of that memory
        return recorded if new is None else new

    def _change(self, target: Target) -> Exchanged:
        edited, number = target.edited, target.number
        if not callable(_innermost(edited.edit)):
            return edited.value
        is_shared = self._shares_memory(number)

        def change(value: Tensor) -> Tensor | None:
            own = value.clone()  # the function may write to it
            new = edited.value(own)
            if is_shared and own._version:
                raise NotReplayableError(
                    f"The edit of {edited.place.site} writes to its argument, which shares memory "
                    "with other tensors of the model. Return a new tensor instead."
                )
            return new

        return change

    def _shares_memory(self, number: int) -> bool:
        """True if a row shares memory with what its call was given."""
        recording = self.log.recording
        storage = recording.storages[number]
        for reference in self._calls.references(number):
            if reference >= 0 and recording.storages[reference] == storage:
                return True
            if reference < 0 and recording.outside_states.get(reference, (0, None))[1] == storage:
                return True
        return False

    def guard(self, number: int) -> Exchanged:
        """Refuses another value than was recorded, where the model read it into Python."""
        recording = self.log.recording

        def guard(value: Tensor) -> None:
            is_same = True
            if number in recording.booleans:
                is_same = bool(value) == recording.booleans[number]
            if number in recording.reads:
                is_known = self._calls.is_saved(number)
                is_same = is_same and is_known and same(self._calls.saved(number), value)
            if not is_same:
                raise NotReplayableError(
                    f"The model reads {self._calls.label(number)!r} into Python (item, tolist, "
                    "numpy, if), and the edit changes it: what the model does then is not in the "
                    "log. Run the model instead: history.rerun(model, x, edits=...)."
                )

        return guard


def _site(key: Any) -> Site:
    return key if isinstance(key, Site) else Site(key)


def listed(given: Any) -> list[Any]:
    """One key, or several, as a list."""
    if isinstance(given, str | int | Site | LayerEntry):
        return [given]
    return list(given or ())


def _innermost(edit: Any) -> Any:
    edit = edit.edit if isinstance(edit, At) else edit
    return None if isinstance(edit, Tensor | LayerEntry) else edit


def _is_constant(edited: Edited) -> bool:
    """True if the new value does not depend on the one that is there in this run."""
    edit = edited.edit
    is_given = isinstance(edit, Number | str | Tensor | LayerEntry)
    return is_given and edited.place.site.is_whole


def _in_turn(first: Exchanged | None, second: Exchanged) -> Exchanged:
    if first is None:
        return second

    def both(value: Tensor) -> Tensor | None:
        new = first(value)
        newer = second(value if new is None else new)
        return new if newer is None else newer

    return both
