"""A recorded call that is ready to run again, and the tensors that it was given."""

from collections.abc import Callable, Sequence, Set
from functools import cached_property
from typing import Any, NamedTuple

import torch

from torchlens._history.log import Log
from torchlens._recording.functions import StandIn
from torchlens._recording.operation_kinds import CONVERSIONS, MAY_RETURN_ARGUMENT
from torchlens._recording.operations import IDENTITY, KNOWN_OPERATIONS, OUTPUT, Kind
from torchlens._recording.origin import version_of
from torchlens._recording.recording import Row, located
from torchlens._recording.regions import storage_of
from torchlens._recording.trees import plain_tensors
from torchlens._replay.replay import Modes, autocast_of, filled, in_force, set_generators
from torchlens.errors import NotReplayableError

Tensor = torch.Tensor
_RERUN = "Run the model instead: history.rerun(model, x, edits=...)."


class FixedTensor(NamedTuple):
    """A tensor from outside the calls that run again, as it was when the pass ended."""

    tensor: Tensor
    version: int
    storage: int | None  # None for saved values, which nothing moves
    name: str

    def check(self) -> None:
        """Raises if the tensor was changed since."""
        if self.version >= 0 and self.tensor._version != self.version:
            raise NotReplayableError(
                f"{self.name} was changed in place after the pass, so the recorded calls would "
                "give something else. Log the model again."
            )
        if self.storage is not None and storage_of(self.tensor) != self.storage:
            raise NotReplayableError(
                f"{self.name} was given other memory after the pass (`.data = ...`, `.to(...)`). "
                "Log the model again."
            )


