"""Records the nodes that run in a backward pass, by hooks on autograd's graph.

Nodes are numbered in the order in which the forward pass made them: `next_sequence` returns the
next number of this thread, so reading it before and after a call gives the nodes that the call
made. Each run of a node is recorded with its number, its time and its backward pass.

A hook refers only to a description of its node, and only the node owns it, so hooks do not keep the
graph alive.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch

# autograd's sequence number of the nodes that accumulate into the `.grad` of a leaf: they run
# first.
_NO_SEQUENCE = 2**64 - 1
_WATCHES = itertools.count()
# torch 2.13 frees a chain of nodes that Python has accessed recursively; some 45,000 of them
# overflow a stack of 8 MB.
MOST_WATCHED = 20_000
_TOO_MANY = (
    f"More than {MOST_WATCHED:,} nodes are waiting for a backward pass; what is beyond them is not "
    "watched."
)


class NodeInfo(NamedTuple):
    """The description of a node of autograd's graph."""

    sequence: int  # -1 for the node that accumulates the gradient of a leaf
    parameter: int | None  # `id` of that leaf
    name: str
    number: int  # its number among the nodes of this watch


class NodeRun(NamedTuple):
    """One run of a node, with times of `perf_counter`."""

    sequence: int
    parameter: int | None
    name: str
    start: float
    end: float
    number: int  # of the node, among those watched
    # autograd's number of the backward pass; nested backward passes have their own
    task: int
    own_start: float = 0.0  # `own_seconds` of the watch when the run began and ended
    own_end: float = 0.0

    @property
    def seconds(self) -> float:
        """The run time, without the time of other hooks of the watch."""
        return max(self.end - self.start - (self.own_end - self.own_start), 0.0)


# Called with a node and the gradients it receives (before it runs) or sends on (after).
Look = Callable[[NodeInfo, tuple[Any, ...]], None]


class BackwardWatch:
    """Records every run of the nodes it watches, in order, over any number of backward passes.

    `before` and `after` may read gradients, which does not count as the node's time: `own_seconds`
    is the total time of all hooks. Exceptions in them are added to `failures` and backward goes on,
    except those of types in `lets_through`, which propagate.

    >>> watch = BackwardWatch()
    >>> watch.watch([loss])
    >>> loss.backward()
    >>> watch.stop()
    >>> watch.runs[0].name
    """

    def __init__(
        self,
        before: Look | None = None,
        after: Look | None = None,
        lets_through: tuple[type[BaseException], ...] = (),
        most: float = MOST_WATCHED,
    ) -> None:
        self.runs: list[NodeRun] = []
        self.failures: list[str] = []
        # Numbers of nodes that skipped a gradient, as in a backward pass with `inputs=`.
        self.left_out: set[int] = set()
        self._before = before
        self._after = after
        # While True, nothing is recorded.
        self.is_paused = False
        self._lets_through = lets_through
        self._num_watched = 0
        self._most = most
        self.own_seconds = 0.0
        self._hooks: weakref.WeakSet[_Hooks] = weakref.WeakSet()
        # Nodes are marked with their number, since their Python objects are temporary.
        self._mark = f"torchlens_{next(_WATCHES)}"
        # The graph may outlive the watch, and accumulation nodes of parameters outlive the graph.
        weakref.finalize(self, _remove_all, self._hooks, self._mark).atexit = False

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Watches all nodes in the graph of these tensors that are not watched yet."""
        pending = [node for node in map(node_of, tensors) if node is not None]
        while pending:
            node = pending.pop()
            if self.watch_node(node) is not None:
                pending.extend([below for below, _ in node.next_functions if below is not None])

    def watch_node(self, node: Any) -> int | None:
        """Watches a node and returns its number; None if already watched, or at the limit."""
        metadata = node.metadata
        if self._mark in metadata:
            return None
        if len(self._hooks) >= self._most:
            if _TOO_MANY not in self.failures:
                self.failures.append(_TOO_MANY)
            return None
        number = metadata[self._mark] = self._num_watched
        self._num_watched += 1
        self._hooks.add(_Hooks(self, node, number, metadata))
        return number

    def number_of(self, node: Any) -> int | None:
        """The number of a node that is watched."""
        number: int | None = node.metadata.get(self._mark)
        return number

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Records nothing meanwhile."""
        was_paused, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was_paused

    def stop(self) -> None:
        """Removes every hook. May be called again."""
        _remove_all(self._hooks, self._mark)

    def _fail(self, error: Exception, info: NodeInfo) -> None:
        if isinstance(error, self._lets_through):
            raise error
        self.failures.append(f"{info.name}: {type(error).__name__}: {error}")


class _Hooks:
    """The two hooks of a node. They refer weakly to the watch, so they do not keep it alive."""

    __slots__ = (
        "__weakref__", "_handles", "_info", "_metadata", "_own_start", "_start", "_wanted",
        "_watch",
    )  # fmt: skip

    def __init__(
        self, watch: BackwardWatch, node: Any, number: int, metadata: dict[Any, Any]
    ) -> None:
        sequence = sequence_of(node)
        leaf = id(node.variable) if sequence < 0 else None
        self._info = NodeInfo(sequence, leaf, type(node).__name__, number)
        self._watch = weakref.ref(watch)
        self._metadata = metadata
        self._start = -1.0
        self._own_start = 0.0
        # Positions of the gradients that are sent to another node.
        self._wanted = [
            place for place, (below, _) in enumerate(node.next_functions) if below is not None
        ]
        self._handles = (node.register_prehook(self.before), node.register_hook(self.after))

    def before(self, grad_outputs: tuple[Any, ...]) -> None:
        enter = perf_counter()
        watch = self._watch()
        if watch is None or watch.is_paused:
            return
        if watch._before is not None:
            try:
                watch._before(self._info, grad_outputs)
            except Exception as error:  # recording must not break the user's backward pass
                watch._fail(error, self._info)
        self._start = perf_counter()
        watch.own_seconds += self._start - enter
        self._own_start = watch.own_seconds

    def after(self, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> None:
        end = perf_counter()
        watch = self._watch()
        # Below 0: watched while it was running.
        if watch is None or watch.is_paused or self._start < 0:
            return
        info = self._info
        task = torch._C._current_graph_task_id()
        run = NodeRun(
            *info[:3],
            self._start,
            end,
            info.number,
            task,
            self._own_start,
            watch.own_seconds,
        )
        watch.runs.append(run)
        if any(
            gradient is None and place in self._wanted for place, gradient in enumerate(grad_inputs)
        ):
            watch.left_out.add(info.sequence)
        self._start = -1.0
        if watch._after is not None:
            try:
                watch._after(info, grad_inputs)
            except Exception as error:  # as above
                watch._fail(error, info)
        watch.own_seconds += perf_counter() - end

    def remove(self, mark: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._metadata.pop(mark, None)


def _remove_all(hooks: "weakref.WeakSet[_Hooks]", mark: str) -> None:
    for pair in list(hooks):
        pair.remove(mark)
        hooks.discard(pair)


def next_sequence() -> int:
    """The sequence number of the next node of this thread."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def sequence_of(node: Any) -> int:
    """The sequence number of a node in its thread; -1 for the accumulation node of a leaf."""
    sequence: int = node._sequence_nr()
    return -1 if sequence == _NO_SEQUENCE else sequence


def node_of(tensor: torch.Tensor) -> Any:
    """The node that made a tensor; None if there is none or autograd cannot tell."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # one of several views of one call, whose base was written since
        return None
