"""Where NaN and Inf come up while a model is measured, by the rules of `torchlens.nonfinite`.

In a step that is logged, values are known by their numbers in the recording. Elsewhere only modules are seen: then what a
module returned is known as long as it lives.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from torchlens.errors import NonFiniteError
from torchlens.nonfinite import (
    FROM_OUTSIDE,
    Given,
    NonFinite,
    Origin,
    ValueRange,
    has_nonfinite,
    numbers_in,
    value_range,
)
from torchlens.nonfinite import Origins as PassOrigins
from torchlens.profiling.checking import Inputs, Place

__all__ = ["Origins"]

_MOST = 20
_INPUT = "an input of the model"
_BUFFER = "a buffer"
_UNSEEN = "This step was timed, so its operations were not seen; stop=True sees those of every step."


class Origins:
    """Gathers the places of all steps, each once; consequences are not told."""

    def __init__(self, stop: bool) -> None:
        self.found: list[tuple[Place, NonFinite]] = []
        # Which of them came through to an output of the model, or to a gradient.
        self.lasting: set[int] = set()
        # Which of them came up in a step whose operations were not seen: only the module is known.
        self._unplaced: set[int] = set()
        self._are_operations_seen = True
        self._stop = stop
        self._step = -1
        self._pass = PassOrigins()
        # In this step: which of `found` each origin of the pass is, the places of inputs, and whether a gradient was told.
        self._numbers: dict[int, int] = {}
        self._sources: dict[int, Place] = {}
        self._is_gradient_told = False
        self._modules = _ModuleResults()

    def on_step(self, are_operations_seen: bool) -> None:
        """A step begins."""
        self._are_operations_seen = are_operations_seen

    def told(self) -> list[tuple[NonFinite, bool]]:
        """Each with whether it came through to an output or a gradient.

        What is known of a step whose operations were not seen is left out if another step tells of operations: as a rule
        it is the same, seen from farther off.
        """
        is_placed = any(number in self.lasting and number not in self._unplaced for number in range(len(self.found)))
        return [
            (record, number in self.lasting)
            for number, (_, record) in enumerate(self.found)
            if not (is_placed and number in self._unplaced)
        ]

    def on_boundary(self, place: Place, tensor: torch.Tensor, node: int | None) -> None:
        """An input, a buffer or an output of the model; `node` is the value that an output is."""
        self._begin(place)
        if place.operation == "output":
            self._pass.add_output(node)
        elif place.entry is not None and has_nonfinite(tensor):
            self._sources[place.entry] = place
            is_input = place.operation == "input"
            name = _INPUT if is_input else _BUFFER
            self._tell(place, self._pass.add_source(place.entry, name, tensor, is_input))

    def on_value(self, place: Place, tensor: torch.Tensor, inputs: Inputs) -> None:
        if place.step != self._step:
            if not has_nonfinite(tensor):
                return
            self._begin(place)
        constants = partial(numbers_in, (inputs.args, inputs.kwargs))
        if place.entry is not None:
            given = partial(_given_by_reference, inputs, tensor)
            self._tell(place, self._pass.add_result(place.entry, place.operation, tensor, given, constants))
        elif has_nonfinite(tensor):
            self._on_module(place, tensor, inputs)

    def _on_module(self, place: Place, tensor: torch.Tensor, inputs: Inputs) -> None:
        inner = self._modules.inside(place.address)
        given = [
            Given(self._modules.node_of(each), name, each, isinstance(each, torch.nn.Parameter))
            for name, each in _named_tensors(inputs)
        ]
        node = self._modules.add(place.address, tensor)
        if inner is not None:
            self._pass.hand_on(inner, node)
        else:
            constants = partial(numbers_in, (inputs.args, inputs.kwargs))
            self._tell(place, self._pass.add_result(node, place.operation, tensor, lambda: given, constants))
        if not place.address:
            self._pass.add_output(node)

    def on_gradient(self, place: Place, gradient: torch.Tensor, inputs: Any) -> None:
        """A gradient that is not finite although what arrived was; or that was not when it arrived, which nobody told yet.

        Where the outputs were not finite, the gradients' not being so is no news.
        """
        if not has_nonfinite(gradient) or (place.step == self._step and self._pass.is_output_broken):
            return
        self._begin(place)
        arrived = [tensor for tensor in inputs if tensor is not None]
        bad = [tensor for tensor in arrived if has_nonfinite(tensor)]
        if bad and self._is_gradient_told:
            return
        self._is_gradient_told = True
        received = [value_range(f"gradient received {number}", tensor) for number, tensor in enumerate(arrived)]
        result = value_range("gradient", gradient)
        note = FROM_OUTSIDE if bad else ""
        self.lasting.add(self._add(place, result, tuple(received), note, is_from_outside=bool(bad)))

    def _begin(self, place: Place) -> None:
        if place.step != self._step:
            self._end()
            self._step = place.step
            self._pass = PassOrigins(parameters_are_known=bool(self.lasting))

    def _end(self) -> None:
        """A step is over: what came through to its outputs is known now."""
        self.lasting.update(self._numbers[number] for number in self._pass.lasting())
        self._numbers.clear()
        self._sources.clear()
        self._is_gradient_told = False
        self._modules = _ModuleResults()

    def _tell(self, place: Place, origin: Origin | None) -> None:
        if origin is None:
            return
        if place.entry is not None and origin.node != place.entry:  # the data is to blame
            place = self._sources[origin.node]
        # Noted first, as telling may stop the training.
        self._numbers[origin.number] = len(self.found)
        self._numbers[origin.number] = self._add(place, origin.result, origin.inputs, origin.note)

    def _add(
        self, place: Place, result: ValueRange, given: tuple[ValueRange, ...], note: str, is_from_outside: bool = False
    ) -> int:
        """The number of the finding, which may be known from an earlier step."""
        for number, (known, _) in enumerate(self.found):
            if (known.phase, *known[3:7]) == (place.phase, *place[3:7]):  # address, pass, operation, entry
                return number
        if len(self.found) >= _MOST:
            return _MOST
        if self.lasting and not self._are_operations_seen:
            # Modules are seen without their parameters, which an earlier one may have broken: no news, as far as is known.
            return min(self.lasting)
        record = NonFinite(
            phase=place.phase,
            label=None,
            operation=place.operation,
            module=place.address,
            source=place.source,
            result=result,
            inputs=given,
            step=place.step,
            note=note if self._are_operations_seen else f"{note} {_UNSEEN}".lstrip(),
            is_from_outside=is_from_outside,
        )
        if not self._are_operations_seen:
            self._unplaced.add(len(self.found))
        self.found.append((place, record))
        if self._stop:
            raise NonFiniteError(str(record))
        return len(self.found) - 1

    def finish(self, label_of: Callable[[int, int], str | None]) -> None:
        """Ends the last step, and gives the records their labels."""
        self._end()
        self.found = [
            (place, record if place.entry is None else replace(record, label=label_of(place.step, place.entry)))
            for place, record in self.found
        ]


class _ModuleResults:
    """What modules returned in a step that is not logged and was not finite: numbered, and known while it lives."""

    def __init__(self) -> None:
        self._addresses: list[str] = []
        self._alive: dict[int, tuple[Any, int]] = {}

    def add(self, address: str, tensor: torch.Tensor) -> int:
        node = len(self._addresses)
        self._addresses.append(address)
        reference: Any = torch._C._WeakTensorRef(tensor)  # type: ignore[attr-defined]
        self._alive[id(tensor)] = (reference, node)
        return node

    def node_of(self, tensor: torch.Tensor) -> int | None:
        reference, node = self._alive.get(id(tensor), (None, None))
        return None if reference is None or reference.expired() else node

    def inside(self, address: str) -> int | None:
        """The last result of a module inside the one at `address`."""
        prefix = f"{address}." if address else ""
        nodes = range(len(self._addresses) - 1, -1, -1)
        return next((node for node in nodes if self._addresses[node].startswith(prefix)), None)


def _given_by_reference(inputs: Inputs, result: torch.Tensor) -> list[Given]:
    """What an operation was given, by the numbers that the recorder knows. What was written over is there no more."""
    references = inputs.references
    found = []
    for location, path, tensor in _located_tensors(inputs):
        node = references.get(location) if isinstance(references, dict) else references[location]
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        name = f"{path} (a parameter)" if is_parameter else path
        found.append(Given(node, name, None if tensor is result else tensor, is_parameter))
    return found


def _located_tensors(inputs: Inputs) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """The tensors of numbers among the arguments: where the recorder's references have them, and what to call them."""
    for path, name, tensor in _tensors((), "argument ", inputs.args):
        yield path[0] if len(path) == 1 else path, name, tensor
    for path, name, tensor in _tensors((), "", inputs.kwargs or {}):
        yield path[0] if len(path) == 1 else path, name, tensor


def _named_tensors(inputs: Inputs) -> Iterator[tuple[str, torch.Tensor]]:
    for _, name, tensor in _located_tensors(inputs):
        yield name, tensor


def _tensors(path: tuple[Any, ...], name: str, value: Any) -> Iterator[tuple[tuple[Any, ...], str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            yield path, name, value
    elif isinstance(value, list | tuple | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _tensors((*path, key), f"{name}{key}" if not path else f"{name}[{key!r}]", item)
