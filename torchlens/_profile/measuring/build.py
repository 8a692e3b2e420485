"""From what was written down to records: the model's modules, each with its calls."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchlens._profile.measuring.calibration import NO_RESIDUALS, Residuals
from torchlens._profile.measuring.calls import Call, Step, bytes_of
from torchlens._profile.measuring.kept_tensors import CAN_TELL
from torchlens._profile.measuring.ledger import Ledger
from torchlens._profile.measuring.logged_steps import LoggedSteps
from torchlens._profile.measuring.operations import Operation, count_flops
from torchlens._profile.measuring.times import (
    CallTimes,
    agreeing_times,
    backward_operation_times,
    call_times,
    operation_times,
)
from torchlens._profile.records import (
    CallRecord,
    Measurements,
    ModuleRecord,
    OperationRecord,
    ParameterRecord,
)
from torchlens._profile.steps import StepRecord, TypicalSteps


def build_measurements(
    ledger: Ledger,
    logged: LoggedSteps,
    model_name: str,
    residuals: Mapping[bool, Residuals] = NO_RESIDUALS,
) -> Measurements:
    """All records, once measuring is over."""
    options = ledger.options
    warmup = frozenset(step.number for step in ledger.steps if step.is_warmup)
    label_of = label_finder(logged)
    not_counted = _count_flops(ledger, logged)
    times = call_times(ledger.calls, residuals)
    steps = [_step(ledger, step, times) for step in ledger.steps]
    times = agreeing_times(
        ledger.calls, times, [step for step in steps if not step.is_warmup] or steps
    )
    steps = [_step(ledger, step, times) for step in ledger.steps]
    calls = _calls(ledger, times)
    parameters = _parameters(ledger)
    typical = TypicalSteps.of([step for step in steps if not step.is_warmup] or steps)
    return Measurements(
        model_name=model_name,
        level=options.level,
        check=options.check,
        root=_modules(ledger, calls, parameters, warmup, typical),
        steps=steps,
        calls=calls,
        operations=[
            _operation(ledger, operation, forward, backward, label_of)
            for operation, forward, backward in zip(
                ledger.operations,
                operation_times(ledger.operations, times, residuals),
                backward_operation_times(ledger.operations, ledger.calls, times),
                strict=True,
            )
        ],
        parameters=[record for record, _ in parameters.values()],
        flops_not_counted=not_counted,
        problems=ledger.problems,
    )


# -- steps and calls
# --------------------------------------------------------------------------------------------------


def _step(ledger: Ledger, step: Step, times: list[CallTimes]) -> StepRecord:
    outermost = [call for call in step.calls if call.parent is None and call.original is None]
    peak, added = step.memory or (None, None)
    is_training, has_grad, input_shapes = step.signature
    begin = ledger.start_ns
    has_flops = bool(outermost) and all(
        call.own_flops is not None and not call.raised for call in outermost
    )
    return StepRecord(
        number=step.number,
        phase="training" if is_training else "evaluation",
        has_grad=has_grad,
        input_shapes=input_shapes,
        has_flops=has_flops,
        details=_details(step),
        is_cold=_is_cold(ledger, step),
        is_warmup=step.is_warmup,
        position=step.position,
        start_ns=step.start_ns - begin,
        end_ns=step.end_ns - begin,
        forward_end_ns=max([step.forward_end_ns, *(call.end_ns for call in outermost)]) - begin,
        outside_spans=tuple(
            (kind, start - begin, end - begin) for kind, start, end in step.outside
        ),
        forward_seconds=sum(times[call.index].forward for call in outermost),
        backward_seconds=sum(times[call.index].backward for call in outermost)
        if step.backward_tasks
        else None,
        num_backward_passes=len(step.backward_tasks),
        own_seconds=sum(times[call.index].own for call in outermost) + step.around_ns / 1e9,
        peak_bytes=peak,
        added_bytes=added,
        raised=next((call.raised for call in outermost if call.raised), None),
    )


def _details(step: Step) -> int:
    return (step.memory is not None) + 2 * step.has_log


def _is_cold(ledger: Ledger, step: Step) -> bool:
    """Whether it is no detailed step, but the one before it was. Of our own runs, the slowest count
    for nothing anyway.
    """
    if step.number == 1 or _details(step) or ledger.options.has_inputs:
        return False
    before = ledger.steps[step.number - 2]
    return before.position == step.position - 1 and _details(before) > 0


def _calls(ledger: Ledger, times: list[CallTimes]) -> list[CallRecord]:
    children: dict[int, list[Call]] = {}
    for call in ledger.calls:
        if call.parent is not None and call.original is None:
            children.setdefault(call.parent.index, []).append(call)
    saved: dict[int, dict[int, int]] = {}
    flops: dict[int, int | None] = {}
    flops_backward: dict[int, int | None] = {}
    for call in reversed(ledger.calls):  # those inside a call come after it
        inside = children.get(call.index, [])
        saved[call.index] = dict(call.saved or {})
        for child in inside:
            saved[call.index].update(saved[child.index])
        flops[call.index] = _known_sum([call.own_flops, *(flops[child.index] for child in inside)])
        flops_backward[call.index] = _known_sum(
            [call.own_flops_backward, *(flops_backward[child.index] for child in inside)]
        )
    return [
        _call(
            ledger,
            call,
            times[call.index],
            sum(saved[call.index].values()),
            # What was cut short is no measure of the module.
            None if call.raised else flops[call.index],
            None if call.raised else flops_backward[call.index],
        )
        for call in ledger.calls
    ]


def _known_sum(counts: list[int | None]) -> int | None:
    """The sum; None if one of them is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _call(
    ledger: Ledger,
    call: Call,
    times: CallTimes,
    saved_bytes: int,
    flops: int | None,
    flops_backward: int | None,
) -> CallRecord:
    peak, added = call.forward_memory or (None, None)
    backward_peak, backward_added = call.backward_memory or (None, None)
    arrived = ledger.arrived
    grad_out_shapes = call.outputs.shapes_with_gradient(arrived)
    has_backward = bool(call.spans or grad_out_shapes)
    passing = 0.0 if has_backward else None
    return CallRecord(
        index=call.index,
        step=call.step.number,
        address=call.address,
        pass_num=call.pass_num,
        module_type=call.module_type,
        parent=None if call.parent is None else call.parent.index,
        depth=call.depth,
        is_recomputed=call.original is not None,
        raised=call.raised,
        input_shapes=call.inputs.shapes,
        output_shapes=call.outputs.shapes,
        grad_in_shapes=call.inputs.shapes_with_gradient(arrived) if has_backward else [],
        grad_out_shapes=grad_out_shapes,
        input_bytes=call.inputs.bytes,
        output_bytes=call.outputs.bytes,
        forward_seconds=times.forward,
        forward_self_seconds=times.forward_self,
        # A module that hands on what it was given has no node of its own: gradients pass it in no
        # time.
        backward_seconds=times.backward if call.spans else passing,
        backward_self_seconds=times.backward_self if call.spans else passing,
        own_seconds=times.own,
        start_ns=call.start_ns - ledger.start_ns,
        end_ns=call.end_ns - ledger.start_ns,
        backward_spans=tuple(
            (span.start_ns - ledger.start_ns, span.end_ns - ledger.start_ns)
            for span in call.spans.values()
        ),
        estimated_seconds=times.estimated,
        backward_estimated_seconds=times.backward_estimated,
        flops=flops,
        flops_backward=None if call.step.is_deep else flops_backward,
        saved_bytes=saved_bytes if CAN_TELL else None,
        peak_bytes=peak,
        added_bytes=added,
        peak_bytes_backward=backward_peak,
        added_bytes_backward=backward_added,
        forward_nonfinite=call.forward_nonfinite,
        grad_in_nonfinite=call.grad_in_nonfinite,
        grad_out_nonfinite=call.grad_out_nonfinite,
    )


