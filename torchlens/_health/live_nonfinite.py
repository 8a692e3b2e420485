"""Finds the first NaN and Inf while a model runs, by the rules of `torchlens._health.nonfinite`.

In a logged step, values are identified by their numbers in the recording. In other steps only the
results of modules are checked; they are identified by the tensor while it is alive.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from torchlens._health.checking import (
    Caller,
    CheckedPlace,
    Checking,
    GivenInputs,
    GradientSources,
    Held,
)
from torchlens._health.nonfinite import (
    FROM_OUTSIDE,
    HINT,
    Given,
    NonFinite,
    NonFiniteOrigin,
    numbers_in,
)
from torchlens._health.nonfinite import Origins as PassOrigins
from torchlens._health.tensor_statistics import ValueRange, has_nonfinite, value_range
from torchlens.errors import NonFiniteError

_MOST = 20
_FINITE = -1  # the number of any finite value
_INPUT = "an input of the model"
_BUFFER = "a buffer"
_FROM_THE_START = "It was not finite when measuring began."
_OPTIMIZER = "An optimizer step followed: check the learning rate and the gradients."
_NO_OPTIMIZER = "Something other than an optimizer has changed it since."
_FIXED = (
    "Something has changed it since; optimizers change neither buffers nor parameters without "
    "gradients."
)
_UNSEEN = (
    "This step was timed, so its operations were not checked; with stop=True, those of every step "
    "are."
)


class NonFiniteFindings:
    """Collects the origins of all steps, each once, without consequences."""

    def __init__(self, stop: bool, sees_modules_alone: bool = False) -> None:
        self.found: list[tuple[CheckedPlace, NonFinite]] = []
        # Those (by position) that reached an output of the model or a gradient.
        self.lasting: set[int] = set()
        # Those found in a step whose operations were not checked: only the module is known.
        self._unplaced: set[int] = set()
        # Steps whose operations were not checked.
        self._timed: set[int] = set()
        self._sees_modules_alone = sees_modules_alone
        self._stop = stop
        self._step = _StepOrigins(-1)
        # Earlier steps with values that were not finite, whose backward pass may still run.
        self._earlier: dict[int, _StepOrigins] = {}
        self._has_grad = True
        self._hint = self._hint_of_fixed = HINT
        self._last_checked = 0

    def on_step(self, step: int, checking: Checking, has_grad: bool, has_stepped: bool) -> None:
        """A step begins; `has_stepped` says that an optimizer did since the last began."""
        if checking is Checking.NOTHING:
            return
        if checking is not Checking.EVERYTHING:
            self._timed.add(step)
        self._has_grad = has_grad
        if has_stepped:
            self._earlier.clear()
        self._hint, self._hint_of_fixed = self._hints(step, has_stepped)
        self._last_checked = step

    def _hints(self, step: int, has_stepped: bool) -> tuple[str, str]:
        """The explanations for parameters that are not finite when the step begins, and for buffers
        and parameters that do not learn.
        """
        if step == 1:
            return _FROM_THE_START, _FROM_THE_START
        was_clean = self._step.step != step - 1 or self._step.rules.is_clean
        if self._last_checked != step - 1 or not was_clean:
            return HINT, HINT
        before = f"All values of step {step - 1} were finite."
        if not has_stepped:
            return f"{before} {_NO_OPTIMIZER}", f"{before} {_NO_OPTIMIZER}"
        return f"{before} {_OPTIMIZER}", f"{before} {_FIXED}"

    def reported(self) -> list[tuple[NonFinite, bool]]:
        """Each origin, with whether it reached an output or a gradient.

        Origins from steps whose operations were not checked are left out if another step names an
        operation, because as a rule that is the same origin.
        """
        is_placed = any(
            number in self.lasting and number not in self._unplaced
            for number in range(len(self.found))
        )
        return [
            (record, number in self.lasting)
            for number, (_, record) in enumerate(self.found)
            if not (is_placed and number in self._unplaced)
        ]

    @property
    def first_nonfinite(self) -> NonFinite | None:
        """The first operation that made a NaN or Inf that reached an output or a gradient; if there
        is none, the first that made any.
        """
        found = [each for each in self.reported() if each[0].is_certain]
        return max(found, key=lambda each: each[1], default=(None, False))[0]

    # -- forward
    # ----------------------------------------------------------------------------------------------

    def on_boundary(self, place: CheckedPlace, tensor: torch.Tensor, node: int | None) -> None:
        """An input, a buffer or an output of the model; `node` is the value that an output is."""
        state = self._begin(place)
        is_input = place.operation == "input"
        if place.operation == "output":
            state.rules.add_output(node)
        elif has_nonfinite(tensor):
            if place.entry is None:  # only modules are seen
                if state.modules.node_of(tensor) is not None:
                    return
                node = state.modules.add(None, tensor)
            else:
                node = place.entry
            state.places[node] = place
            name = (
                f"an input of {place.address!r}" if place.address else _INPUT
            )  # of a part that is called by itself
            self._report(
                state, state.rules.add_source(node, name if is_input else _BUFFER, tensor, is_input)
            )

    def on_value(self, place: CheckedPlace, tensor: torch.Tensor, inputs: GivenInputs) -> None:
        state = self._step
        if place.step != state.step:
            if not has_nonfinite(tensor):
                return
            state = self._begin(place)
        if place.entry is not None:
            constants = partial(numbers_in, (inputs.args, inputs.kwargs))
            given = partial(_given_by_reference, inputs, tensor)
            origin = state.rules.add_result(
                place.entry, place.operation, tensor, given, constants, inputs.first
            )
            if origin is not None:
                state.places.setdefault(place.entry, place)
                self._report(state, origin)
        elif has_nonfinite(tensor):
            self._on_module(state, place, tensor, inputs)
        elif inputs.caller is None:
            state.rules.add_output(_FINITE)

    def on_entered(self, place: CheckedPlace, inputs: GivenInputs) -> None:
        """Before a module whose operations are not checked: notes which of its inputs are not
        finite.
        """
        state = self._step
        if place.step == state.step and not state.rules.is_clean:
            tensors = [tensor for _, tensor in _named_tensors(inputs) if has_nonfinite(tensor)]
            nodes = [state.modules.node_of(tensor) for tensor in tensors]
            if tensors:
                state.read[place.call] = [
                    state.modules.last if node is None else node for node in nodes
                ]

    def _on_module(
        self, state: "_StepOrigins", place: CheckedPlace, tensor: torch.Tensor, inputs: GivenInputs
    ) -> None:
        rules, modules = state.rules, state.modules
        known = modules.node_of(tensor)
        inner = modules.inside(place.address) if known is None else known
        given = [Given(modules.node_of(each), name, each) for name, each in _named_tensors(inputs)]
        if inner is None and inputs.caller is not None:
            self._blame_caller(state, inputs.caller, given)
            given = [
                each._replace(node=modules.node_of(each.tensor))
                for each in given
                if each.tensor is not None
            ]
        given += _given_by_module(inputs.held())
        node = modules.add(place.address, tensor)
        state.places[node] = place
        state.returned[place.call] = node
        if inner is not None:
            rules.hand_on(inner, node)
        else:
            constants = partial(numbers_in, (inputs.args, inputs.kwargs))
            self._report(
                state, rules.add_result(node, place.operation, tensor, lambda: given, constants)
            )
        if inputs.caller is None:
            rules.add_output(node)

    def _blame_caller(self, state: "_StepOrigins", caller: Caller, given: list[Given]) -> None:
        """Attributes an input that no module returned to the calling module, which computed it
        between its calls.
        """
        for each in given:
            tensor = each.tensor
            if tensor is not None and each.node is None and state.rules.is_unheard_of(tensor):
                node = state.modules.add(None, tensor)
                state.places[node] = caller.place
                held = partial(_given_by_module, caller.held())
                self._report(
                    state, state.rules.add_result(node, caller.place.operation, tensor, held, list)
                )

    # -- backward
    # ----------------------------------------------------------------------------------------------

    def on_gradient(
        self, place: CheckedPlace, gradient: torch.Tensor, made_of: GradientSources
    ) -> None:
        """Notes a gradient that is not finite although those it was computed from are, or the first
        that arrived so.

        If the outputs were not finite, their gradients are a consequence.
        """
        if not has_nonfinite(gradient):
            return
        state = self._state_of(place.step)
        arrived = [tensor for tensor in made_of.arrived if tensor is not None]
        is_from_outside = any(map(has_nonfinite, arrived))
        if self._is_gradient_known(state, is_from_outside, made_of.has_inner):
            return
        state.has_reported_gradient = True
        if not is_from_outside:
            read = made_of.read() if place.entry is not None else state.known_of(place.call)
            is_known, origin = state.rules.add_gradient(read)
            if is_known:
                self._report(state, origin)
                self._note_lasting(state)
                return
        received = [
            value_range(f"gradient received {number}", tensor)
            for number, tensor in enumerate(arrived)
        ]
        self.lasting.add(self._number(place))
        self._add(
            place,
            value_range("gradient", gradient),
            tuple(received),
            FROM_OUTSIDE if is_from_outside else "",
            is_from_outside=is_from_outside,
        )

    def _state_of(self, step: int) -> "_StepOrigins":
        """The state of the step that a backward pass belongs to; made now for a clean step without
        one.
        """
        if step == self._step.step:
            return self._step
        if step not in self._earlier:
            self._earlier[step] = self._new(step)
        return self._earlier[step]

    def _is_gradient_known(
        self, state: "_StepOrigins", is_from_outside: bool, has_inner: bool
    ) -> bool:
        """Whether a gradient is a consequence of something found before."""
        if state.rules.is_output_broken:
            return True
        if state.has_reported_gradient and (is_from_outside or has_inner):
            return True
        # A loss may be made of several steps.
        steps = (self._step, *self._earlier.values())
        return is_from_outside and any(each.rules.is_output_broken for each in steps)

    # -- steps
    # ----------------------------------------------------------------------------------------------

    def _begin(self, place: CheckedPlace) -> "_StepOrigins":
        """The step that a value belongs to, which may begin with it."""
        if place.step != self._step.step:
            self._end(self._step)
            if self._step.has_grad and not self._step.rules.is_clean:
                self._earlier[self._step.step] = self._step
            self._step = self._new(place.step)
        return self._step

    def _new(self, step: int) -> "_StepOrigins":
        sees_modules_alone = self._sees_modules_alone or step in self._timed
        rules = PassOrigins(
            is_state_known=bool(self.lasting),
            sees_modules_alone=sees_modules_alone,
            hint=self._hint,
            hint_of_fixed=self._hint_of_fixed,
        )
        return _StepOrigins(step, rules, self._has_grad)

    def _end(self, state: "_StepOrigins") -> None:
        """A step is over: notes which origins reached its outputs."""
        for origin in state.rules.add_suspected_outputs():
            self._report(state, origin, is_certain=False)
        self._note_lasting(state)

    def _note_lasting(self, state: "_StepOrigins") -> None:
        self.lasting.update(
            state.numbers[number] for number in state.rules.lasting() if number in state.numbers
        )

    def _report(
        self, state: "_StepOrigins", origin: NonFiniteOrigin | None, is_certain: bool = True
    ) -> None:
        if origin is None:
            return
        place = state.places[origin.node]
        # Noted first, because `_add` may stop the training.
        state.numbers[origin.number] = self._number(place)
        self._add(place, origin.result, origin.inputs, origin.note, is_certain=is_certain)

    def _number(self, place: CheckedPlace) -> int:
        """The number of the finding at a place, perhaps from an earlier step."""
        for number, (known, _) in enumerate(self.found):
            if (known.phase, *known[3:7]) == (
                place.phase,
                *place[3:7],
            ):  # address, pass, operation, entry
                return number
        return min(len(self.found), _MOST)

    def _add(
        self,
        place: CheckedPlace,
        result: ValueRange,
        given: tuple[ValueRange, ...],
        note: str,
        is_from_outside: bool = False,
        is_certain: bool = True,
    ) -> None:
        if self._number(place) < len(self.found) or len(self.found) >= _MOST:
            return
        record = NonFinite(
            phase=place.phase,
            label=None,
            operation=place.operation,
            module=place.address,
            source=place.source,
            result=result,
            inputs=given,
            step=place.step,
            note=f"{note} {_UNSEEN}".lstrip() if place.step in self._timed else note,
            is_from_outside=is_from_outside,
            is_certain=is_certain,
        )
        if place.step in self._timed:
            self._unplaced.add(len(self.found))
        self.found.append((place, record))
        if self._stop and is_certain:
            raise NonFiniteError(str(record))

    def finish(self, label_of: Callable[[int, int], str | None]) -> None:
        """Ends the last steps, which refer to tensors, and gives the records their labels."""
        for state in (*self._earlier.values(), self._step):
            self._end(state)
        self._earlier, self._step = {}, _StepOrigins(-1)
        self.found = [
            (
                place,
                record
                if place.entry is None
                else replace(record, label=label_of(place.step, place.entry)),
            )
            for place, record in self.found
        ]


class _StepOrigins:
    """The state of one step: its origins, and the places of its values."""

    def __init__(self, step: int, rules: PassOrigins | None = None, has_grad: bool = False) -> None:
        self.step = step
        self.rules = PassOrigins() if rules is None else rules
        self.has_grad = has_grad
        self.numbers: dict[int, int] = {}  # which of all that was found each origin is
        self.places: dict[int, CheckedPlace] = {}  # of the values, by number
        self.modules = _ModuleResults()
        self.read: dict[
            int, list[int]
        ] = {}  # by call of a module: values that it was given and that are not finite
        self.returned: dict[
            int, int
        ] = {}  # by call of a module: the value that it returned, which is not finite
        self.has_reported_gradient = False

    def known_of(self, call: int) -> list[int]:
        """The values that a call was given or returned and that are not finite.

        A returned value may be minus infinity. If it has a gradient, it was not a mask, because a
        mask passes none on.
        """
        returned = [self.returned[call]] if call in self.returned else []
        return [*self.read.get(call, ()), *returned]


class _ModuleResults:
    """The results of modules that were not finite, in a step that is not logged: each has a number,
    which is known while the tensor lives.
    """

    def __init__(self) -> None:
        self._addresses: list[str | None] = []
        self._alive: dict[int, tuple[Any, int]] = {}

    @property
    def last(self) -> int:
        """The number of the last."""
        return len(self._addresses) - 1

    def add(self, address: str | None, tensor: torch.Tensor) -> int:
        """The number of a value; `address` is that of the module that returned it, if one did."""
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
        found = ((node, self._addresses[node]) for node in nodes)
        return next(
            (node for node, own in found if own is not None and own.startswith(prefix)), None
        )


def _given_by_reference(inputs: GivenInputs, result: torch.Tensor) -> list[Given]:
    """The arguments of an operation, with their entry numbers. The value of an argument that the
    operation has overwritten is None.
    """
    references = inputs.references
    found = []
    for location, path, tensor in _located_tensors(inputs):
        node = references.get(location) if isinstance(references, dict) else references[location]
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        name = path
        if is_parameter:
            address = inputs.parameter_address(tensor)
            name = f"{path} (a parameter)" if address is None else f"parameter {address}"
        found.append(Given(node, name, None if tensor is result else tensor, is_parameter))
    return found


def _given_by_module(held: list[Held]) -> list[Given]:
    return [
        Given(
            None,
            f"{'parameter' if is_parameter else 'buffer'} {address}",
            tensor,
            is_parameter,
            not is_parameter,
        )
        for address, tensor, is_parameter in held
    ]


def _located_tensors(inputs: GivenInputs) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """The floating-point and complex tensors among the arguments: the location in the recorder's
    references, a name, and the tensor.
    """
    for path, name, tensor in _tensors((), "argument ", inputs.args):
        yield path[0] if len(path) == 1 else path, name, tensor
    for path, name, tensor in _tensors((), "", inputs.kwargs or {}):
        yield path[0] if len(path) == 1 else path, name, tensor


def _named_tensors(inputs: GivenInputs) -> Iterator[tuple[str, torch.Tensor]]:
    for _, name, tensor in _located_tensors(inputs):
        yield name, tensor


def _tensors(
    path: tuple[Any, ...], name: str, value: Any
) -> Iterator[tuple[tuple[Any, ...], str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            yield path, name, value
    elif isinstance(value, list | tuple | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _tensors(
                (*path, key), f"{name}{key}" if not path else f"{name}[{key!r}]", item
            )
