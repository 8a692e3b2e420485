"""The recorded backward passes through a log."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from torchlens._capture.gradients.backward_hooks import NodeRun
from torchlens._capture.gradients.entry_gradients import Gradients
from torchlens._history.log import Log


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """One backward pass: the layers it reached, in order, and the time of each."""

    number: int
    seconds: float  # from the start of the log's first node to the end of its last
    num_nodes: int
    layer_seconds: dict[str, float]
    layer_order: list[str]
    # Names of autograd's nodes outside the model, and how often each ran. None unless the pass was
    # run by `log_backward`.
    nodes_outside: dict[str, int] | None = None
    seconds_outside: float | None = None

    def __str__(self) -> str:
        text = (
            f"Backward pass {self.number}: {len(self.layer_order)} layers, {self.num_nodes} nodes, "
            f"{self.seconds:.3g} s"
        )
        if self.nodes_outside is not None:
            text += (
                f"; {sum(self.nodes_outside.values())} nodes outside the model, "
                f"{self.seconds_outside:.3g} s"
            )
        return text


@dataclass(frozen=True, slots=True)
class BackwardTimes:
    """By entry: its seconds, summed over all backward passes, and its place in the order of the
    last one.
    """

    seconds: dict[int, float]
    order: dict[int, int]


def backward_passes(log: Log) -> list[BackwardPass]:
    """The backward passes through the log, in order."""
    gradients = log.recording.gradients
    if not isinstance(gradients, Gradients):
        return []
    found = []
    orders, outside = _orders(log, gradients), _by_pass(gradients.outside)
    for number, (task, runs) in enumerate(_by_pass(gradients.watch.runs).items(), start=1):
        seconds = _call_seconds(log, gradients, runs)
        arrived = orders.get(task, [])
        made = BackwardPass(
            number=number,
            seconds=max(run.end for run in runs) - min(run.start for run in runs),
            num_nodes=len(runs),
            layer_seconds={
                log.label(entry): seconds[entry] for entry in arrived if entry in seconds
            },
            layer_order=log.labels(arrived),
        )
        found.append(_with_nodes_outside(made, outside[task]) if task in outside else made)
    return found


def _with_nodes_outside(made: BackwardPass, runs: list[NodeRun]) -> BackwardPass:
    return replace(
        made,
        nodes_outside=dict(Counter(run.name for run in runs)),
        seconds_outside=sum(run.end - run.start for run in runs),
    )


def backward_times(log: Log) -> BackwardTimes:
    """The backward times of all entries, computed once for each state of the recording."""
    gradients = log.recording.gradients
    found = BackwardTimes({}, {})
    if not isinstance(gradients, Gradients) or not gradients.watch.runs:
        return found
    state = (gradients.watch.runs[-1], len(gradients.watch.runs), len(gradients.arrivals))
    if log.backward_times is not None and log.backward_times[0] == state:
        known: BackwardTimes = log.backward_times[1]
        return known
    orders = _orders(log, gradients)
    for task, runs in _by_pass(gradients.watch.runs).items():
        own = _call_seconds(log, gradients, runs)
        for place, entry in enumerate(orders.get(task, ()), start=1):
            found.order[entry] = place
            if entry in own:
                found.seconds[entry] = found.seconds.get(entry, 0.0) + own[entry]
    log.backward_times = (state, found)
    return found


def parameter_gradients(log: Log) -> dict[int, torch.Tensor]:
    """By number of a parameter: the gradient that the entries of the log sent to it."""
    gradients = log.recording.gradients
    if not isinstance(gradients, Gradients):
        return {}
    if not gradients.has_checkpoint or all(
        run.task in gradients.complete for run in gradients.watch.runs
    ):
        return gradients.parameters
    # The gradients that a checkpoint sent to these parameters were not seen.
    hidden = {
        number
        for entry, own in enumerate(log.graph.params)
        if log.row(entry).gradfunc is None
        for number in own
    }
    return {
        number: gradient
        for number, gradient in gradients.parameters.items()
        if number not in hidden
    }


def _by_pass(runs: Iterable[NodeRun]) -> dict[int, list[NodeRun]]:
    found: dict[int, list[NodeRun]] = {}
    for run in runs:
        found.setdefault(run.task, []).append(run)
    return found


def _orders(log: Log, gradients: Gradients) -> dict[int, list[int]]:
    """For each pass, the entries in the order in which their gradients were complete."""
    entry_of = log.graph.entry_of
    found: dict[int, dict[int, None]] = {}
    for task, number in gradients.arrivals:
        arrived = found.setdefault(task, {})
        arrived.pop(number, None)  # a gradient that gets another part was not complete
        if number in entry_of:
            arrived[number] = None
    return {task: [entry_of[number] for number in arrived] for task, arrived in found.items()}


def _call_seconds(log: Log, gradients: Gradients, runs: Iterable[NodeRun]) -> dict[int, float]:
    """Seconds of each entry; all results of a call have those of the call. Entries whose nodes may
    belong to another entry are left out.
    """
    rows, entry_of = log.recording.rows, log.graph.entry_of
    of_call: dict[int, float] = {}
    for run in runs:
        owner = gradients.owners.get(run.number)
        if owner is not None:
            first = owner - (rows[owner].output_index or 0)
            of_call[first] = of_call.get(first, 0.0) + run.end - run.start
    return {
        entry: of_call.get(number - (rows[number].output_index or 0), 0.0)
        for number, entry in entry_of.items()
        if number not in gradients.uncertain
    }