# -- operations
# --------------------------------------------------------------------------------------------------


def label_finder(logged: LoggedSteps) -> Callable[[int, int], str | None]:
    """(step, entry) → layer label. Steps that did the same operations have the same labels."""
    steps, by_kind = logged.steps, logged.by_kind
    labels: dict[int, dict[int, str]] = {}

    def label_of(step: int, entry: int) -> str | None:
        if step not in steps:
            return None
        kind = steps[step].kind
        if kind not in labels:
            log = by_kind[kind]
            labels[kind] = {
                number: log.label(position) for number, position in log.graph.entry_of.items()
            }
        return labels[kind].get(entry)

    return label_of


def _count_flops(ledger: Ledger, logged: LoggedSteps) -> dict[str, int]:
    """Gives the calls and operations of the steps that were logged their FLOPs; returns what the
    last could not count.
    """
    counts = [count_flops(log) for log in logged.by_kind]
    not_counted: dict[str, int] = {}
    for operation in ledger.operations:
        flops, _ = counts[logged.steps[operation.step.number].kind]
        operation.flops, backward = flops[operation.mark.first]
        operation.flops_backward = ledger.backward_flops(operation.mark, backward)
    for step in ledger.steps:
        calls = [call for call in step.calls if call.original is None]
        outermost = [call for call in calls if call.parent is None]
        for outer in outermost:
            run = logged.parts.get(outer.index) if outer.address else logged.steps.get(step.number)
            if run is None or not run.is_whole:
                continue
            flops, not_counted = counts[run.kind]
            for call in _inside(outer, calls):
                call.own_flops = call.own_flops_backward = 0
            for mark in run.marks:
                call = ledger.calls[mark.call]
                forward, backward = flops[mark.first]
                call.own_flops = (call.own_flops or 0) + (forward or 0)
                if forward is not None and ledger.num_backward_passes(
                    mark
                ):  # what is not counted at all is listed
                    call.own_flops_backward = _known_sum(
                        [call.own_flops_backward, ledger.backward_flops(mark, backward)]
                    )
    return not_counted


