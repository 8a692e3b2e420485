"""Runs a backward pass and records it: gradients, times and order of the entries of a log."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from torchlens._capture.gradients.backward_hooks import (
    BackwardWatch,
    NodeInfo,
    NodeRun,
    node_of,
    sequence_of,
)
from torchlens._capture.gradients.entry_gradients import GradientHooks, Gradients, TellingWatch
from torchlens._graph.edges import entries_given
from torchlens._history.log import Log
from torchlens._recording.garbage_collector import without_collector
from torchlens._recording.operations import BUFFER, INPUT
from torchlens._recording.recording import Recording, Row
from torchlens._recording.view_tree import ViewTree
from torchlens._text.error_wording import got


def log_backward(
    log: Log,
    loss: torch.Tensor,
    gradient: torch.Tensor | None,
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Any,
    has_transform: bool,
) -> None:
    """Runs `loss.backward(...)` and records it in the log."""
    _check_loss(loss, log)
    gradients = _recorded_gradients(log.recording, has_transform)
    outside = BackwardWatch(most=math.inf)
    hidden = _HiddenPasses(log.recording, gradients, outside)

    def run() -> None:
        if not _watch_outside(loss, gradients, outside, hidden):
            raise ValueError(
                "The loss does not lead back to this forward pass; a later call of the model is a "
                "different pass. Compute it from saved tensors, like "
                f"history[{_output_label(log)!r}].tensor_contents. If it was computed from tensors "
                "that are not saved, log with save_gradients=True."
            )
        ends = (
            [inputs] if isinstance(inputs, torch.Tensor | GradientEdge) else inputs and list(inputs)
        )
        _run(
            partial(loss.backward, gradient, retain_graph, create_graph, ends),
            gradients,
            ends or [],
        )

    def stop() -> None:
        hidden.stop()
        outside.stop()

    try:
        without_collector(run, may_have_garbage=True)
    finally:
        try:
            stop()
        finally:  # again, because an interrupt may cut the first call short
            stop()
        gradients.outside.extend(outside.runs)


def _run(backward: Callable[[], None], gradients: Gradients, targets: Sequence[Any]) -> None:
    watch, num_runs = gradients.watch, len(gradients.watch.runs)
    ends = _Ends(gradients, targets)
    was_paused, watch.is_paused = watch.is_paused, False
    try:
        backward()
        ends.settle(watch.runs[num_runs:])
    finally:
        watch.is_paused = was_paused
        gradients.complete.update(run.task for run in watch.runs[num_runs:])
        ends.remove()


class _Ends:
    """The tensors of the log that are `inputs` of a backward pass: it ends before their nodes run,
    so hooks on the tensors collect their gradients.
    """

    def __init__(self, gradients: Gradients, targets: Sequence[Any]) -> None:
        self._gradients = gradients
        self._found: list[tuple[int, int, torch.Tensor, int]] = []
        self._handles = []
        for tensor in targets:
            node = node_of(tensor) if isinstance(tensor, torch.Tensor) else None
            number = None if node is None else gradients.watch.number_of(node)
            if number is not None:
                self._handles.append(
                    tensor.register_hook(partial(self._collect, number, tensor.output_nr))
                )

    def _collect(self, number: int, output: int, gradient: torch.Tensor) -> None:
        self._found.append((number, output, gradient, torch._C._current_graph_task_id()))

    def settle(self, runs: Sequence[NodeRun]) -> None:
        """After the pass: collects the gradients of the nodes that did not run."""
        ran = {run.number for run in runs}
        for number, output, gradient, task in self._found:
            if number not in ran:
                self._gradients.collect(number, output, gradient, task)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _HiddenPasses:
    """Backward passes that an autograd function runs inside this one, as a reentrant checkpoint
    does.

    Their nodes do not exist before the pass, so the gradients that they send to parameters are
    collected at the parameters.
    """

    def __init__(self, recording: Recording, gradients: Gradients, outside: BackwardWatch) -> None:
        self._gradients = gradients
        self._outside = outside
        self._numbers = {id(parameter): number for number, parameter in enumerate(recording.params)}
        self._params = [
            parameter
            for parameter in recording.params
            if parameter.requires_grad and parameter.is_leaf
        ]
        self._watch: BackwardWatch | None = None
        self._nodes: list[Any] = []  # kept alive, so that the inner passes use the same nodes
        self._num_runs = len(gradients.watch.runs)

    def begin(self) -> None:
        """Watches the parameters, when the graph may contain such a function."""
        if self._watch is None:
            self._watch = TellingWatch(before=self._collect)
            self._nodes = list(map(accumulating_node, self._params))
            for node in self._nodes:
                self._watch.watch_node(node)

    def _collect(self, info: NodeInfo, gradients: tuple[Any, ...]) -> None:
        # The first node that ran, usually that of the loss, belongs to the outer pass.
        runs = (
            self._outside.runs[:1]
            or self._gradients.watch.runs[self._num_runs : self._num_runs + 1]
        )
        is_outer = bool(runs) and runs[0].task == torch._C._current_graph_task_id()
        if not is_outer and info.parameter is not None and gradients[0] is not None:
            self._gradients.add(-1 - self._numbers[info.parameter], gradients[0])

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None


def _check_loss(loss: Any, log: Log) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"loss must be a tensor, got {got(loss)}.")
    if log.recording.is_copy:
        raise ValueError(
            "This history was pickled or deep-copied, and its tensors are no longer part of an "
            "autograd graph. Call log_backward on the history that log_forward_pass returned, "
            "before copying it."
        )
    if not any(row.gradfunc is not None for row in log.recording.rows):
        raise ValueError(
            "Nothing in this log has a gradient: the forward pass ran under torch.no_grad() or "
            "torch.inference_mode(), or neither the model's parameters nor its inputs require one. "
            "Log it again with gradients enabled."
        )
    if not loss.requires_grad:
        raise ValueError(
            "The loss requires no gradient: it was computed under torch.no_grad(), or from "
            f"detached tensors. Compute it from history[{_output_label(log)!r}].tensor_contents, "
            "with gradients enabled, and log without detach_saved_tensors=True."
        )


def _output_label(log: Log) -> str:
    return log.label(log.graph.outputs[0]) if log.graph.outputs else log.label(log.visible[-1])


def _recorded_gradients(recording: Recording, has_transform: bool) -> Gradients:
    """The gradients of a log, which without `save_gradients=True` are made now."""
    if isinstance(recording.gradients, Gradients):
        return recording.gradients
    if has_transform or not any(isinstance(value, torch.Tensor) for value in recording.values):
        reason = (
            "Its saved tensors are not those that the model computed with (activation_postfunc, "
            "output_device or detach_saved_tensors)."
            if has_transform
            else "It has no saved tensors."
        )
        raise ValueError(
            f"This log cannot follow a backward pass. {reason} Log with save_gradients=True."
        )
    gradients = without_collector(partial(gradients_of_saved, recording))
    recording.gradients = gradients
    return gradients


def _watch_outside(
    loss: torch.Tensor, gradients: Gradients, outside: BackwardWatch, hidden: _HiddenPasses
) -> bool:
    """Watches the nodes between `loss` and the log; returns whether `loss` leads to the log."""
    is_inside = False
    pending = [node_of(loss)]
    seen: dict[int, Any] = {}
    while pending:
        node = pending.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        if isinstance(node, BackwardCFunction):
            hidden.begin()
        if gradients.watch.number_of(node) is None:
            outside.watch_node(node)
        else:
            is_inside = True
        pending.extend([below for below, _ in node.next_functions])
    return is_inside


# -- finding the nodes of an ordinary log ----------------------------------------------------------
#
# A saved value is the tensor that an entry made, or a copy of it taken before it changed: both lead
# to the node. If memory was written in place and has several views, the tensor may lead to another
# node; such entries are left out.


def gradients_of_saved(recording: Recording) -> Gradients:
    """Watches every entry whose node can be found; returns their gradients, paused."""
    hooks = GradientHooks()
    hooks.gradients.watch.is_paused = True
    for number, parameter in enumerate(recording.params):
        hooks.watch_source(-1 - number, parameter)
    for number, stand_in in recording.param_stand_ins:
        hooks.watch_source(-1 - number, stand_in)
    if recording.writes:
        _add_views(recording, hooks.views)
    _watch_entries(recording, hooks)
    return hooks.gradients


def _watch_entries(recording: Recording, hooks: GradientHooks) -> None:
    slices = {part.entry: part for part in recording.slices}
    owners, found = hooks.gradients.owners, set[int]()
    has_gap = False  # whether an entry was not found since the last one that was
    for number, row in enumerate(recording.rows):
        if number in recording.hidden_writes and row.output_index is not None:
            hooks.note_written_together(number, entries_given(row))
        part = slices.get(number)
        node, output = _place_of(recording, number, row) if part is None else (part.node, 0)
        if node is None:
            has_gap = _note_not_found(row, number, hooks) or has_gap
            continue
        found.add(number)
        if row.operation in (INPUT, BUFFER):
            hooks.watch_end(number, node, output)
            continue
        num_owned = len(owners)
        if part is None:
            hooks.watch_at(number, node, output)
        else:
            hooks.watch_write(part if part.before in found else part._replace(before=None))
        if has_gap and len(owners) > num_owned + 1:
            hooks.gradients.uncertain.add(number)
        has_gap = False
        if not recording.branches:  # each thread numbers its own nodes
            hooks.owning_from = max(hooks.owning_from, sequence_of(node) + 1)


def _note_not_found(row: Row, number: int, hooks: GradientHooks) -> bool:
    """Notes that the node of an entry cannot be found; whether it has one."""
    if row.gradfunc is None:
        return False
    if hooks.views.is_view(number):
        hooks.views.note_lost(number)
    return True


def _place_of(recording: Recording, number: int, row: Row) -> tuple[Any, int]:
    """The node that made a saved value, and which of its outputs it is; None if not found."""
    value = recording.values[number]
    if number in recording.hidden_writes or not isinstance(value, torch.Tensor):
        return None, 0
    if not value.requires_grad:
        return None, 0
    node, output = node_of(value), value.output_nr
    if node is None:
        node, output = accumulating_node(value), 0
    elif number in recording.copies:
        node, output = node.next_functions[0]
    if node is None or (sequence_of(node) >= 0 and type(node).__name__ != row.gradfunc):
        return None, 0
    return node, output


def accumulating_node(leaf: torch.Tensor) -> Any:
    """The node that accumulates the gradient of a leaf; only a node that reads the leaf leads to
    it.
    """
    with torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _add_views(recording: Recording, views: ViewTree) -> None:
    """Adds the entries that are views, and the reads of them that cannot be watched: autograd gives
    a view that is read after its memory was written another node, which cannot be found.
    """
    for write in recording.writes:
        views.note_write(write.entry, write.storage, write.region)
    writers = {(write.entry, write.storage) for write in recording.writes}
    known = _known_storages(recording)
    for number, row in enumerate(recording.rows):
        storage, region = recording.storages[number], recording.regions.get(number)
        is_writer = (number, storage) in writers
        on_same = [read for read in entries_given(row) if recording.storages[read] == storage]
        # A write through the view itself is collected at its base.
        collected = on_same if is_writer else []
        for read in set(entries_given(row)).difference(collected):
            if views.is_view(read) and views.is_written_between(read, number):
                views.note_missed_read(read, number)
        if region is not None and storage in known and not is_writer:
            views.add(number, on_same[0] if on_same else None, storage, region)
        known.add(storage)


def _known_storages(recording: Recording) -> set[int]:
    """The storages that existed before the first entry on them."""
    unknown = [part.entry for part in recording.slices if not part.is_base_known]
    return {*recording.outside_storages.values(), *(recording.storages[entry] for entry in unknown)}
