"""Collecting the gradient of each entry during a later backward pass.

The gradient of an entry is what arrives at the node of autograd's graph that made it. Three cases
need more. The tensor of an in-place operation on a *view* is not on autograd's path: the base is
(torch calls the node `CopySlices`), so the gradient is cut out of the base's. A view is given a new
node when its base is written, and is watched there anew; views that it was made from have their
share in it (`view_tree.py`). And inputs and parameters belong to the user: they may be part of
other graphs and must not keep a hook of ours, so what arrives at them is collected at the nodes
that send it.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchlens._capture.gradients.backward_hooks import (
    BackwardWatch,
    NodeInfo,
    NodeRun,
    node_of,
    sequence_of,
)
from torchlens._recording.regions import region_of
from torchlens._recording.view_tree import Share, Slice, ViewTree
from torchlens._recording.wrappers import copy_of


def slice_written(entry: int, tensor: torch.Tensor, before: int | None) -> Slice | None:
    """What autograd made of entry `entry` having written to `tensor`, if that is a view. Under
    no_grad it made nothing.
    """
    base = tensor._base if torch.is_grad_enabled() else None
    if base is None or base.grad_fn is None or type(base.grad_fn).__name__ != "CopySlices":
        return None
    return Slice(entry, before, base.grad_fn, region_of(tensor), region_of(base))


class Gradients(dict[int, torch.Tensor]):
    """Entry number → gradient, summed over the backward passes through it; the runs of the nodes
    that were in them.

    The hooks, which live as long as the graph does, know it only weakly: it is gone when its
    history is.
    """

    def __init__(self) -> None:
        super().__init__()
        # Number of a parameter → what the entries of this pass sent to it, summed likewise.
        self.parameters: dict[int, torch.Tensor] = {}
        # (backward pass, entry) in the order in which gradients arrived.
        self.arrivals: list[tuple[int, int]] = []
        # Number of a node → the entry that made it.
        self.owners: dict[int, int] = {}
        # Entries of which not every node is known for certain to be theirs.
        self.uncertain: set[int] = set()
        # Whether there is a part that runs its own backward pass inside, out of sight; the passes
        # in which it was seen.
        self.has_checkpoint = False
        # Why entries have no gradient although some arrived.
        self.missing: dict[int, str] = {}
        self.complete: set[int] = set()
        # Runs of nodes that no entry made, in the backward passes that were logged as such.
        self.outside: list[NodeRun] = []
        self.watch: BackwardWatch = TellingWatch(
            _weakly(self, "_before"), _weakly(self, "_after"), most=math.inf
        )
        # By number of the node: which of the gradients that reach it are collected, and of those
        # that it sends on.
        self._reaching: dict[int, list[tuple[int, int, Slice | Share | None]]] = {}
        self._sent: dict[int, list[tuple[int, list[int], Slice | Share | None]]] = {}

    def clear(self) -> None:
        """Forgets all gradients and runs. Those of later backward passes are collected
        nevertheless.
        """
        super().clear()
        self.parameters.clear()
        self.arrivals.clear()
        self.watch.runs.clear()
        self.outside.clear()
        self.complete.clear()

    def collect_reaching(
        self, number: int, output: int, entry: int, part: Slice | Share | None = None
    ) -> None:
        """What reaches output `output` of node `number`, or part of it, is the gradient of
        `entry`.
        """
        self._reaching.setdefault(number, []).append((output, entry, part))

    def forget_reaching(self, entry: int) -> None:
        """Nothing that was said to be the gradient of `entry` is: it has another place in
        autograd's graph now.
        """
        for number, collected in self._reaching.items():
            self._reaching[number] = [each for each in collected if each[1] != entry]

    def collect_sent(
        self, number: int, position: int, targets: list[int], part: Slice | Share | None = None
    ) -> None:
        """What node `number` sends to the node at `position`, or part of it, is sent to
        `targets`.
        """
        self._sent.setdefault(number, []).append((position, targets, part))

    def collect(self, number: int, output: int, gradient: torch.Tensor, task: int) -> None:
        """Takes a gradient that came as far as node `number`, which did not run, in backward pass
        `task`.
        """
        for own_output, entry, part in reversed(self._reaching.get(number, ())):
            if own_output == output:
                self.add(entry, gradient, part, task)

    def _before(self, info: NodeInfo, gradients: tuple[Any, ...]) -> None:
        # Last made, first collected: an output comes before the operation that made it.
        for output, entry, part in reversed(self._reaching.get(info.number, ())):
            self.add(entry, gradients[output], part)

    def _after(self, info: NodeInfo, gradients: tuple[Any, ...]) -> None:
        for position, targets, part in self._sent.get(info.number, ()):
            for target in targets:
                self.add(target, gradients[position], part)

    def add(
        self, target: int, gradient: Any, part: Slice | Share | None = None, task: int | None = None
    ) -> None:
        """Adds to the gradient of `target`: an entry, or -1 - k for parameter k."""
        if gradient is None or target in self.missing:
            return
        gradient = gradient.detach()
        if part is not None:
            gradient = part.cut(gradient)
        held, key = (self, target) if target >= 0 else (self.parameters, -1 - target)
        known = held.get(key)
        # Cloned: autograd may go on to add into the very tensor it hands to hooks.
        held[key] = copy_of(gradient) if known is None else known + gradient
        if target >= 0:
            self.arrivals.append(
                (torch._C._current_graph_task_id() if task is None else task, target)
            )


class TellingWatch(BackwardWatch):
    """The failures of this one are read nowhere, so it warns at once of what is missing."""

    def _fail(self, error: Exception, info: NodeInfo) -> None:
        super()._fail(error, info)
        warnings.warn(f"A gradient could not be recorded. {self.failures[-1]}", stacklevel=2)


def _weakly(owner: Any, method: str) -> Callable[[NodeInfo, tuple[Any, ...]], None]:
    """A method of `owner`, which is not kept alive."""
    reference = weakref.ref(owner)

    def call(info: NodeInfo, gradients: tuple[Any, ...]) -> None:
        known = reference()
        if known is not None:
            getattr(known, method)(info, gradients)

    return call


class GradientHooks:
    """Tells `gradients` which entry each node belongs to."""

    def __init__(self, first_sequence: int = 0) -> None:
        self.gradients = Gradients()
        self.views = ViewTree()
        self.gradients.missing = self.views.missing
        # Nodes with lower numbers existed before the pass.
        self._first_sequence = first_sequence
        # Nodes with lower numbers are watched, but belong to entries that are not known here.
        self.owning_from = 0
        # Where the pass ends: targets (an entry, or -1 - k for parameter k) by `id` of the leaf, or
        # by (`id` of the node, output). The nodes are kept so that their ids stay theirs.
        self._leaves: dict[int, list[int]] = {}
        self._ends: dict[tuple[int, int], list[int]] = {}
        self._end_nodes: list[Any] = []
        # For each entry that is a view, the node that was watched.
        self._view_nodes: dict[int, Any] = {}
        # Entries that wrote to a view.
        self._written_views: set[int] = set()

    def admit_threads(self) -> None:
        """Takes nodes of every number for the pass's own: each thread counts for itself, from 0."""
        self._first_sequence = 0

    def watch_source(self, target: int, tensor: torch.Tensor) -> None:
        """Collects what arrives at a tensor that existed before the pass."""
        if tensor.requires_grad:
            node = node_of(tensor)
            if node is None:
                self._leaves.setdefault(id(tensor), []).append(target)
            else:
                self.watch_end(target, node, tensor.output_nr)

    def watch_end(self, target: int, node: Any, output: int) -> None:
        """Collects what arrives at a node that existed before the pass."""
        if sequence_of(node) < 0:
            self._leaves.setdefault(id(node.variable), []).append(target)
        else:
            self._end_nodes.append(node)
            self._ends.setdefault((id(node), output), []).append(target)

    def watch(self, entry: int, tensor: torch.Tensor) -> None:
        """Collects the gradient of `tensor`, which entry `entry` made."""
        if not tensor.requires_grad:
            return
        node = node_of(tensor)
        if node is not None:
            self.watch_at(entry, node, tensor.output_nr)
            if tensor._is_view():
                self._view_nodes[entry] = node
        elif id(tensor) in self._leaves:  # an input, handed on as it was
            self._leaves[id(tensor)].append(entry)

    def watch_at(self, entry: int, node: Any, output: int) -> None:
        """Collects what reaches `node` as the gradient of `entry`, which made it."""
        at_end = self._targets_at(node, output)
        if at_end is not None:  # an input, handed on as it was
            at_end.append(entry)
            return
        self._own_nodes(entry, node)
        number = self.gradients.watch.number_of(node)
        if number is not None:
            self.gradients.collect_reaching(number, output, entry)

    def watch_again(self, entry: int, tensor: torch.Tensor, time: int) -> None:
        """Before a view is read by entry `time`: watches it where it now stands, if its base was
        written since.
        """
        last, node = self._view_nodes.get(entry), node_of(tensor)
        if last is None or node is None or node is last:
            return
        self._view_nodes[entry] = node
        self._own_nodes(entry, node)
        number = self.gradients.watch.number_of(node)
        if number is not None:
            for share in self.views.shares(entry, time):
                self.gradients.collect_reaching(number, tensor.output_nr, share.entry, share)

    def watch_write(self, part: Slice) -> None:
        """Collects the gradients of a view that was written in place, and of what it was until
        then.
        """
        self._own_nodes(part.entry, part.node)
        number = self.gradients.watch.number_of(part.node)
        if number is not None:
            part = part._replace(node=None)  # a node must not be kept by its own hooks
            self.gradients.collect_reaching(number, 0, part.entry, part)
            # What was itself written as a view gets all that reaches its base.
            is_collected = part.before in self._written_views
            self._written_views.add(part.entry)
            if part.before is not None and part.before >= 0 and not is_collected:
                for share in self.views.shares(part.before, part.entry, part):
                    self.gradients.collect_sent(number, 0, [share.entry], share)

    def note_written_together(self, entry: int, read: Iterable[int]) -> None:
        """Entry `entry` is one of several views that one call wrote to, having read `read`."""
        known = [each for each in read if self.views.is_view(each) or each in self._written_views]
        for each in (entry, *known):
            self.views.note_written_together(each)
        self._written_views.add(entry)

    def _targets_at(self, node: Any, output: int) -> list[int] | None:
        if sequence_of(node) < 0:
            return self._leaves.get(id(node.variable))
        return self._ends.get((id(node), output)) if self._ends else None

    def _own_nodes(self, entry: int, node: Any) -> None:
        """The nodes from `node` on without an owner are the entry's; what they send to ends of the
        pass is collected.
        """
        gradients, pending = self.gradients, [node]
        while pending:
            node = pending.pop()
            sequence = sequence_of(node)
            number = gradients.watch.watch_node(node) if sequence >= self._first_sequence else None
            if number is None:
                continue
            if sequence >= self.owning_from:
                gradients.owners[number] = entry
            if type(node).__name__ == "CheckpointFunctionBackward":
                gradients.has_checkpoint = True
            for position, (below, output) in enumerate(node.next_functions):
                if below is not None:
                    targets = self._targets_at(below, output)
                    if targets is None:
                        pending.append(below)
                    else:
                        gradients.collect_sent(number, position, targets)
