"""Completes the records once measuring is over, and builds the tree of modules."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchlens._graph.costs import flops_of_rows
from torchlens._history.log import Log
from torchlens._profile.allocators import CAN_READ_SAVED
from torchlens._profile.ledger import (
    Ledger,
    LoggedRun,
    MeasuredCall,
    MeasuredStep,
    TensorFacts,
    bytes_of,
)
from torchlens._profile.records import (
    CallRecord,
    Measurements,
    ModuleRecord,
    OperationRecord,
    ParameterRecord,
    ProfiledStep,
    Shape,
    TypicalSteps,
)
from torchlens._recording.recording import Recording

LabelOf = Callable[[int, int], str | None]
_Flops = list[tuple[int | None, int | None]]  # forward and backward FLOPs of each row


def make_measurements(ledger: Ledger, model_name: str) -> Measurements:
    """Completes all records, once measuring is over."""
    runs = {call.index: call.run for call in ledger.calls if call.run is not None}
    recordings = {id(run.recording): run.recording for run in runs.values()}
    flops = {key: flops_of_rows(recording) for key, recording in recordings.items()}
    for index, run in runs.items():
        if run.is_whole:
            _charge_flops(ledger, ledger.calls[index], run, flops[id(run.recording)])
    operations = _complete_operations(ledger, flops)
    _complete_calls(ledger)
    for step in ledger.steps:
        _complete_step(ledger, step)
    parameters = _parameters(ledger)
    steps: list[ProfiledStep] = [*ledger.steps]
    return Measurements(
        model_name=model_name,
        level=ledger.options.level,
        check=ledger.options.check,
        root=_ModuleTree(ledger, parameters).root(),
        steps=steps,
        calls=[*ledger.calls],
        operations=operations,
        parameters=list(parameters.values()),
        flops_not_counted=_not_counted([run for run in runs.values() if run.is_whole], flops),
        problems=ledger.problems,
    )


# -- steps and calls


def _complete_step(ledger: Ledger, step: MeasuredStep) -> None:
    """Adds up the calls from outside."""
    calls = step.outermost_calls
    _complete_span(ledger, step, calls)
    step.has_flops = bool(calls) and all(call.flops is not None for call in calls)
    step.forward_seconds = sum(call.forward_seconds for call in calls)
    step.num_backward_passes = len(step.backward_tasks)
    if step.backward_tasks:
        step.backward_seconds = sum(call.backward_seconds or 0.0 for call in calls)
    step.own_seconds = sum(call.own_seconds for call in calls) + step.around_seconds
    step.raised = next((call.raised for call in calls if call.raised), None)


def _complete_span(ledger: Ledger, step: MeasuredStep, calls: Iterable[MeasuredCall]) -> None:
    forward_end = max([step.forward_end, *(call.end for call in calls)])
    times = (step.start, step.end, forward_end)
    step.start_ns, step.end_ns, step.forward_end_ns = map(ledger.ns, times)
    step.outside_spans = tuple(
        (kind, ledger.ns(start), ledger.ns(end)) for kind, start, end in step.outside
    )


def _complete_calls(ledger: Ledger) -> None:
    """Times, kept memory and FLOPs of all calls, which include the calls inside."""
    inside: dict[int, list[MeasuredCall]] = {}  # by the index of the call around
    kept: dict[int, dict[int, int]] = {}
    for call in reversed(ledger.calls):  # those inside a call come after it
        around, own_kept = call.around, kept.pop(call.index, {}) | call.saved
        _complete_call(ledger, call, inside.pop(call.index, []))
        if CAN_READ_SAVED and not call.measured_step.is_light:
            call.saved_bytes = sum(own_kept.values())
        # A call made again in a backward pass adds only to others made again.
        if around is not None and call.is_recomputed == around.is_recomputed:
            inside.setdefault(around.index, []).append(call)
            if not call.is_recomputed:
                kept.setdefault(around.index, {}).update(own_kept)


def _complete_call(ledger: Ledger, call: MeasuredCall, inside: list[MeasuredCall]) -> None:
    step = call.measured_step
    call.includes_log = step.has_log
    call.input_shapes, call.input_bytes = _shapes(call.inputs), _bytes(call.inputs)
    call.output_shapes, call.output_bytes = _shapes(call.outputs), _bytes(call.outputs)
    call.grad_out_shapes = _shapes(_arrived(ledger, call.outputs))
    has_backward = bool(call.spans or call.grad_out_shapes)
    call.grad_in_shapes = _shapes(_arrived(ledger, call.inputs)) if has_backward else []
    call.start_ns, call.end_ns = ledger.ns(call.start), ledger.ns(call.end)
    call.backward_spans = tuple(
        (ledger.ns(start), ledger.ns(end)) for start, end in call.spans.values()
    )
    _complete_times(call, inside, has_backward)
    if not call.raised:  # a call that raised has no FLOPs
        backward = None if step.is_deep else call.own_flops_backward
        call.flops = _known_sum([call.own_flops, *(inner.flops for inner in inside)])
        call.flops_backward = _known_sum([backward, *(inner.flops_backward for inner in inside)])


def _complete_times(call: MeasuredCall, inside: list[MeasuredCall], has_backward: bool) -> None:
    call.own_seconds = max(call.own_end - call.own_start, 0.0)
    forward_inside = sum(inner.forward_seconds for inner in inside)
    call.forward_seconds = max(call.end - call.start - call.own_seconds, forward_inside)
    call.forward_self_seconds = call.forward_seconds - forward_inside
    if call.spans:
        own_backward = call.backward_self or 0.0
        call.backward_self_seconds = own_backward
        call.backward_seconds = own_backward + sum(
            inner.backward_seconds or 0.0 for inner in inside
        )
    elif has_backward:  # a module without nodes of its own passes gradients on in no time
        call.backward_seconds = call.backward_self_seconds = 0.0


def _shapes(tensors: Iterable[TensorFacts]) -> list[Shape]:
    return [tuple(shape) for shape, _, _ in tensors]


def _bytes(tensors: Iterable[TensorFacts]) -> list[int]:
    return [num_bytes for _, num_bytes, _ in tensors]


def _arrived(ledger: Ledger, tensors: Iterable[TensorFacts]) -> list[TensorFacts]:
    """The tensors whose gradient arrived."""
    return [facts for facts in tensors if facts[2] in ledger.arrived]


# -- FLOPs and operations


def _charge_flops(ledger: Ledger, outer: MeasuredCall, run: LoggedRun, flops: _Flops) -> None:
    """Gives a call from outside, and the calls inside it, the FLOPs of their operations."""
    for call in _with_inner(outer):
        call.own_flops = call.own_flops_backward = 0
    for operation in run.operations:
        call = ledger.calls[operation.call]
        forward, each_backward = flops[operation.entry]
        if forward is None or call.own_flops is None:  # not counted, and listed
            continue
        call.own_flops += forward
        if ledger.num_backward_passes(operation):
            backward = ledger.backward_flops(operation, each_backward)
            call.own_flops_backward = _known_sum([call.own_flops_backward, backward])


def _with_inner(outer: MeasuredCall) -> Iterable[MeasuredCall]:
    found = {outer.index}
    for call in outer.measured_step.calls:
        is_inner = call.parent in found and not call.is_recomputed
        if call is outer or is_inner:
            found.add(call.index)
            yield call


def _known_sum(counts: list[int | None]) -> int | None:
    """The sum; None if one of them is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _not_counted(runs: list[LoggedRun], flops: dict[int, _Flops]) -> dict[str, int]:
    """Layer types without a FLOP formula → how often the last run called them."""
    found: dict[str, int] = {}
    if runs:
        recording = runs[-1].recording
        for row, (forward, _) in zip(recording.rows, flops[id(recording)], strict=True):
            if forward is None:
                found[row.operation.layer_type] = found.get(row.operation.layer_type, 0) + 1
    return found


