"""Runs a model and keeps the values of a few chosen calls, at almost no cost.

A full log tells which rows a key means. `learn` runs the same input once more and lists the calls
that torch reports and the modules that are entered: the program. `find_rows` finds the call that
made each row. From then on, a `LightRun` compares each call with the program, keeps the chosen
results as they are at that moment, and ends the model after the last of them. A call that differs
ends the run with a `Deviation`.

What a program cannot describe (threads, collectives, scripted functions, transforms of torch.func)
is not aligned with the log: `find_rows` then returns None, and the input has to be logged.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchlens._capture.current import CURRENT
from torchlens._capture.entries import written_by
from torchlens._capture.model_parts import parts_of
from torchlens._capture.patches.mode_stack import push_mode, remove_mode, run_overridden
from torchlens._capture.patches.patching import (
    apply_patches,
    begin_eager,
    end_eager,
    is_compiler_there,
    undo_patches,
)
from torchlens._capture.session import finished
from torchlens._recording.operations import BOUNDARIES, KNOWN_OPERATIONS, Kind, Operation
from torchlens._recording.origin import version_of
from torchlens._recording.recording import Recording, located
from torchlens._recording.regions import storage_of
from torchlens._recording.trees import plain_tensors
from torchlens._recording.wrappers import copy_of

Tensor = torch.Tensor
_END = object()  # after the last call of a program


class Deviation(BaseException):
    """The model did something else than the program says. `at` is the number of the step.

    Not an Exception, so that the model does not catch it.
    """

    def __init__(self, at: int, call: Any) -> None:
        super().__init__(at)
        self.at = at
        self.call = call


class _Enough(BaseException):
    """The last chosen value has been kept."""


@dataclass(frozen=True, slots=True)
class LightStep:
    """One step of a program: a module that is entered, or a call of a function."""

    call: Any  # the module (its class if the model makes it anew each time), or the function
    name: str = ""  # of the operation
    num_rows: int = 0  # how many tensors the call makes
    may_write: bool = False


# -- what both kinds of run do ---------------------------------------------------------------------


class _LightMode(TorchFunctionMode):
    """A mode that patched functions of torch take for a recorder that is off.

    It stands for the recorder and for the tracker of modules at once.
    """

    def __init__(self, compiled: Sequence[tuple[Any, Any]]) -> None:
        super().__init__()
        self._compiled = compiled  # modules, with their compiled implementations
        self.recorder = self
        self.operator: Operation | None = None
        self.is_inlining = False
        self.collected: dict[int, None] = {}
        self.warnings: list[str] = []
        self.scripted: set[int] = set()
        self.on_compile: Callable[[], None] | None = lambda: begin_eager(self)
        self.is_shared = False

    def is_on(self) -> bool:
        """False: no patched function reports its call."""
        return False

    def paused(self) -> Any:
        """As in Recorder."""
        return nullcontext()

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called when a module is entered."""
        raise NotImplementedError

    def run(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Calls the model, up to the last call that matters."""
        with self._installed(), suppress(_Enough):
            finished(model(*args, **kwargs))

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """The context in which the calls of this thread come to this mode."""

        def leave() -> None:
            CURRENT.tracker = None
            remove_mode(self)
            for module, implementation in self._compiled:
                module._compiled_call_impl = implementation
            undo_patches(self)
            end_eager(self)

        try:
            if is_compiler_there():
                begin_eager(self)
            apply_patches(self)
            for module, _ in self._compiled:
                module._compiled_call_impl = None
            CURRENT.tracker = self  # type: ignore[assignment]
            push_mode(self)
            yield
        finally:
            try:
                leave()
            finally:  # again, because an interrupt may cut the first call short
                leave()

    def call_other(
        self,
        operation: Operation,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> Any:
        """Makes a call that makes no tensor, or whose inner calls count instead of it."""
        if operation.kind is not Kind.INLINE:
            return func(*args, **(kwargs or {}))
        self.is_inlining = True
        push_mode(self)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.is_inlining = False
            torch._C._pop_torch_function_stack()


def _are_foreign(types: Iterable[type]) -> bool:
    return not all(issubclass(kind, Tensor) for kind in types)


# -- learning a program ----------------------------------------------------------------------------


class _Learning(_LightMode):
    """Lists the steps of a run."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(parts_of(model).compiled)
        self.steps: list[LightStep] = []
        self._own = set(map(id, model.modules()))

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.steps.append(LightStep(module if id(module) in self._own else type(module)))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        operation = KNOWN_OPERATIONS[func]
        if operation.kind is not Kind.OPERATION:
            return self.call_other(operation, func, args, kwargs)
        if _are_foreign(types):
            return run_overridden(self, func, types, args, kwargs)
        if self.operator is not None:
            operation, self.operator = self.operator, None
        at = len(self.steps)
        self.steps.append(LightStep(func, operation.name))
        written = written_by(operation, args, kwargs)
        result = func(*args, **(kwargs or {}))
        made = _tensors_of(result, written) if result is not NotImplemented else []
        may_write = bool(operation.written) or bool(kwargs and "out" in kwargs)
        self.steps[at] = LightStep(func, operation.name, len(made), may_write)
        return result


def _tensors_of(result: Any, written: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a call that get rows, in the order of the rows."""
    if isinstance(result, Tensor):
        return [result]
    return [tensor for _, tensor in plain_tensors(result)] or list(written)


def learn(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[LightStep]:
    """The steps of one run of the model."""
    learning = _Learning(model)
    learning.run(model, args, kwargs)
    return learning.steps


def _rows_of(steps: Sequence[LightStep]) -> list[tuple[str, tuple[int, int]]]:
    """The name of the operation and the place of each tensor that the steps make."""
    return [
        (step.name, (at, index)) for at, step in enumerate(steps) for index in range(step.num_rows)
    ]


def find_rows(
    recording: Recording, steps: Sequence[LightStep]
) -> dict[int, tuple[int, int]] | None:
    """Row → (the step that made it, its number among the tensors of that call).

    None if the recording has other rows than the steps make. An output and the `identity` of a
    module that returns its argument stand for the row that they read.
    """
    made = _rows_of(steps)
    own = [
        (number, row.operation.name)
        for number, row in enumerate(recording.rows)
        if row.operation.name not in BOUNDARIES
    ]
    if [name for name, _ in made] != [name for _, name in own] or recording.branches:
        return None
    found = {number: place for (number, _), (_, place) in zip(own, made, strict=True)}
    for number, row in enumerate(recording.rows):
        if row.operation.name in ("identity", "output"):
            read = [entry for _, entry in located(row.references)]
            if len(read) == 1 and read[0] in found:
                found[number] = found[read[0]]
    return found


# -- light runs ------------------------------------------------------------------------------------


class Program:
    """What a model does for some inputs, and the calls whose results are chosen."""

    def __init__(
        self,
        model: torch.nn.Module,
        steps: Sequence[LightStep],
        places: Mapping[str, tuple[int, int]],
    ) -> None:
        self.compiled = parts_of(model).compiled
        self.calls = [*(step.call for step in steps), _END]
        self.chosen: dict[int, list[tuple[str, int]]] = {}
        for name, (at, index) in places.items():
            self.chosen.setdefault(at, []).append((name, index))
        self.last = max(self.chosen, default=-1)
        first = min(self.chosen, default=0)
        # Calls that cannot simply be passed on.
        self.special = set(self.chosen)
        self.special.update(
            at for at, step in enumerate(steps) if step.may_write and first < at < self.last
        )

    def pass_on(self, copied: set[int]) -> None:
        """Lets all writes pass but those before which a value was `copied`. (The version of each
        value is compared at the end.)
        """
        self.special = copied | set(self.chosen)


class LightRun(_LightMode):
    """Runs a model along a program; `values` has the chosen values by name."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.compiled)
        self.values: dict[str, Tensor] = {}
        self.copied: set[int] = set()  # the calls before which values were copied
        self._program = program
        self._calls = program.calls
        self._special = program.special
        self._at = 0
        self._versions: dict[str, int] = {}
        self._holding: dict[int, list[str]] = {}  # storage → names of the values in it

    def run(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """As in the base; raises Deviation if the model ended too early, or a kept value changed
        unnoticed.
        """
        super().run(model, args, kwargs)
        if self._at <= self._program.last:
            raise Deviation(self._at, _END)
        for name, version in self._versions.items():
            if version_of(self.values[name]) != version:
                raise Deviation(self._at, None)

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares a module that is entered with the program."""
        at = self._at
        if self._calls[at] is not module and self._calls[at] is not type(module):
            self._deviate(module)
        self._at = at + 1

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        at = self._at
        if self._calls[at] != func:
            return self._call_unlisted(func, types, args, kwargs)
        self._at = at + 1
        if at in self._special:
            return self._call_special(at, func, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _call_unlisted(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> Any:
        operation = KNOWN_OPERATIONS[func]
        if operation.kind is Kind.OPERATION:
            if _are_foreign(types):
                return run_overridden(self, func, types, args, kwargs)
            self._deviate(func)
        if operation.kind is Kind.EXPOSURE:
            self._keep_from_writes(args[:1])
        return self.call_other(operation, func, args, kwargs)

    def _call_special(
        self, at: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Makes a call that writes to tensors, or whose result is chosen."""
        written = written_by(KNOWN_OPERATIONS[func], args, kwargs)
        if written and self._keep_from_writes(written):
            self.copied.add(at)
        result = func(*args, **(kwargs or {}))
        chosen = self._program.chosen.get(at)
        if chosen is not None:
            made = _tensors_of(result, written)
            for name, index in chosen:
                if index >= len(made):
                    self._deviate(func)
                self._keep(name, made[index])
            if at == self._program.last:
                raise _Enough
        return result

    def _keep(self, name: str, tensor: Tensor) -> None:
        self.values[name] = tensor
        self._versions[name] = version_of(tensor)
        self._holding.setdefault(storage_of(tensor), []).append(name)

    def _keep_from_writes(self, targets: Iterable[Any]) -> bool:
        """Copies the kept values in the memory of `targets`, before a write; False if none is."""
        names = [name for one in targets for name in self._holding.pop(storage_of(one), ())]
        for name in names:
            self.values[name] = copy = copy_of(self.values[name])
            self._versions[name] = version_of(copy)
        return bool(names)

    def _deviate(self, call: Any) -> None:
        if self._at > self._program.last:  # the model has caught `_Enough`
            raise _Enough
        raise Deviation(self._at, call)
