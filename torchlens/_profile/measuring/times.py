"""How long each call took without us: what the clocks saw, less what looking took of it.

Much of what a log takes no clock of ours sees, and what is taken off for it is an estimate. Where
there are steps of the same kind that were watched for their times alone, those tell: the calls of
the others are charged so that they agree.

Times add up: a call takes as long as what it does itself and the calls inside it, forward and
backward.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torchlens._capture.own_time import SHORT
from torchlens._profile.measuring.calibration import Residuals
from torchlens._profile.measuring.calls import Call
from torchlens._profile.measuring.operations import Operation
from torchlens._profile.steps import StepRecord, TypicalSteps, by_kind

# What was measured in a detailed step tells how calls differ. Not where the estimate was as far off
# as this.
_MOST_FACTOR = 4.0
# Cold caches made a timed step longer by at most such a share of a module's time, on every model
# that was tried. So no more is taken off: of a module that takes next to nothing, something is
# left.
_MOST_COLD = 0.25


class CallTimes(NamedTuple):
    """Seconds of one call."""

    forward: float
    forward_self: float
    backward: float
    backward_self: float
    own: float  # what looking took of the forward time, which is not in it
    estimated: float  # how much of that no clock saw, and is a matter of numbers and averages
    backward_estimated: float  # as much is not in the backward time


def call_times(calls: Sequence[Call], by_grad: Mapping[bool, Residuals]) -> list[CallTimes]:
    """Of all calls of a profile, in their order; with residuals of steps with gradients (True) and
    without.
    """
    inside_forward = [0.0] * len(calls)
    inside_backward = [0.0] * len(calls)
    estimated_backward = [0.0] * len(calls)
    found: list[CallTimes] = []
    for call in reversed(calls):  # those inside a call come after it
        residuals = by_grad[call.step.has_grad]
        span = max(call.end - call.start, 0.0)
        estimated = _unseen(call, residuals)
        if not call.step.has_log:
            cold = (1 + 2 * call.clock.num_modules) * max(
                residuals.timed_module - residuals.module, 0.0
            )
            estimated += min(cold, _MOST_COLD * max(span - call.clock.own_seconds - estimated, 0.0))
        inside = inside_forward[call.index]
        forward = max(span - call.clock.own_seconds - estimated, inside, 0.0)
        backward_estimated = min(_unseen_in_backward(call, residuals), call.backward_self or 0.0)
        backward_self = (call.backward_self or 0.0) - backward_estimated
        backward = backward_self + inside_backward[call.index]
        backward_estimated += estimated_backward[call.index]
        own = max(span - forward, 0.0)
        estimated = min(estimated, own)
        found.append(
            CallTimes(
                forward,
                forward - inside,
                backward,
                backward_self,
                own,
                estimated,
                backward_estimated,
            )
        )
        parent = _adds_to(call)
        if parent is not None:
            inside_forward[parent.index] += forward
            inside_backward[parent.index] += backward
            estimated_backward[parent.index] += backward_estimated
    return found[::-1]


def _adds_to(call: Call) -> Call | None:
    """The call around it, but not for what is done once more."""
    parent = call.parent
    return (
        parent
        if parent is not None and (call.original is None) == (parent.original is None)
        else None
    )


def agreeing_times(
    calls: Sequence[Call], times: Sequence[CallTimes], steps: Sequence[StepRecord]
) -> list[CallTimes]:
    """The same, those of detailed steps charged so that they agree with steps of their kind that
    were timed.

    `steps` are those that count. What a module does itself in one of its calls takes as long on
    average, forward and backward; how that differs from step to step stays. No call is charged with
    more than it took with us: then it is the timed step that was disturbed.
    """
    forward = [each.forward_self for each in times]
    backward = [each.backward_self for each in times]
    spans = [max(call.end - call.start, 0.0) for call in calls]
    for call in calls:
        if call.parent is not None:
            spans[call.parent.index] -= max(call.end - call.start, 0.0)
    for alike in by_kind(list(steps)).values():
        typical = TypicalSteps.of(alike)
        detailed = {step.number for step in alike} - typical.timed
        if detailed:
            own = [call for call in calls if call.original is None]
            _bring_together(forward, own, typical.forward, detailed, spans)
            have_backward = [call for call in own if call.backward_self is not None]
            _bring_together(
                backward,
                have_backward,
                typical.backward,
                detailed,
                [call.backward_self or 0.0 for call in calls],
            )
    whole_forward, whole_backward = _added_up(calls, forward), _added_up(calls, backward)
    return [
        before._replace(
            forward=whole_forward[index],
            forward_self=forward[index],
            backward=whole_backward[index],
            backward_self=backward[index],
            own=max(before.own + before.forward - whole_forward[index], 0.0),
        )
        for index, before in enumerate(times)
    ]


def _added_up(calls: Sequence[Call], seconds: Sequence[float]) -> list[float]:
    """What calls take, of what each does itself."""
    found = list(seconds)
    for call in reversed(calls):  # those inside a call come after it
        parent = _adds_to(call)
        if parent is not None:
            found[parent.index] += found[call.index]
    return found


def _bring_together(
    seconds: list[float],
    calls: Sequence[Call],
    timed: Collection[int],
    detailed: Collection[int],
    most: Sequence[float],
) -> None:
    """Changes the seconds of calls in detailed steps so that their mean is that of the same calls
    in timed ones.

    `most` is what each call, by its index, took at most.
    """
    means = _means(seconds, [call for call in calls if call.step.number in timed])
    in_detail = [call for call in calls if call.step.number in detailed]
    before = _means(seconds, in_detail)
    for call in in_detail:
        key = call.address, call.pass_num
        mean = means.get(key)
        if mean is not None:
            factor = mean / before[key] if before[key] else 0.0
            is_near = 1 / _MOST_FACTOR <= factor <= _MOST_FACTOR
            charged = seconds[call.index] * factor if is_near else mean
            seconds[call.index] = min(charged, max(most[call.index], seconds[call.index]))


def _means(seconds: Sequence[float], calls: Sequence[Call]) -> dict[tuple[str, int], float]:
    """By address and pass."""
    found: dict[tuple[str, int], list[float]] = {}
    for call in calls:
        found.setdefault((call.address, call.pass_num), []).append(seconds[call.index])
    return {key: sum(values) / len(values) for key, values in found.items()}


def operation_times(
    operations: Sequence[Operation], times: Sequence[CallTimes], by_grad: Mapping[bool, Residuals]
) -> list[float]:
    """Forward seconds of operations. All those of one call take no longer than the call does by
    itself.
    """
    found: list[float] = []
    sums: dict[int, float] = {}
    for operation in operations:
        residuals = by_grad[operation.step.has_grad]
        unseen = (
            min(operation.seconds, SHORT) * residuals.cold_share
            + operation.num_events * residuals.event
        )
        seconds = max(operation.seconds - unseen, 0.0)
        found.append(seconds)
        sums[operation.mark.call] = sums.get(operation.mark.call, 0.0) + seconds
    scales = {
        call: min(times[call].forward_self / total, 1.0) for call, total in sums.items() if total
    }
    return [
        seconds * scales.get(operation.mark.call, 1.0) for operation, seconds in zip(operations,
        found, strict=True)
    ]  # fmt: skip


def backward_operation_times(
    operations: Sequence[Operation], calls: Sequence[Call], times: Sequence[CallTimes]
) -> list[float | None]:
    """Backward seconds of operations, less their share of what is taken off their call's."""
    owners = [
        calls[operation.mark.call].original or calls[operation.mark.call]
        for operation in operations
    ]
    sums: dict[int, float] = {}
    for operation, call in zip(operations, owners, strict=True):
        sums[call.index] = sums.get(call.index, 0.0) + (operation.backward_seconds or 0.0)
    seen = {index: max(calls[index].backward_self or 0.0, total) for index, total in sums.items()}
    return [
        seconds * times[call.index].backward_self / seen[call.index]
        if (seconds := operation.backward_seconds)
        else seconds
        for operation, call in zip(operations, owners, strict=True)
    ]


def _unseen(call: Call, residuals: Residuals) -> float:
    clock = call.clock
    by_number = (
        clock.num_operations * residuals.operation
        + clock.coldness * residuals.cold_operation
        + clock.num_cells * residuals.cell
        + clock.num_reads * residuals.read
    )
    return (
        residuals.module
        + clock.num_modules * (residuals.module + residuals.module_around)
        + by_number * residuals.pace_of(clock.handling_seconds, clock.num_plain)
        + clock.short_seconds * residuals.short_operation_share
        + call.num_events * residuals.event
    )


def _unseen_in_backward(call: Call, residuals: Residuals) -> float:
    return (
        call.num_nodes * residuals.node
        + call.short_node_seconds * residuals.short_node_share
        + call.node_coldness * residuals.cold_node
    )