def label_finder(ledger: Ledger) -> LabelOf:
    """(step, entry) → layer label. Steps that did the same operations have the same labels."""
    recordings = {
        call.step: call.run.recording
        for call in ledger.calls
        if call.run is not None and not call.address
    }
    labels: dict[int, dict[int, str]] = {}

    def label_of(step: int, entry: int) -> str | None:
        recording = recordings.get(step)
        if recording is None:
            return None
        if id(recording) not in labels:
            labels[id(recording)] = _labels(recording)
        return labels[id(recording)].get(entry)

    return label_of


def _labels(recording: Recording) -> dict[int, str]:
    log = Log(recording)
    return {number: log.label(entry) for number, entry in log.graph.entry_of.items()}


def _complete_operations(ledger: Ledger, flops: dict[int, _Flops]) -> list[OperationRecord]:
    """The operations of the whole model, with labels and FLOPs."""
    found: list[OperationRecord] = []
    label_of = label_finder(ledger)
    for call in ledger.calls if ledger.options.is_operation_level else ():
        if call.run is None or call.address:
            continue
        for operation in call.run.operations:
            operation.label = label_of(operation.step, operation.entry)
            operation.address = ledger.calls[operation.call].address
            operation.start_ns = ledger.ns(operation.start)
            operation.end_ns = ledger.ns(operation.end)
            operation.flops, backward = flops[id(call.run.recording)][operation.entry]
            operation.flops_backward = ledger.backward_flops(operation, backward)
            found.append(operation)
    return found


