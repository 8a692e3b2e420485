"""The patches of Python's threads and thread pools.

Threads that the model starts log with it; so do jobs that it gives to a pool, whoever made that.
The threads of a pool themselves do not: they may work for others as well, and go on when the log
has ended.
"""

import threading
from collections.abc import Callable
from concurrent.futures import thread as futures
from functools import partial
from multiprocessing import pool
from typing import Any

from torchlens._capture.current import CURRENT
from torchlens._capture.module_tracker import ModuleTracker
from torchlens._capture.patches.torch_patches import Patch
from torchlens._capture.threads.model_threads import branch_off, run_branch

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