class ReplayStep:
    """A recorded call: its function, and arguments in which live values are filled in.

    `numbers` are the rows of its results, with their places among the results and their shapes.
    """

    __slots__ = (
        "args", "deep", "flat", "fresh", "func", "generators", "is_without_grad", "kwargs",
        "last_read", "modes", "numbers", "written",
    )  # fmt: skip

    def __init__(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.flat: list[tuple[int, int]] = []  # (position, row of the value)
        self.deep: list[tuple[Any, int]] = []  # (location in a list or among keywords, row)
        self.fresh: list[int] = []  # positions whose tensor is copied before the call writes to it
        self.written: tuple[int, ...] = ()
        self.modes: Modes | None = None
        self.is_without_grad = False  # it ran under no_grad, though its arguments need gradients
        self.generators: Sequence[Tensor] = ()  # their states before the call, if it draws
        self.last_read: list[int] = []  # rows whose live values no later step reads
        self.numbers: list[tuple[int, int, tuple[int, ...]]] = []

    def results(
        self,
        live: dict[int, Tensor],
        copy: Callable[[Tensor], Tensor] = Tensor.clone,
        apart: list[Tensor] | None = None,
    ) -> Sequence[Tensor]:
        """The tensors that the call returns, or that it writes to if it returns none.

        With `apart`, it writes to copies, and `apart` gets the tensors that it would write to.
        """
        args, kwargs = self.args.copy(), self.kwargs
        for position, number in self.flat:
            args[position] = live[number]
        if self.deep:
            places = {location: live[number] for location, number in self.deep}
            args, kwargs = filled(args, kwargs, places)
        for position in self.fresh:
            args[position] = copy(args[position])
        if apart is not None:
            for position in self.written:
                apart.append(args[position])
                args[position] = args[position].clone()
        if self.generators:
            set_generators(self.generators)
        if self.modes is None:
            result = self.func(*args, **kwargs)
        else:
            with in_force(self.modes._replace(grad=torch.is_grad_enabled())):
                result = self.func(*args, **kwargs)
        if type(result) is Tensor:
            return (result,)
        found = [tensor for _, tensor in plain_tensors(result)]
        if not found:
            given = [args[place] for place in self.written if place < len(args)]
            found = [tensor for _, tensor in plain_tensors(given)]
        return found


def _same_tensor(tensor: Tensor) -> Tensor:
    return tensor


class RecordedCalls:
    """The calls of a log by the numbers of their rows: what they read, and how to run them."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.recording = log.recording
        self.rows = log.recording.rows
        self.entry_of = log.graph.entry_of
        self._firsts: dict[int, int] = {}

    def first(self, number: int) -> int:
        """The row of the first result of the call that made row `number`."""
        found = self._firsts.get(number)
        if found is None:
            row = self.rows[number]
            found = number
            while self._continues(found - 1, row, (self.rows[found].output_index or 0) - 1):
                found -= 1
            if self.rows[found].output_index:
                found = number  # not all results have rows
            self._firsts[number] = found
        return found

    def _continues(self, number: int, row: Row, index: int) -> bool:
        if index < 0 or number < 0:
            return False
        before = self.rows[number]
        return before.operation is row.operation and before.output_index == index

    def results(self, first: int) -> list[int]:
        """The rows of the results of a call."""
        found = [first]
        row = self.rows[first]
        while row.output_index == 0 and found[-1] + 1 < len(self.rows):
            after = found[-1] + 1
            index = self.rows[after].output_index
            is_next = self.rows[after].operation is row.operation and index == len(found)
            if not is_next or self.rows[after].module_call != row.module_call:
                break
            found.append(after)
        return found

    def references(self, number: int) -> list[int]:
        """The rows (or -1 - k) of the tensors among the arguments of a call."""
        return [own for _, own in located(self.rows[number].references)]

    def label(self, number: int) -> str:
        """The label of a row's entry."""
        entry = self.entry_of.get(number)
        return self.rows[number].operation.name if entry is None else self.log.label(entry)

    # -- operations that return their argument

    def hands_back(self, number: int) -> bool:
        """True if a call returned its argument itself, as `dropout` does in eval."""
        row, recording = self.rows[number], self.recording
        if row.operation.written:
            return False
        value, may = recording.values[number], row.operation.layer_type in MAY_RETURN_ARGUMENT
        for own in self.references(number):
            if own >= 0 and row.shape == self.rows[own].shape:
                is_same_memory = recording.storages[own] == recording.storages[number]
                if (may and is_same_memory) or (
                    value is not None and value is recording.values[own]
                ):
                    return True
        return False

    def num_reads(self, number: int) -> int:
        """How often a row is read as an argument. What reads a call that handed the row back counts
        for that call.
        """
        readers = self._readers.get(number, ())
        return sum(self.num_reads(own) if self.hands_back(own) else 1 for own in readers)

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        """The calls that read each row, once for each argument."""
        found: dict[int, list[int]] = {}
        for number, row in enumerate(self.rows):
            if number in self.entry_of and not row.output_index:
                for reference in self.references(number):
                    found.setdefault(reference, []).append(number)
        return found

    # -- gradients

    @cached_property
    def has_gradients(self) -> bool:
        """True if the pass built an autograd graph. Kernels are chosen by that, so that a replay
        builds one, too.
        """
        return any(row.gradfunc is not None for row in self.rows)

    def needs_grad(self, reference: int) -> bool:
        """True if a tensor needed a gradient in the pass."""
        recording = self.recording
        if reference >= 0:
            return self.rows[reference].gradfunc is not None or reference in recording.leaves
        number = -1 - reference
        if number < len(recording.params):
            return recording.is_trained(number)
        return recording.trained is not None and reference in recording.trained

    def is_without_grad(self, first: int) -> bool:
        """True if the results of a call have no gradient although its arguments do."""
        if not self.has_gradients:
            return False
        if any(self.rows[number].gradfunc is not None for number in self.results(first)):
            return False
        return any(map(self.needs_grad, self.references(first)))

    # -- tensors that stay as they are

    def is_saved(self, number: int) -> bool:
        """True if the value of a row was saved as it was."""
        transform = self.log.options.transform
        if transform is not None and getattr(transform, "activation_postfunc", True) is not None:
            return False
        return self.recording.values[number] is not None and number in self.entry_of

    def saved(self, number: int) -> Tensor:
        """The saved value of a row, outside of its autograd graph; raises if it changed since."""
        value: Tensor = self.log.value(self.entry_of[number])
        return value.clone() if value.is_inference() else value.detach()

    def given(self, number: int) -> Tensor:
        """The same, needing a gradient if it did so in the pass."""
        value = self.saved(number)
        return value.requires_grad_() if self.needs_grad(number) else value

    def fixed(self, reference: int, reader: int, location: Any, *, trains: bool) -> FixedTensor:
        """A tensor that a call reads and that no call makes again."""
        recording = self.recording
        if reference >= 0:
            value = self.saved(reference) if trains else self.given(reference)
            return FixedTensor(value, recording.versions[reference], None, self.label(reference))
        number = -1 - reference
        version, storage = recording.outside_states.get(reference, (-1, None))
        if number < len(recording.params):
            name = f"The parameter {recording.param_addresses[number]!r}"
            tensor: Any = self.log.parameter(number)
            if tensor.is_meta:
                raise NotReplayableError(f"{name} is not in this history. Log the model again.")
            return FixedTensor(tensor, version, storage, name)
        tensor = recording.constants.get(reference)
        if tensor is None:
            tensor = self._argument(reader, location)
        if tensor is None:
            raise NotReplayableError(
                f"{self.label(reader)!r} reads a tensor that is not in this history (it came from "
                f"outside the model). {_RERUN}"
            )
        return FixedTensor(tensor, version, storage, f"A tensor that {self.label(reader)!r} reads")

    def _argument(self, reader: int, location: Any) -> Tensor | None:
        """A tensor among the saved arguments of a call (`save_function_args=True`)."""
        args, kwargs = self.recording.saved_args.get(reader, ((), {}))
        path = location if isinstance(location, tuple) else (location,)
        for where, tensor in (*plain_tensors(args), *plain_tensors(kwargs)):
            if where == path:
                return tensor
        return None

    # -- calls

    def step(
        self, first: int, live: Set[int], fixed: list[FixedTensor], *, trains: bool = False
    ) -> ReplayStep:
        """A call that reads the rows `live` as they are then; what else it reads goes into
        `fixed`. If it `trains`, saved values are constants, which need no gradients.
        """
        row = self.rows[first]
        args = [None] if row.operation is OUTPUT else list(row.args)
        step = ReplayStep(self._function(row, first), args, dict(row.kwargs or {}))
        places: dict[Any, Tensor] = {}
        for location, reference in located(row.references):
            if isinstance(location, tuple) and location[0] == "captured":
                self._check_captured(first, reference, live)
            elif reference in live:
                is_flat = isinstance(location, int)
                (step.flat if is_flat else step.deep).append((location, reference))
            else:
                fixed.append(self.fixed(reference, first, location, trains=trains))
                places[location] = fixed[-1].tensor
                self._copy_before(step, row, location)
        step.args, step.kwargs = filled(step.args, step.kwargs, places)
        step.written = row.operation.written
        step.modes = self._modes(first)
        step.is_without_grad = self.is_without_grad(first)
        step.numbers = [
            (self.rows[number].output_index or 0, number, self.rows[number].shape)
            for number in self.results(first)
        ]
        return step

    def _copy_before(self, step: ReplayStep, row: Row, location: Any) -> None:
        """Notes that an argument is copied if the call writes to it."""
        written = row.operation.written
        if isinstance(location, int) and location in written:
            step.fresh.append(location)
        elif written and not isinstance(location, int):
            place = location if isinstance(location, str) else location[0]
            names = [row.operation.name_of(position) for position in written]
            if place in written or place in names:
                raise NotReplayableError(
                    f"{row.operation.name} writes to tensors in a list or by keyword. {_RERUN}"
                )

    def _function(self, row: Row, number: int) -> Any:
        operation, func = row.operation, row.operation.func
        if operation in (OUTPUT, IDENTITY):
            if not row.references:
                raise NotReplayableError(f"{self.label(number)!r} has no tensor. {_RERUN}")
            return _same_tensor
        why = None
        if isinstance(func, StandIn):
            why = "its function is not in this history, which was copied or loaded"
        elif operation.kind is Kind.COLLECTIVE or number in self.recording.received:
            why = "other processes took part in it"
        elif row.kwargs and "out" in row.kwargs:
            why = "it writes to out="
        elif operation.name == "swap_tensors":
            why = "it exchanges two tensors"
        if why is not None:
            raise NotReplayableError(f"{self.label(number)!r} cannot run alone: {why}. {_RERUN}")
        if isinstance(func, type) and issubclass(func, torch.autograd.Function):
            return func.apply
        return self._unpacking(func) if self._is_opaque(row) else func

    def _is_opaque(self, row: Row) -> bool:
        """True for a call that torch does not report, whose arguments were recorded as one."""
        if len(row.args) != 1 or KNOWN_OPERATIONS.get(row.operation.func) is row.operation:
            return False
        packed = row.args[0]
        is_pair = isinstance(packed, tuple) and len(packed) >= 2 and isinstance(packed[1], dict)
        return is_pair and isinstance(packed[0], list | tuple)

    def _unpacking(self, func: Any) -> Any:
        def unpacked(arguments: Any) -> Any:
            return func(*arguments[0], **(arguments[1] or {}))

        return unpacked

    def _check_captured(self, first: int, reference: int, live: Set[int]) -> None:
        if reference in live:
            raise NotReplayableError(
                f"{self.label(first)!r} reads {self.label(reference)!r} from inside a function, "
                f"where it cannot be exchanged. {_RERUN}"
            )

    def _modes(self, number: int) -> Modes | None:
        """Autocast, if a call reads and returns floating types of two lengths."""
        params = self.recording.params
        if self.rows[number].operation.layer_type in CONVERSIONS:
            return None
        dtypes = {self.rows[number].dtype}
        for reference in self.references(number):
            if reference >= 0:
                dtypes.add(self.rows[reference].dtype)
            elif -1 - reference < len(params):
                dtypes.add(params[-1 - reference].dtype)
        return autocast_of(dtypes)


def version_and_storage(tensor: Tensor) -> tuple[int, int]:
    """What tells later whether a tensor is as it was."""
    return version_of(tensor), storage_of(tensor)