# -- modules and parameters


def _parameters(ledger: Ledger) -> dict[int, ParameterRecord]:
    """Each parameter once, by its id."""
    names: dict[int, list[str]] = {}
    found: dict[int, Any] = {}
    for address, parameter in ledger.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(address.replace("_orig_mod.", ""))
        found[id(parameter)] = parameter
    return {
        key: _parameter(names[key], parameter, ledger.num_gradients[key])
        for key, parameter in found.items()
    }


def _parameter(names: list[str], parameter: Any, num_gradients: int) -> ParameterRecord:
    is_unknown = is_lazy(parameter)
    return ParameterRecord(
        address=names[0],
        aliases=names[1:],
        module=names[0].rpartition(".")[0],
        shape=() if is_unknown else tuple(parameter.shape),
        num_elements=0 if is_unknown else parameter.numel(),
        num_bytes=0 if is_unknown else bytes_of(parameter),
        is_learnable=parameter.requires_grad,
        gradient_bytes=_gradient_bytes(parameter, num_gradients),
        num_gradients=num_gradients,
    )


def _gradient_bytes(parameter: torch.Tensor, num_gradients: int) -> int:
    """Of the gradient that it has, or that it had before `zero_grad`."""
    gradient = parameter.grad
    if gradient is None:
        return bytes_of(parameter) if num_gradients else 0
    if gradient.layout is torch.sparse_coo:
        return bytes_of(gradient._values()) + bytes_of(gradient._indices())
    return bytes_of(gradient)


class _ModuleTree:
    """The modules as they are nested in the model. A module that is reached twice is where it is
    reached first.
    """

    def __init__(self, ledger: Ledger, parameters: dict[int, ParameterRecord]) -> None:
        self._model, self._parameters = ledger.model, parameters
        steps = [step for step in ledger.steps if not step.is_warmup] or ledger.steps
        self._warmup = frozenset(step.number for step in ledger.steps if step.is_warmup)
        self._typical = TypicalSteps.of(steps)
        self._calls: dict[str, list[CallRecord]] = {}
        for call in ledger.calls:
            self._calls.setdefault(call.address, []).append(call)
        self._names: dict[int, list[str]] = {}
        for address, module in self._model.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), []).append(address.replace("_orig_mod.", ""))
        self._seen: set[int] = set()

    def root(self) -> ModuleRecord:
        return self._build(self._model, "", 0)[0]

    def _build(
        self, module: Any, address: str, depth: int
    ) -> tuple[ModuleRecord, dict[int, ParameterRecord]]:
        """The record of a module, and all parameters in it."""
        module = getattr(module, "_orig_mod", module)  # of a compiled model: its source
        parameters = self._parameters
        own = {id(p): parameters[id(p)] for p in module._parameters.values() if id(p) in parameters}
        everything = dict(own)
        children = []
        for name, child in module._modules.items():
            if child is not None and id(child) not in self._seen:
                self._seen.add(id(child))
                inner = f"{address}.{name}" if address else name
                record, inside = self._build(child, inner, depth + 1)
                children.append(record)
                everything.update(inside)
        names = self._names.get(id(module), [])
        record = ModuleRecord(
            address=address,
            aliases=[name for name in names if name not in (address, "_orig_mod")],
            module_type=getattr(module, "original_name", None) or type(module).__name__,
            depth=depth,
            **_counts(everything.values(), ""),
            **_counts(own.values(), "own_"),
            children=children,
            calls=self._calls.get(address, []),
            warmup_steps=self._warmup,
            typical_steps=self._typical,
        )
        return record, everything


def _counts(records: Iterable[ParameterRecord], prefix: str) -> dict[str, Any]:
    own = list(records)
    return {
        f"{prefix}num_parameters": sum(record.num_elements for record in own),
        f"{prefix}num_learnable": sum(record.num_elements for record in own if record.is_learnable),
        f"{prefix}param_bytes": sum(record.num_bytes for record in own),
        f"{prefix}gradient_bytes": sum(record.gradient_bytes for record in own),
    }
