"""Collects the gradient of each entry during a later backward pass.

The gradient of an entry is what arrives at its node of autograd's graph. There are three special
cases. An in-place operation on a *view* adds a node to its base (`CopySlices`), so the view's
gradient is cut out of the base's. A view gets a new node when its base is written, and is hooked
again there; its parent views have a share in that gradient (`view_tree.py`). And inputs and
parameters may be part of other graphs and must not keep our hooks, so their gradients are collected
at the nodes that send them.
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
    """The Slice of an in-place write by `entry` to a view; None without a `CopySlices` node."""
    base = tensor._base if torch.is_grad_enabled() else None
    if base is None or base.grad_fn is None or type(base.grad_fn).__name__ != "CopySlices":
        return None
    return Slice(entry, before, base.grad_fn, region_of(tensor), region_of(base))


class Gradients(dict[int, torch.Tensor]):
    """Entry number → gradient, summed over backward passes; and the node runs of those passes.

    The hooks live as long as the graph and refer weakly to this object, which its history owns.
    """

    def __init__(self) -> None:
        super().__init__()
        # Parameter index → the gradient that the entries of this pass sent to it, summed likewise.
        self.parameters: dict[int, torch.Tensor] = {}
        # (backward pass, entry) in the order in which gradients arrived.
        self.arrivals: list[tuple[int, int]] = []
        # Number of a node → the entry that made it.
        self.owners: dict[int, int] = {}
        # Entries some of whose nodes may belong to other entries.
        self.uncertain: set[int] = set()
        # Whether there is a part that runs its own backward pass inside, out of sight; the passes
        # in which it was seen.
        self.has_checkpoint = False
        # The reasons why entries have no gradient although some arrived.
        self.missing: dict[int, str] = {}
        self.complete: set[int] = set()
        # Runs of nodes without an entry, in logged backward passes.
        self.outside: list[NodeRun] = []
        self.watch: BackwardWatch = TellingWatch(
            _weakly(self, "_before"), _weakly(self, "_after"), most=math.inf
        )
        # By node number: which gradients are collected, of those that it receives and those that it
        # sends.
        self._reaching: dict[int, list[tuple[int, int, Slice | Share | None]]] = {}
        self._sent: dict[int, list[tuple[int, list[int], Slice | Share | None]]] = {}

    def clear(self) -> None:
        """Discards all gradients and runs; later backward passes are still collected."""
        super().clear()
        self.parameters.clear()
        self.arrivals.clear()
        self.watch.runs.clear()
        self.outside.clear()
        self.complete.clear()

    def collect_reaching(
        self, number: int, output: int, entry: int, part: Slice | Share | None = None
    ) -> None:
        """Collects the gradient at output `output` of node `number`, or its `part`, for `entry`."""
        self._reaching.setdefault(number, []).append((output, entry, part))

    def forget_reaching(self, entry: int) -> None:
        """Stops collecting for `entry`, which has another node now."""
        for number, collected in self._reaching.items():
            self._reaching[number] = [each for each in collected if each[1] != entry]

    def collect_sent(
        self, number: int, position: int, targets: list[int], part: Slice | Share | None = None
    ) -> None:
        """Collects what node `number` sends at `position`, or its `part`, for `targets`."""
        self._sent.setdefault(number, []).append((position, targets, part))

    def collect(self, number: int, output: int, gradient: torch.Tensor, task: int) -> None:
        """Adds a gradient that reached node `number` in backward pass `task`, though the node did
        not run.
        """
        for own_output, entry, part in reversed(self._reaching.get(number, ())):
            if own_output == output:
                self.add(entry, gradient, part, task)

    def _before(self, info: NodeInfo, gradients: tuple[Any, ...]) -> None:
        # In reverse order: an output comes before the operation that made it.
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
        # Cloned, because autograd may accumulate in place into the tensor it passes to hooks.
        held[key] = copy_of(gradient) if known is None else known + gradient
        if target >= 0:
            self.arrivals.append(
                (torch._C._current_graph_task_id() if task is None else task, target)
            )


class TellingWatch(BackwardWatch):
    """A watch that warns immediately, because its `failures` are not read."""

    def _fail(self, error: Exception, info: NodeInfo) -> None:
        super()._fail(error, info)
        warnings.warn(f"A gradient could not be recorded. {self.failures[-1]}", stacklevel=2)


def _weakly(owner: Any, method: str) -> Callable[[NodeInfo, tuple[Any, ...]], None]:
    """A call of a method of `owner` that does not keep `owner` alive."""
    reference = weakref.ref(owner)

    def call(info: NodeInfo, gradients: tuple[Any, ...]) -> None:
        known = reference()
        if known is not None:
            getattr(known, method)(info, gradients)

    return call


class GradientHooks:
    """Hooks the nodes of entries, and assigns nodes to entries for `gradients`."""

    def __init__(self, first_sequence: int = 0) -> None:
        self.gradients = Gradients()
        self.views = ViewTree()
        self.gradients.missing = self.views.missing
        # Nodes with lower numbers existed before the pass.
        self._first_sequence = first_sequence
        # Nodes with lower numbers are watched, but belong to entries unknown here.
        self.owning_from = 0
        # Targets where the pass ends (an entry, or -1 - k for parameter k), by `id` of the leaf, or
        # by (`id` of the node, output). Nodes are kept alive so that their ids stay unique.
        self._leaves: dict[int, list[int]] = {}
        self._ends: dict[tuple[int, int], list[int]] = {}
        self._end_nodes: list[Any] = []
        # For each view entry, the watched node.
        self._view_nodes: dict[int, Any] = {}
        # Entries that wrote to a view.
        self._written_views: set[int] = set()

    def admit_threads(self) -> None:
        """Accepts nodes with any number, because each thread counts from 0."""
        self._first_sequence = 0

    def watch_source(self, target: int, tensor: torch.Tensor) -> None:
        """Collects the gradient of a tensor that existed before the pass."""
        if tensor.requires_grad:
            node = node_of(tensor)
            if node is None:
                self._leaves.setdefault(id(tensor), []).append(target)
            else:
                self.watch_end(target, node, tensor.output_nr)

    def watch_end(self, target: int, node: Any, output: int) -> None:
        """Collects the gradient at a node that existed before the pass."""
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
        """Collects the gradient at `node` for `entry`."""
        at_end = self._targets_at(node, output)
        if at_end is not None:  # an input, handed on as it was
            at_end.append(entry)
            return
        self._own_nodes(entry, node)
        number = self.gradients.watch.number_of(node)
        if number is not None:
            self.gradients.collect_reaching(number, output, entry)

    def watch_again(self, entry: int, tensor: torch.Tensor, time: int) -> None:
        """Hooks the new node of a view whose base was written, before entry `time` reads it."""
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
        """Collects the gradients of a view written in place, after and before the write."""
        self._own_nodes(part.entry, part.node)
        number = self.gradients.watch.number_of(part.node)
        if number is not None:
            part = part._replace(node=None)  # hooks must not keep their node alive
            self.gradients.collect_reaching(number, 0, part.entry, part)
            # The result of an earlier write to a view already gets all that reaches its base.
            is_collected = part.before in self._written_views
            self._written_views.add(part.entry)
            if part.before is not None and part.before >= 0 and not is_collected:
                for share in self.views.shares(part.before, part.entry, part):
                    self.gradients.collect_sent(number, 0, [share.entry], share)

    def note_written_together(self, entry: int, read: Iterable[int]) -> None:
        """Marks `entry`, one of several views written by one call, and the views it `read`."""
        known = [each for each in read if self.views.is_view(each) or each in self._written_views]
        for each in (entry, *known):
            self.views.note_written_together(each)
        self._written_views.add(entry)

    def _targets_at(self, node: Any, output: int) -> list[int] | None:
        if sequence_of(node) < 0:
            return self._leaves.get(id(node.variable))
        return self._ends.get((id(node), output)) if self._ends else None

    def _own_nodes(self, entry: int, node: Any) -> None:
        """Assigns unowned nodes below `node` to the entry, and collects what they send to ends."""
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
