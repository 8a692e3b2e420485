"""Logs threads that the model starts, and jobs it submits to a pool, in the same recording.

torch reports only calls of the thread that entered the mode. So each such thread or job, a branch,
gets its own recorder and tracker when it starts. They share the recording and write to it under a
lock, which is released while a call runs, since it may wait for another thread. Logs without
threads have no overhead: the first branch changes the classes of recorder and tracker.

The order of rows and module calls is the order of writing, which differs between runs. Each is
tagged with its branch; `order_module_calls` puts module calls in program order after the pass, and
the graph does so with rows. A thread that outlives the pass is not logged from then on. Pool
threads are not logged outside their jobs: they may work for other code and outlive the log.
"""

import copy
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import thread as futures
from dataclasses import replace
from functools import partial
from multiprocessing import pool
from typing import Any

import torch

from torchlens._capture.current import CURRENT
from torchlens._capture.memory.saved_values import Memory
from torchlens._capture.model_parts import Parts
from torchlens._capture.module_tracker import ModuleTracker
from torchlens._capture.observer import ObservedCall
from torchlens._capture.patches.mode_stack import push_mode, remove_mode, run_overridden
from torchlens._capture.patches.torch_patches import Patch
from torchlens._capture.recorder import Recorder
from torchlens._recording.operations import KNOWN_OPERATIONS, Kind, Operation
from torchlens._recording.recording import Branch, MadeCall, in_program_order


class _Over(BaseException):
    """The pass ended while a call ran in another thread; its result is not recorded."""

    def __init__(self, result: Any) -> None:
        self.result = result


