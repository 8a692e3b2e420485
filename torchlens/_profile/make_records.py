"""Turns what was written down into records: the tree of modules, each with its calls."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchlens._graph.costs import backward_flops_of, flops_of
from torchlens._history.log import Log
from torchlens._profile.allocators import CAN_TELL
from torchlens._profile.ledger import (
    Ledger,
    LoggedRun,
    MeasuredCall,
    MeasuredOperation,
    MeasuredStep,
    bytes_of,
)
from torchlens._profile.records import (
    CallRecord,
    Measurements,
    ModuleRecord,
    OperationRecord,
    ParameterRecord,
)
from torchlens._profile.steps import StepRecord, TypicalSteps

LabelOf = Callable[[int, int], str | None]
_Flops = dict[int, tuple[int | None, int | None]]  # row → forward and backward FLOPs


def make_measurements(ledger: Ledger, model_name: str) -> Measurements:
    """All records, once measuring is over."""
    runs = {call.index: call.run for call in ledger.calls if call.run is not None}
    flops = {id(run.log): flops_by_row(run.log) for run in runs.values()}
    for index, run in runs.items():
        if run.is_whole:
            _charge_flops(ledger, ledger.calls[index], run, flops[id(run.log)])
    calls = _calls(ledger)
    steps = [_step(ledger, step, calls) for step in ledger.steps]
    parameters = _parameters(ledger)
    return Measurements(
        model_name=model_name,
        level=ledger.options.level,
        check=ledger.options.check,
        root=_Tree(ledger, calls, steps, parameters).root(),
        steps=steps,
        calls=calls,
        operations=_operations(ledger, flops),
        parameters=list(parameters.values()),
        flops_not_counted=_not_counted([run for run in runs.values() if run.is_whole], flops),
        problems=ledger.problems,
    )


# -- steps and calls


def _step(ledger: Ledger, step: MeasuredStep, calls: list[CallRecord]) -> StepRecord:
    outermost = [calls[call.index] for call in step.outermost_calls]
    is_training, has_grad, input_shapes = step.signature
    peak, added = step.memory or (None, None)
    begin = ledger.start_ns
    backward = [call.backward_seconds or 0.0 for call in outermost]
    own = sum(call.own_seconds for call in outermost)
    return StepRecord(
        number=step.number,
        phase="training" if is_training else "evaluation",
        has_grad=has_grad,
        input_shapes=input_shapes,
        has_flops=bool(outermost) and all(call.flops is not None for call in outermost),
        has_memory=step.has_memory,
        has_log=step.has_log,
        is_cold=_is_cold(ledger, step),
        is_warmup=step.is_warmup,
        position=step.position,
        start_ns=step.start_ns - begin,
        end_ns=step.end_ns - begin,
        forward_end_ns=max([step.forward_end_ns - begin, *(call.end_ns for call in outermost)]),
        outside_spans=tuple(
            (kind, start - begin, end - begin) for kind, start, end in step.outside
        ),
        forward_seconds=sum(call.forward_seconds for call in outermost),
        backward_seconds=sum(backward) if step.backward_tasks else None,
        num_backward_passes=len(step.backward_tasks),
        own_seconds=own + step.around_ns / 1e9,
        peak_bytes=peak,
        added_bytes=added,
        raised=next((call.raised for call in outermost if call.raised), None),
    )


def _is_cold(ledger: Ledger, step: MeasuredStep) -> bool:
    before = ledger.steps[step.number - 2] if step.number > 1 else None
    return before is not None and before.has_log and before.position == step.position - 1


def _calls(ledger: Ledger) -> list[CallRecord]:
    """All calls with their times, kept memory and FLOPs, which include the calls inside."""
    found: list[CallRecord] = []
    inside: dict[int, list[CallRecord]] = {}  # by the index of the call around
    saved: dict[int, dict[int, int]] = {}
    for call in reversed(ledger.calls):  # those inside a call come after it
        parent = call.parent
        kept = saved.pop(call.index, {}) | call.saved
        record = _call(ledger, call, inside.pop(call.index, []), sum(kept.values()))
        found.append(record)
        # What is run again in a backward pass adds to nothing but others that are.
        if parent is not None and (call.original is None) == (parent.original is None):
            inside.setdefault(parent.index, []).append(record)
            if call.original is None:
                saved.setdefault(parent.index, {}).update(kept)
    return found[::-1]


def _call(
    ledger: Ledger, call: MeasuredCall, inside: list[CallRecord], saved_bytes: int
) -> CallRecord:
    forward_inside = sum(record.forward_seconds for record in inside)
    own_seconds = max(call.own_end - call.own_start, 0.0)
    forward = max(call.end - call.start - own_seconds, forward_inside)
    grad_out_shapes = call.outputs.shapes_with_gradient(ledger.arrived)
    has_backward = bool(call.spans or grad_out_shapes)
    backward_self = call.backward_self or 0.0
    backward = backward_self + sum(record.backward_seconds or 0.0 for record in inside)
    # Gradients pass a module without nodes of its own in no time.
    passing = 0.0 if has_backward else None
    peak, added = call.forward_memory or (None, None)
    backward_peak, backward_added = call.backward_memory or (None, None)
    start = ledger.start_ns
    return CallRecord(
        index=call.index,
        step=call.step.number,
        address=call.address,
        pass_num=call.pass_num,
        module_type=call.module_type,
        parent=None if call.parent is None else call.parent.index,
        depth=call.depth,
        is_recomputed=call.original is not None,
        includes_log=call.step.has_log,
        raised=call.raised,
        input_shapes=call.inputs.shapes,
        output_shapes=call.outputs.shapes,
        grad_in_shapes=call.inputs.shapes_with_gradient(ledger.arrived) if has_backward else [],
        grad_out_shapes=grad_out_shapes,
        input_bytes=call.inputs.bytes,
        output_bytes=call.outputs.bytes,
        forward_seconds=forward,
        forward_self_seconds=forward - forward_inside,
        backward_seconds=backward if call.spans else passing,
        backward_self_seconds=backward_self if call.spans else passing,
        own_seconds=own_seconds,
        start_ns=call.start_ns - start,
        end_ns=call.end_ns - start,
        backward_spans=tuple(
            (span.start_ns - start, span.end_ns - start) for span in call.spans.values()
        ),
        flops=_flops_of(call, call.own_flops, [record.flops for record in inside]),
        flops_backward=_flops_of(
            call,
            None if call.step.is_deep else call.own_flops_backward,
            [record.flops_backward for record in inside],
        ),
        saved_bytes=saved_bytes if CAN_TELL else None,
        peak_bytes=peak,
        added_bytes=added,
        peak_bytes_backward=backward_peak,
        added_bytes_backward=backward_added,
        forward_nonfinite=call.forward_nonfinite,
        grad_in_nonfinite=call.grad_in_nonfinite,
        grad_out_nonfinite=call.grad_out_nonfinite,
    )


# -- FLOPs and operations


def flops_by_row(log: Log) -> _Flops:
    """FLOPs of each row, forward and backward.

    Those of backward are for one pass of gradients: a loss may use what leads to no output of the
    model.
    """
    recording, graph = log.recording, log.graph
    found: _Flops = {}
    for number, row in enumerate(recording.rows):
        entry = graph.entry_of.get(number)
        forward = flops_of(recording, row)
        backward = None if forward is None else 0
        if row.gradfunc is not None:
            backward = backward_flops_of(recording, graph, number, log.repeated_in_backward)
        elif entry is not None:  # inside a checkpoint or a custom autograd function, perhaps
            backward = log.flops_backward((entry,))[0]
        found[number] = forward, backward
    return found


def _charge_flops(ledger: Ledger, outer: MeasuredCall, run: LoggedRun, flops: _Flops) -> None:
    """Gives a call from outside, and the calls inside it, the FLOPs of their operations."""
    for call in _with_inner(outer):
        call.own_flops = call.own_flops_backward = 0
    for operation in run.operations:
        call = ledger.calls[operation.call]
        forward, each_backward = flops[operation.first]
        if forward is None or call.own_flops is None:  # not counted, and listed
            continue
        call.own_flops += forward
        if ledger.num_backward_passes(operation):
            backward = ledger.backward_flops(operation, each_backward)
            call.own_flops_backward = _known_sum([call.own_flops_backward, backward])


def _with_inner(outer: MeasuredCall) -> Iterable[MeasuredCall]:
    found = {outer.index}
    for call in outer.step.calls:
        is_inner = call.parent is not None and call.parent.index in found
        if call is outer or (is_inner and call.original is None):
            found.add(call.index)
            yield call


def _flops_of(call: MeasuredCall, own: int | None, inside: list[int | None]) -> int | None:
    """FLOPs of a call and those inside. A call that raised is no measure of the module."""
    return None if call.raised else _known_sum([own, *inside])


def _known_sum(counts: list[int | None]) -> int | None:
    """The sum; None if one of them is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _not_counted(runs: list[LoggedRun], flops: dict[int, _Flops]) -> dict[str, int]:
    """Layer types without a FLOP formula → how often the last run called them."""
    found: dict[str, int] = {}
    if runs:
        log = runs[-1].log
        for number, row in enumerate(log.recording.rows):
            if flops[id(log)][number][0] is None:
                found[row.operation.layer_type] = found.get(row.operation.layer_type, 0) + 1
    return found


