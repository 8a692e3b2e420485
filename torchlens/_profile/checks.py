"""Passes values and gradients to the checker during a step."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

from torchlens._capture.gradients.backward_hooks import NodeInfo
from torchlens._capture.observer import ObservedCall
from torchlens._health.checker import HealthChecker
from torchlens._health.checking import (
    Caller,
    CheckedPlace,
    Checking,
    GivenInputs,
    GradientSources,
    Held,
)
from torchlens._health.tensor_statistics import has_nonfinite
from torchlens._profile.ledger import Ledger, MeasuredCall, MeasuredStep, TensorFacts
from torchlens._recording.operations import Operation
from torchlens._recording.recording import References
from torchlens._recording.trees import plain_tensors
from torchlens._recording.unseen import GradMode
from torchlens.errors import NonFiniteError

Tensor = torch.Tensor


class Checks:
    """Calls the checker for each value and gradient. The time it takes is charged to no module."""

    def __init__(self, ledger: Ledger, checker: HealthChecker) -> None:
        self._ledger = ledger
        self._checker: HealthChecker | None = checker  # None once it has failed
        # Where a gradient arrives (as in `TensorFacts`) → the calls whose inputs or outputs it
        # belongs to.
        self._inputs: dict[int, list[MeasuredCall]] = {}
        self._outputs: dict[int, list[MeasuredCall]] = {}
        self._arriving: dict[
            int, tuple[tuple[Any, ...], int]
        ] = {}  # with how many nodes had begun by then
        self._num_nodes = 0
        self._checking = Checking.NOTHING  # of the step that has begun last
        self._has_nonfinite = False  # whether a module returned a value that is not finite in it

    def begin(self, step: MeasuredStep) -> None:
        """A step begins."""
        self._checking = Checking.NOTHING if self._checker is None else step.checking
        self._has_nonfinite = False
        before = self._ledger.steps[-2].outside if len(self._ledger.steps) > 1 else ()
        has_stepped = any(kind == "optimizer" for kind, *_ in before)
        self._run(
            lambda checker: checker.on_step(
                step.number, step.checking, step.signature[1], has_stepped
            )
        )

    # -- forward
    # ----------------------------------------------------------------------------------------------

    def entered(self, call: MeasuredCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module was called."""
        if self._checking is not Checking.NOTHING:
            _register(self._inputs, call, call.inputs)
            if not call.measured_step.is_logged and (call.around is None or self._has_nonfinite):
                self._run(self._check_inputs, call, GivenInputs(args, kwargs))

    def _check_inputs(
        self, checker: HealthChecker, call: MeasuredCall, inputs: GivenInputs
    ) -> None:
        if call.around is None:
            place = CheckedPlace("forward", call.step, -1, call.address, 1, "input")
            for _, tensor in plain_tensors((inputs.args, inputs.kwargs)):
                if not tensor.is_meta:
                    self._has_nonfinite = self._has_nonfinite or has_nonfinite(tensor)
                    checker.origins.on_boundary(place, tensor, None)
        checker.origins.on_entered(_place("forward", call, call.module_type), inputs)

    def outputs(self, call: MeasuredCall, outputs: list[Tensor], inputs: Any) -> None:
        """A module returned."""
        if self._checking is not Checking.NOTHING:
            _register(self._outputs, call, call.outputs)
            # Light steps, which times come from, run only this check. Its time is subtracted, but
            # it evicts the model's data from the processor's caches, so it is kept short while all
            # values are finite.
            if (
                self._checking is Checking.NONFINITE
                and call.around is not None
                and _are_finite(outputs)
            ):
                call.forward_nonfinite = False
            else:
                self._run(self._check_outputs, call, outputs, inputs)

    def _check_outputs(
        self, checker: HealthChecker, call: MeasuredCall, outputs: list[Tensor], inputs: Any
    ) -> None:
        call.forward_nonfinite = any(has_nonfinite(tensor) for tensor in outputs)
        self._has_nonfinite = self._has_nonfinite or call.forward_nonfinite
        if not call.measured_step.is_logged:
            place, above = _place("forward", call, call.module_type), call.around
            caller = None
            if above is not None:
                caller = Caller(
                    _place("forward", above, above.module_type), partial(self._held, above)
                )
            given = GivenInputs(inputs[0], inputs[1], held=partial(self._held, call), caller=caller)
            for tensor in outputs:
                if not tensor.is_meta:
                    checker.on_value(place, tensor, given)

    def _held(self, call: MeasuredCall) -> list[Held]:
        """The parameters and buffers that a call reads itself: its own, and those of modules inside
        that are not called.
        """
        return self._ledger.modules.held_by(call.address, call.measured_step.passes)

    def operation(self, observed: ObservedCall, result: Any) -> None:
        """An operation made `result`."""
        self._run(self._check_operation, self._ledger.current, observed, result)

    def _check_operation(
        self, checker: HealthChecker, call: MeasuredCall | None, observed: ObservedCall, result: Any
    ) -> None:
        place = _place("forward", call, observed.operation.layer_type, observed.first)
        place = place._replace(code=observed.code, instruction=observed.instruction)
        address_of = self._ledger.modules.address_of_parameter
        inputs = GivenInputs(
            observed.args, observed.kwargs, observed.references, observed.first, address_of
        )
        made = [tensor for _, tensor in plain_tensors(result)]
        for number, tensor in enumerate(made or observed.written):  # `x[i] = v` returns nothing
            if not tensor.is_meta:
                checker.on_value(
                    place._replace(entry=observed.first + number) if number else place,
                    tensor,
                    inputs,
                )

    def boundary(
        self, entry: int, operation: Operation, tensor: Tensor, references: References
    ) -> None:
        """An input, a buffer or an output of a model that is logged."""
        place = CheckedPlace(
            "forward", self._ledger.steps[-1].number, -1, "", 1, operation.layer_type, entry
        )
        node = next((number for number in references if number is not None), None)
        self._run(lambda checker: checker.origins.on_boundary(place, tensor, node))

    # -- backward
    # ----------------------------------------------------------------------------------------------

    def before_node(self, info: NodeInfo, gradients: tuple[Any, ...]) -> None:
        """Gradients arrive at a node."""
        if self._checking is Checking.NOTHING:
            return
        if info.parameter is None:
            key = info.number
            self._num_nodes += 1
            self._arriving[key] = gradients, self._num_nodes
        else:
            key = -1 - info.parameter
        is_parameter = (
            self._checking is Checking.EVERYTHING
            and info.parameter in self._ledger.modules.parameters
        )
        if is_parameter or key in self._inputs or key in self._outputs:
            self._run(self._check_arriving, key, info, _values(gradients))

    def _check_arriving(
        self, checker: HealthChecker, key: int, info: NodeInfo, gradients: list[Tensor]
    ) -> None:
        inputs, outputs = self._inputs.get(key, ()), self._outputs.get(key, ())
        if inputs or outputs:
            is_bad = any(map(has_nonfinite, gradients))
            for call in inputs:
                call.grad_in_nonfinite = call.grad_in_nonfinite or is_bad
            for call in outputs:
                call.grad_out_nonfinite = call.grad_out_nonfinite or is_bad
        if info.parameter is not None and self._checking is Checking.EVERYTHING:
            self._check_parameter(checker, info.parameter, info.name, gradients)

    def _check_parameter(
        self, checker: HealthChecker, key: int, node: str, gradients: list[Tensor]
    ) -> None:
        named = self._ledger.modules.parameters.get(key)
        if named is not None:
            place = _place("backward", self._ledger.parameter_call(key), node)
            for gradient in gradients:
                checker.on_parameter(place._replace(parameter=named[0]), named[1], gradient)

    def after_node(self, info: NodeInfo, gradients: tuple[Any, ...]) -> None:
        """A node has made gradients."""
        if self._checking is Checking.NOTHING or info.parameter is not None:
            return
        arrived, number = self._arriving.pop(info.number, ((), self._num_nodes))
        made_of = GradientSources(arrived, list, number != self._num_nodes)
        call = self._ledger.makers.get(info.number)
        if call is not None:
            self._run(self._check_made, call, info, gradients, made_of)

    def _check_made(
        self,
        checker: HealthChecker,
        call: MeasuredCall,
        info: NodeInfo,
        gradients: tuple[Any, ...],
        made_of: GradientSources,
    ) -> None:
        place = _place("backward", call, info.name)
        found = self._ledger.operation_at(info.sequence)
        if found is not None:
            place = place._replace(
                entry=found.entry, code=found.code, instruction=found.instruction
            )
            made_of = made_of._replace(read=partial(_entries, found.references))
        for gradient in _values(gradients):
            checker.origins.on_gradient(place, gradient, made_of)

    def let_go(self) -> None:
        """A step is over: a node that failed may have left its gradients."""
        self._arriving.clear()

    def _run(self, check: Callable[..., None], *what: Any) -> None:
        """Calls the checker, with gradient recording off."""
        checker = self._checker
        if checker is None:
            return
        start = perf_counter()
        try:
            with GradMode(False):
                check(checker, *what)
        except NonFiniteError:
            raise
        except Exception as error:  # the checker's own failure must not stop the training
            self._checker, self._checking = None, Checking.NOTHING
            self._ledger.problems.add_failure(error, "Checking ended")
        finally:
            self._ledger.own_spans.append((start, perf_counter()))


def _are_finite(tensors: list[Tensor]) -> bool:
    """Whether all tensors are finite. False if one cannot be read: the full check then reports
    the reason.
    """
    try:
        return not any(map(has_nonfinite, tensors))
    except Exception:
        return False


def _register(
    calls: dict[int, list[MeasuredCall]], call: MeasuredCall, tensors: Sequence[TensorFacts]
) -> None:
    for *_, key in tensors:
        if key is not None:
            calls.setdefault(key, []).append(call)


def _entries(references: References) -> list[int]:
    numbers = references.values() if isinstance(references, dict) else references
    return [number for number in numbers if number is not None and number >= 0]


def _values(gradients: tuple[Any, ...]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None and not gradient.is_meta]


def _place(
    phase: str, call: MeasuredCall | None, operation: str, entry: int | None = None
) -> CheckedPlace:
    if call is None:
        return CheckedPlace(phase, 0, -1, "", 1, operation, entry)
    call = call.original or call
    return CheckedPlace(phase, call.step, call.index, call.address, call.pass_num, operation, entry)