class _Threads:
    """The state that the branches of one log share; branch 0 is the thread of the log."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_over = False
        self.rows: list[Branch] = []
        self.module_calls: list[Branch] = []
        self.live: set[ModuleTracker] = set()  # trackers of running or pending threads


class _Pending(threading.local):
    """The call that the recorder of the current thread is about to make."""

    threads: _Threads
    func: Callable[..., Any]


_pending = _Pending()


def _call_unlocked(*args: Any, **kwargs: Any) -> Any:
    """Makes the pending call with the lock released."""
    threads, func = _pending.threads, _pending.func
    lock: Any = threads.lock
    held = lock._release_save()
    try:
        result = func(*args, **kwargs)
    finally:
        lock._acquire_restore(held)
    if threads.is_over:
        raise _Over(result)
    return result


KNOWN_OPERATIONS[_call_unlocked] = Operation(_call_unlocked, "call", "call")


class _RecorderTakingTurns(Recorder):
    """Mixin: a recorder that shares its recording with other threads."""

    threads: _Threads
    branch: int
    _num_rows_before: int  # rows of this branch when the current call began

    def is_on(self) -> bool:
        """As in Recorder; False after the pass."""
        return not self.threads.is_over and super().is_on()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        operation = KNOWN_OPERATIONS[func]
        if self.collected is not None or operation.kind is not Kind.OPERATION:
            return super().__torch_function__(func, types, args, kwargs)
        if types and not all(issubclass(kind, torch.Tensor) for kind in types):
            self.operator = None
            return run_overridden(self, func, types, args, kwargs)
        with self.threads.lock:
            if not self.threads.is_over:
                self.operator = self.operator or operation
                _pending.threads, _pending.func = self.threads, func
                try:
                    return super().__torch_function__(_call_unlocked, types, args, kwargs)
                except _Over as over:
                    return over.result
        return func(*args, **(kwargs or {}))

    def pass_through(
        self, operation: Operation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """As in Recorder."""
        with self.threads.lock:
            if not self.threads.is_over:
                _pending.threads, _pending.func = self.threads, func
                try:
                    return super().pass_through(operation, _call_unlocked, args, kwargs)
                except _Over as over:
                    return over.result
        return func(*args, **(kwargs or {}))

    def append(self, call: MadeCall, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """As in Recorder; tags the row with its branch.

        Branch 0 still adds outputs after the model has returned.
        """
        with self.threads.lock:
            if not self.branch or not self.threads.is_over:
                self.threads.rows[self.branch].own.append(len(self.rows))
                super().append(call, tensor, *args, **kwargs)

    def append_results(self, *args: Any, **kwargs: Any) -> None:
        """As in Recorder; the rows of one call stay together."""
        with self.threads.lock:
            super().append_results(*args, **kwargs)

    def references_to(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[Any, int]:
        """As in Recorder."""
        with self.threads.lock:
            return super().references_to(args, kwargs)

    def before_write(self, targets: Sequence[torch.Tensor]) -> None:
        """As in Recorder."""
        with self.threads.lock:
            super().before_write(targets)

    def meet(self, tensor: torch.Tensor) -> int | None:
        """As in Recorder."""
        with self.threads.lock:
            return super().meet(tensor)

    def begin_observed(self, *args: Any, **kwargs: Any) -> ObservedCall | None:
        """As in Recorder."""
        with self.threads.lock:
            self._num_rows_before = len(self.threads.rows[self.branch].own)
            return super().begin_observed(*args, **kwargs)

    def end_observed(self, call: ObservedCall | None, result: Any) -> None:
        """As in Recorder; other threads may have added rows since the call began."""
        with self.threads.lock:
            if (
                call is not None
                and self.observer is not None
                and not (self.branch and self.threads.is_over)
            ):
                rows = self.threads.rows[self.branch].own[self._num_rows_before :]
                call.first, call.last = (
                    (rows[0], rows[-1] + 1) if rows else (call.first, call.first)
                )
                self.observer.end(call, result)


class _TrackerTakingTurns(ModuleTracker):
    """Mixin: a tracker that shares its recording with other threads."""

    threads: _Threads
    branch: int

    def enter(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], depth: int = 2
    ) -> int | None:
        """As in ModuleTracker; tags the call with its branch."""
        with self.threads.lock:
            call = super().enter(module, args, kwargs, depth + 1)
            if call:
                self.threads.module_calls[self.branch].own.append(call)
            return call

    def leave(self, call: int, result: Any) -> None:
        """As in ModuleTracker."""
        with self.threads.lock:
            if not self.threads.is_over:
                super().leave(call, result)


_CLASSES: dict[type, type] = {}


def _taking_turns(mixin: type, kind: type) -> type:
    """The subclass of `kind` with the mixin for several threads."""
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"{kind.__name__}TakingTurns", (mixin, kind), {})
    return _CLASSES[kind]


def branch_off(tracker: ModuleTracker) -> ModuleTracker:
    """A tracker for a thread or job that starts here; `tracker` is that of the current thread."""
    if not isinstance(tracker, _TrackerTakingTurns):
        _share(tracker)
    assert isinstance(tracker, _TrackerTakingTurns)
    threads = tracker.threads
    with threads.lock:
        if threads.is_over:
            return tracker
        recorder: Any = tracker.recorder
        own, own_recorder = (
            copy.copy(tracker),
            recorder.for_thread(run_branch.__code__, sys._getframe(1)),
        )
        own.recorder = own_recorder
        own.branch = own_recorder.branch = len(threads.rows)
        threads.rows.append(Branch(tracker.branch, len(recorder.rows), []))
        threads.module_calls.append(Branch(tracker.branch, len(recorder.module_calls), []))
        threads.live.add(own)
        return own


def _share(tracker: Any) -> None:
    """Converts a tracker and its recorder to share their recording with other threads."""
    recorder = tracker.recorder
    recorder.share()
    tracker.share()
    tracker.threads = recorder.threads = threads = _Threads()
    tracker.branch = recorder.branch = 0
    threads.rows.append(Branch(-1, 0, list(range(len(recorder.rows)))))
    threads.module_calls.append(Branch(-1, 0, list(range(len(recorder.module_calls)))))
    recorder.__class__ = _taking_turns(_RecorderTakingTurns, type(recorder))
    tracker.__class__ = _taking_turns(_TrackerTakingTurns, type(tracker))


def run_branch(tracker: ModuleTracker, current: Any, run: Callable[[], Any]) -> Any:
    """Runs a branch in its thread; `current` holds the tracker that patched functions use."""
    assert isinstance(tracker, _TrackerTakingTurns)
    threads, recorder = tracker.threads, tracker.recorder
    # In a thread that already logs, or after the pass.
    if current.tracker is not None or threads.is_over:
        return run()
    try:
        current.tracker = tracker
        push_mode(recorder)
        observer = recorder.observer
        if observer is None:
            return run()
        with observer.around(recorder.place):
            return run()
    finally:
        current.tracker = None
        remove_mode(recorder)
        threads.live.discard(tracker)


def is_over(tracker: ModuleTracker) -> bool:
    """True if `tracker` belongs to a thread that outlived its pass."""
    return isinstance(tracker, _TrackerTakingTurns) and tracker.threads.is_over


def end_branches(tracker: ModuleTracker) -> None:
    """Detaches threads that still run after the pass, and releases what they hold.

    May be called again.
    """
    if isinstance(tracker, _TrackerTakingTurns):
        with tracker.threads.lock:
            tracker.threads.is_over = True
            for other in list(tracker.threads.live):
                empty = ModuleTracker(Parts(), Recorder(Memory(None, False), False, False, None))
                vars(other.recorder).update(vars(empty.recorder))
                vars(other).update({**vars(empty), "recorder": other.recorder})
                tracker.threads.live.discard(other)


def row_branches(tracker: ModuleTracker) -> list[Branch]:
    """The branches with the rows of each; [] if there was one thread."""
    return tracker.threads.rows if isinstance(tracker, _TrackerTakingTurns) else []


def order_module_calls(tracker: ModuleTracker) -> None:
    """Puts the module calls of a finished pass in program order. May be called again."""
    if not isinstance(tracker, _TrackerTakingTurns) or not tracker.threads.module_calls:
        return
    recorder, failures = tracker.recorder, tracker.recorder.failures
    order = in_program_order(tracker.threads.module_calls, len(recorder.module_calls))
    place_of = {call: place for place, call in enumerate(order)}
    num_calls: dict[str, int] = {}
    calls = []
    for call in map(recorder.module_calls.__getitem__, order):
        number = num_calls[call.address] = num_calls.get(call.address, 0) + 1
        calls.append(call._replace(pass_num=number, parent=place_of.get(call.parent, -1)))
    rows = [row._replace(module_call=place_of[row.module_call]) for row in recorder.rows]
    entries = [(place_of[call], numbers) for call, numbers in tracker.entries]
    exits = [(place_of[call], numbers) for call, numbers in tracker.exits]
    tracker.parts[:] = [(place_of[call], path, entry) for call, path, entry in tracker.parts]
    if failures.failure is not None:
        failures.failure = replace(
            failures.failure, module_call=place_of[failures.failure.module_call]
        )
    tracker.threads.module_calls = []  # done, even if an interrupt follows
    recorder.module_calls, recorder.rows[:], tracker.entries, tracker.exits = (
        calls,
        rows,
        entries,
        exits,
    )


_MISSING = object()
_POOL_WORKERS = (futures._worker, pool.worker)  # type: ignore[attr-defined]
_start, _submit = threading.Thread.start, futures.ThreadPoolExecutor.submit


def _branch() -> ModuleTracker | None:
    """A tracker for a thread that starts here; None if it is not logged."""
    tracker = CURRENT.tracker
    return branch_off(tracker) if tracker is not None and tracker.recorder.is_on() else None


def _run_job(
    branch: ModuleTracker, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    return run_branch(branch, CURRENT, partial(function, *args, **kwargs))


def _run_one_of_many(branch: ModuleTracker, function: Callable[..., Any], /, *args: Any) -> Any:
    """Runs one item of a pool's map as a branch; items run in several threads at once."""
    return _run_job(branch_off(branch), function, *args)


