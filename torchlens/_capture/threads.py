"""Threads that the model starts, and jobs that it gives to a pool, log into the same recording.

torch reports to a mode the calls of its own thread alone. So each such thread or job, a branch,
gets a recorder and a tracker of its own, made where it begins. They share what is written down, and
take turns at writing; but not while a call runs: it may wait for another thread. A log without
threads pays nothing for all this: the first branch changes the classes of both.

Rows and module calls stand in the order in which they were written, which differs from run to run.
The branch that wrote each is noted: module calls are put in the order of the program here, when the
pass is over; rows by the graph. A thread that runs on after that is unlogged. So are the threads of
a pool outside their jobs: they may work for others as well, and go on when the log has ended.
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
    """The pass ended while a call ran in another thread: its result is for the model alone."""

    def __init__(self, result: Any) -> None:
        self.result = result


class _Threads:
    """What the branches of one log share. The first of them is the thread of the log itself."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_over = False
        self.rows: list[Branch] = []
        self.module_calls: list[Branch] = []
        self.live: set[ModuleTracker] = set()  # of threads that run, or are to


class _Pending(threading.local):
    """The call that the current thread's recorder is about to make."""

    threads: _Threads
    func: Callable[..., Any]


_pending = _Pending()


def _call_unlocked(*args: Any, **kwargs: Any) -> Any:
    """Makes the pending call while others may write."""
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
    """What a recorder does differently once there are several."""

    threads: _Threads
    branch: int
    _num_rows_before: int  # of its own, when the call began that is under way

    def is_on(self) -> bool:
        """As in Recorder; no longer when the pass is over."""
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
        """As in Recorder; notes whose row it is. The thread of the log itself may write on when the
        model has returned.
        """
        with self.threads.lock:
            if not self.branch or not self.threads.is_over:
                self.threads.rows[self.branch].own.append(len(self.rows))
                super().append(call, tensor, *args, **kwargs)

    def append_results(self, *args: Any, **kwargs: Any) -> None:
        """As in Recorder: the rows of one call stand together."""
        with self.threads.lock:
            super().append_results(*args, **kwargs)

    def references_to(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[Any, int]:
        """As in Recorder."""
        with self.threads.lock:
            return super().references_to(args, kwargs)

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
        """As in Recorder; others may have written since the call began."""
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
    """What a tracker does differently once there are several."""

    threads: _Threads
    branch: int

    def enter(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], depth: int = 2
    ) -> int | None:
        """As in ModuleTracker; notes whose call it is."""
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
    """The class that is for several threads what `kind` is for one."""
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"{kind.__name__}TakingTurns", (mixin, kind), {})
    return _CLASSES[kind]


def branch_off(tracker: ModuleTracker) -> ModuleTracker:
    """What a thread or job is to log with that begins where the current thread is; `tracker` is
    what this one logs with.
    """
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
    """Lets a tracker and a recorder that were alone take turns from now on."""
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
    """Runs a branch, in its own thread; `current` is where patched functions find what the thread
    logs with.
    """
    assert isinstance(tracker, _TrackerTakingTurns)
    threads, recorder = tracker.threads, tracker.recorder
    if current.tracker is not None or threads.is_over:  # run by a thread that logs, or too late
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
    """Whether `tracker` belongs to a pass that has ended, and a thread of it goes on."""
    return isinstance(tracker, _TrackerTakingTurns) and tracker.threads.is_over


def end_branches(tracker: ModuleTracker) -> None:
    """The pass is over: threads that still run have nothing to do with it any more, and hold none
    of it.

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
    """Who wrote which rows; empty where there was one thread."""
    return tracker.threads.rows if isinstance(tracker, _TrackerTakingTurns) else []


def order_module_calls(tracker: ModuleTracker) -> None:
    """Puts the module calls of a pass that is over into the order of the program. May be called
    again.
    """
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
    if failures.failure is not None:
        failures.failure = replace(
            failures.failure, module_call=place_of[failures.failure.module_call]
        )
    tracker.threads.module_calls = []  # done, whatever interrupt may come now
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
    """What a thread is to log with that begins here; None if it is to run unlogged."""
    tracker = CURRENT.tracker
    return branch_off(tracker) if tracker is not None and tracker.recorder.is_on() else None


def _run_job(
    branch: ModuleTracker, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    return run_branch(branch, CURRENT, partial(function, *args, **kwargs))


def _run_one_of_many(branch: ModuleTracker, function: Callable[..., Any], /, *args: Any) -> Any:
    """A function that a pool calls with one item after the other, in several threads at once."""
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
    """A patch of a method of `ThreadPool` that is given a function and calls it in its threads by
    way of `run`.
    """
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