def label_finder(ledger: Ledger) -> LabelOf:
    """(step, entry) → layer label. Steps that did the same operations have the same labels."""
    logs = {
        call.step.number: call.run.log
        for call in ledger.calls
        if call.run is not None and not call.address
    }
    labels: dict[int, dict[int, str]] = {}

    def label_of(step: int, entry: int) -> str | None:
        log = logs.get(step)
        if log is None:
            return None
        if id(log) not in labels:
            entries = log.graph.entry_of.items()
            labels[id(log)] = {number: log.label(position) for number, position in entries}
        return labels[id(log)].get(entry)

    return label_of


def _operations(ledger: Ledger, flops: dict[int, _Flops]) -> list[OperationRecord]:
    if not ledger.options.is_operation_level:
        return []
    label_of = label_finder(ledger)
    return [
        _operation(ledger, call.step, operation, label_of, flops[id(call.run.log)])
        for call in ledger.calls
        if call.run is not None and not call.address
        for operation in call.run.operations
    ]


def _operation(
    ledger: Ledger,
    step: MeasuredStep,
    operation: MeasuredOperation,
    label_of: LabelOf,
    flops: _Flops,
) -> OperationRecord:
    forward, backward = flops[operation.first]
    peak, added = operation.memory or (None, None)
    return OperationRecord(
        step=step.number,
        entry=operation.first,
        label=label_of(step.number, operation.first),
        call=operation.call,
        start_ns=operation.start_ns - ledger.start_ns,
        end_ns=operation.end_ns - ledger.start_ns,
        address=ledger.calls[operation.call].address,
        layer_type=operation.layer_type,
        shape=operation.shape,
        num_bytes=operation.num_bytes,
        forward_seconds=operation.seconds,
        backward_seconds=operation.backward_seconds,
        flops=forward,
        flops_backward=ledger.backward_flops(operation, backward),
        peak_bytes=peak,
        added_bytes=added,
    )


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


class _Tree:
    """The modules as they are nested in the model. A module that is reached twice is where it is
    reached first.
    """

    def __init__(
        self,
        ledger: Ledger,
        calls: list[CallRecord],
        steps: list[StepRecord],
        parameters: dict[int, ParameterRecord],
    ) -> None:
        self._model, self._parameters = ledger.model, parameters
        self._warmup = frozenset(step.number for step in steps if step.is_warmup)
        self._typical = TypicalSteps.of([step for step in steps if not step.is_warmup] or steps)
        self._calls: dict[str, list[CallRecord]] = {}
        for call in calls:
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
        if type(module).__name__ == "OptimizedModule":
            module = getattr(module, "_orig_mod", module)
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