def _inside(outermost: Call, calls: list[Call]) -> list[Call]:
    """A call and all that it made, of the calls of its step."""
    found = {outermost.index: outermost}
    for call in calls:
        if call.parent is not None and call.parent.index in found:
            found[call.index] = call
    return list(found.values())


def _operation(
    ledger: Ledger,
    operation: Operation,
    forward_seconds: float,
    backward_seconds: float | None,
    label_of: Callable[[int, int], str | None],
) -> OperationRecord:
    peak, added = operation.memory or (None, None)
    return OperationRecord(
        step=operation.step.number,
        entry=operation.mark.first,
        label=label_of(operation.step.number, operation.mark.first),
        call=operation.mark.call,
        start_ns=operation.mark.start_ns - ledger.start_ns,
        end_ns=operation.mark.end_ns - ledger.start_ns,
        address=ledger.calls[operation.mark.call].address,
        layer_type=operation.layer_type,
        shape=operation.shape,
        num_bytes=operation.num_bytes,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        flops=operation.flops,
        flops_backward=operation.flops_backward,
        peak_bytes=peak,
        added_bytes=added,
    )


# -- modules and parameters
# --------------------------------------------------------------------------------------------


def _parameters(ledger: Ledger) -> dict[int, tuple[ParameterRecord, Any]]:
    """Each parameter once, by id, with itself."""
    names: dict[int, list[str]] = {}
    owners: dict[int, str] = {}
    found: dict[int, Any] = {}
    for address, parameter in ledger.model.named_parameters(remove_duplicate=False):
        address = address.replace("_orig_mod.", "")
        names.setdefault(id(parameter), []).append(address)
        owners.setdefault(id(parameter), address.rpartition(".")[0])
        found[id(parameter)] = parameter
    return {
        key: (
            ParameterRecord(
                address=names[key][0],
                aliases=names[key][1:],
                module=owners[key],
                shape=() if is_lazy(parameter) else tuple(parameter.shape),
                num_elements=0 if is_lazy(parameter) else parameter.numel(),
                num_bytes=0 if is_lazy(parameter) else bytes_of(parameter),
                is_learnable=parameter.requires_grad,
                gradient_bytes=_gradient_bytes(parameter, ledger.num_gradients.get(key, 0)),
                num_gradients=ledger.num_gradients.get(key, 0),
            ),
            parameter,
        )
        for key, parameter in found.items()
    }


def _gradient_bytes(parameter: torch.Tensor, num_gradients: int) -> int:
    """Of the gradient that it has; of the one that it had, if `zero_grad` has taken it away."""
    gradient = parameter.grad
    if gradient is None:
        return bytes_of(parameter) if num_gradients else 0
    if gradient.layout is torch.sparse_coo:
        return bytes_of(gradient._values()) + bytes_of(gradient._indices())
    return bytes_of(gradient)


def _modules(
    ledger: Ledger,
    calls: list[CallRecord],
    parameters: dict[int, tuple[ParameterRecord, Any]],
    warmup: frozenset[int],
    typical: TypicalSteps,
) -> ModuleRecord:
    """The tree, as the model is nested. A module that is reached twice stands where it is reached
    first.
    """
    calls_of: dict[str, list[CallRecord]] = {}
    for call in calls:
        calls_of.setdefault(call.address, []).append(call)
    names: dict[int, list[str]] = {}
    for address, module in ledger.model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(address.replace("_orig_mod.", ""))
    seen: set[int] = set()

    def build(
        module: Any, address: str, depth: int
    ) -> tuple[ModuleRecord, dict[int, ParameterRecord]]:
        module = (
            getattr(module, "_orig_mod", module)
            if type(module).__name__ == "OptimizedModule"
            else module
        )
        own = {
            id(p): parameters[id(p)][0]
            for p in module._parameters.values()
            if p is not None and id(p) in parameters
        }
        everything = dict(own)
        children = []
        for name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                record, inside = build(child, f"{address}.{name}" if address else name, depth + 1)
                children.append(record)
                everything.update(inside)
        record = ModuleRecord(
            address=address,
            aliases=[
                name for name in names.get(id(module), []) if name not in (address, "_orig_mod")
            ],
            module_type=getattr(module, "original_name", None) or type(module).__name__,
            depth=depth,
            **_counts(everything, ""),
            **_counts(own, "own_"),
            children=children,
            calls=calls_of.get(address, []),
            warmup_steps=warmup,
            typical_steps=typical,
        )
        return record, everything

    return build(ledger.model, "", 0)[0]


def _counts(parameters: dict[int, ParameterRecord], prefix: str) -> dict[str, Any]:
    records = parameters.values()
    return {
        f"{prefix}num_parameters": sum(record.num_elements for record in records),
        f"{prefix}num_learnable": sum(
            record.num_elements for record in records if record.is_learnable
        ),
        f"{prefix}param_bytes": sum(record.num_bytes for record in records),
        f"{prefix}gradient_bytes": sum(record.gradient_bytes for record in records),
    }