def _patched_start(self: threading.Thread) -> None:
    branch = None if getattr(self, "_target", None) in _POOL_WORKERS else _branch()
    if branch is None:
        return _start(self)
    own, run = vars(self), self.run
    before = own.get("run", _MISSING)

    def restore() -> None:
        own.pop("run", None) if before is _MISSING else own.__setitem__("run", before)

    def logged_run() -> None:
        restore()
        run_branch(branch, CURRENT, run)

    own["run"] = logged_run
    try:
        _start(self)
    except BaseException:
        restore()
        raise


def _patched_submit(self: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    branch = _branch()
    if branch is None:
        return _submit(self, function, *args, **kwargs)
    return _submit(self, partial(_run_job, branch, function), *args, **kwargs)


def _pool_method(name: str, run: Callable[..., Any]) -> Patch:
    """A patch of a `ThreadPool` method that calls its function argument through `run`."""
    original = getattr(pool.ThreadPool, name)

    def method(self: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        branch = _branch()
        return original(
            self, func if branch is None else partial(run, branch, func), *args, **kwargs
        )

    return Patch(pool.ThreadPool, name, method)


THREAD_PATCHES: tuple[Patch, ...] = (
    Patch(threading.Thread, "start", _patched_start),
    Patch(futures.ThreadPoolExecutor, "submit", _patched_submit),
    _pool_method("apply_async", _run_job),
    *(_pool_method(name, _run_one_of_many) for name in ("_map_async", "imap", "imap_unordered")),
)
