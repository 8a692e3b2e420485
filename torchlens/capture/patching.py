"""The few temporary patches, applied and undone in one place.

torch reports its operations to the recorder by itself (see `recorder.py`). Patched is only what it does not report:
modules being called, which operator stood in the source, and functions that bypass the report. A patch is a record:
where, name, new. The first log applies them all, the last one to end undoes them in reverse; in between, each patched
function behaves as before in every thread that is not logging.
"""

import copy
import copyreg
import sys
import threading
from collections.abc import Callable
from concurrent.futures import thread as futures
from functools import partial
from itertools import islice
from multiprocessing import pool
from time import perf_counter
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.init
import torch.utils.dlpack
from torch._functorch import apis, eager_transforms
from torch.autograd import function as autograd_function
from torch.nn.modules import module as torch_modules

from torchlens.capture.collectives import GROUP_METHODS, record_broadcast, record_collective, record_wait
from torchlens.capture.modules import ModuleTracker, patched_call_impl
from torchlens.capture.operations import OPERATOR_NAMES, operator_of
from torchlens.capture.sharding import GROUP_MODULE, hand_on, is_bookkeeping, record_gathering
from torchlens.capture.threads import branch_off, run_branch
from torchlens.capture.trees import plain_tensors
from torchlens.capture.watchers import Watcher, WatcherGroup
from torchlens.capture.whole_calls import record_made, record_opaque, tie_function

__all__ = ["CURRENT", "add_watcher", "apply_patches", "remove_watcher", "undo_patches"]


# Not the name `_call_impl` is patched but what stands in the function. A class that gets a new attribute, and each class
# derived from it, loses what Python has remembered about finding its attributes: half a millisecond for every log.
_patched_function = torch.nn.Module._call_impl
_call_impl = FunctionType(_patched_function.__code__, _patched_function.__globals__, _patched_function.__name__)


class _Current(threading.local):
    """What the current thread is logging, and who else watches the modules that it calls."""

    tracker: ModuleTracker | None = None
    watcher: Watcher | None = None
    # What the patched `_call_impl` needs beside.
    call_impl = staticmethod(_call_impl)
    clock = staticmethod(perf_counter)


CURRENT = _Current()


def add_watcher(watcher: Watcher) -> None:
    """From now on, `watcher` sees the modules that this thread calls."""
    others = _watchers()
    if watcher not in others:
        CURRENT.watcher = WatcherGroup((*others, watcher)) if others else watcher


def remove_watcher(watcher: Watcher) -> None:
    """Undoes `add_watcher`, in whatever order others were added. May be called again."""
    others = tuple(other for other in _watchers() if other is not watcher)
    CURRENT.watcher = WatcherGroup(others) if len(others) > 1 else others[0] if others else None


def _watchers() -> tuple[Watcher, ...]:
    current = CURRENT.watcher
    return () if current is None else current.watchers if isinstance(current, WatcherGroup) else (current,)


class Patch(NamedTuple):
    owner: Any
    name: str
    new: Any


_MISSING = object()
_lock = threading.RLock()
_users: set[object] = set()
_undo: list[tuple[Any, str, Any]] = []
_is_applied = [False]  # wholly: an interrupt may leave some of them
_num_modules: list[int] = []  # how many there were when the patches were applied; new ones stand behind them


def apply_patches(user: object) -> None:
    """Patches torch for `user` (any object of its own), unless another user's log has done so."""
    with _lock:
        _users.add(user)
        if not _is_applied[0]:
            _revert()  # what an interrupt may have left of an earlier time
            _num_modules.append(len(sys.modules))
            for patch in (*_PATCHES, *_distributed_patches()):
                # Noted before it is done, so that an interrupt between the two leaves nothing behind.
                _undo.append((patch.owner, patch.name, _own(patch.owner, patch.name)))
                setattr(patch.owner, patch.name, patch.new)
            _is_applied[0] = True


def _own(owner: Any, name: str) -> Any:
    """What `owner` itself has under that name, bases aside."""
    return owner.__code__ if isinstance(owner, FunctionType) else vars(owner).get(name, _MISSING)


def undo_patches(user: object) -> None:
    """Gives torch back as it was, once no user is left. May be called again, and after an interrupted call."""
    with _lock:
        _users.discard(user)
        if not _users:
            _is_applied[0] = False
            _revert()


def _revert() -> None:
    _clean_new_modules()
    for owner, name, old in reversed(_undo):
        if old is not _MISSING:
            setattr(owner, name, old)
        elif name in vars(owner):
            delattr(owner, name)
    _undo.clear()


def _clean_new_modules() -> None:
    """A module that the model imported may have taken a patched name along (torch._dynamo does); it gets the original."""
    num_before = _num_modules[-1] if _num_modules else len(sys.modules)
    new = list(islice(sys.modules, num_before, None)) if len(sys.modules) > num_before else []
    originals = {
        id(vars(owner)[name]): old for owner, name, old in _undo if new and old is not _MISSING and name in vars(owner)
    }
    for name in new:
        for attribute, value in list(vars(sys.modules[name]).items()):
            if id(value) in originals:
                setattr(sys.modules[name], attribute, originals[id(value)])
    _num_modules.clear()


# -- operators ---------------------------------------------------------------------------------------------------------


def _patched_operator(name: str) -> Callable[..., Any]:
    operation = operator_of(name)
    original = operation.func

    def operator(self: Any, other: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None:
            return original(self, other)
        tracker.recorder.operator = operation
        try:
            return original(self, other)
        finally:
            tracker.recorder.operator = None

    return operator


# -- Python functions of torch -----------------------------------------------------------------------------------------
# `F.relu` asks `has_torch_function` whether somebody wants to see the call, and a mode does. Told no, it goes on to the
# operation it is made of, which is what gets logged; and code that takes a fast path only if nobody looks
# (nn.MultiheadAttention) takes it.

_has_torch_function = torch.overrides.has_torch_function
_has_torch_function_unary = torch.overrides.has_torch_function_unary
_has_torch_function_variadic = torch.overrides.has_torch_function_variadic
_DISABLED = torch._C._disabled_torch_function_impl
_NOT_OVERRIDING = frozenset({torch.Tensor, torch.nn.Parameter, type(None), int, float, bool, str, tuple, list})


def _overrides(values: Any) -> bool:
    """Whether one of the values is of a class with a `__torch_function__` of its own, and not one that does nothing."""
    return any(
        type(value) not in _NOT_OVERRIDING and getattr(type(value), "__torch_function__", _DISABLED) is not _DISABLED
        for value in values
    )


def _quiet_has(values: Any) -> bool:
    if CURRENT.tracker is not None and (_NOT_OVERRIDING.issuperset(map(type, values)) or not _overrides(values)):
        return False
    return _has_torch_function(values)


def _quiet_has_unary(value: Any) -> bool:
    if CURRENT.tracker is not None and (type(value) in _NOT_OVERRIDING or not _overrides((value,))):
        return False
    return _has_torch_function_unary(value)


def _quiet_has_variadic(*values: Any) -> bool:
    if CURRENT.tracker is not None and (_NOT_OVERRIDING.issuperset(map(type, values)) or not _overrides(values)):
        return False
    return _has_torch_function_variadic(*values)


# In torch/_tensor.py the answer is no only for the one call that the recorder lets pass to see what it is made of:
# printing a tensor, say, also asks, and stays one call.


def _inlined() -> bool:
    tracker = CURRENT.tracker
    if tracker is None or not tracker.recorder.is_inlining:
        return False
    tracker.recorder.is_inlining = False
    return True


def _inline_has(values: Any) -> bool:
    return not _inlined() and _has_torch_function(values)


def _inline_has_unary(value: Any) -> bool:
    return not _inlined() and _has_torch_function_unary(value)


def _inline_has_variadic(*values: Any) -> bool:
    return not _inlined() and _has_torch_function_variadic(*values)


def _asking(owner: Any, has: Any, unary: Any, variadic: Any) -> list[Patch]:
    new = {"has_torch_function": has, "has_torch_function_unary": unary, "has_torch_function_variadic": variadic}
    return [Patch(owner, name, function) for name, function in new.items() if hasattr(owner, name)]


_pop_mode_temporarily = torch.overrides._pop_mode_temporarily


class _PoppedMode:
    """What torch takes our mode off with, while it hands us a call of a Python method.

    Not by a generator, as torch does: one that an interrupt (Ctrl-C) cuts short would put the mode back whenever it is
    freed, which may be long after the log.
    """

    def __enter__(self) -> Any:
        self._mode = torch.overrides._pop_mode()
        return self._mode

    def __exit__(self, *error: object) -> None:
        torch.overrides._push_mode(self._mode)


def _patched_pop_mode_temporarily() -> Any:
    return _pop_mode_temporarily() if CURRENT.tracker is None else _PoppedMode()


# -- functions that torch does not report ------------------------------------------------------------------------------


def _reported(owner: Any, name: str) -> Patch:
    """A patch that reports a call of `owner.name` to the recorder as torch would have done."""
    original = getattr(owner, name)

    def reported(*args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None or not tracker.recorder.is_on():
            return original(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return tracker.recorder.__torch_function__(original, (), args, kwargs or None)

    return Patch(owner, name, reported)


# Three ways to make a tensor from another one.


def _patched_new(kind: type, *args: Any, **kwargs: Any) -> Any:
    """What makes a parameter: `nn.Parameter(x)`, also inside the model."""
    tracker = CURRENT.tracker
    parameter: Any = _new_parameter(kind, *args, **kwargs)
    if tracker is not None and tracker.recorder.is_on() and tracker.recorder.entry_of(parameter) is None:
        record_made(tracker.recorder, kind, args, kwargs, parameter)
    return parameter


_new_parameter = torch.nn.Parameter.__new__


def _patched_init(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """What Python calls when `torch.Tensor(x)`, or a class derived from it, has made a tensor."""
    kind = type(self)
    if kind.__init__ is not _patched_init:  # its own, which calls this one
        object.__init__(self, *args, **kwargs)
        return
    tracker = CURRENT.tracker
    if tracker is not None and tracker.recorder.is_on() and tracker.recorder.entry_of(self) is None:
        record_made(tracker.recorder, kind, args, kwargs, self)


def _patched_copy(self: torch.Tensor) -> Any:
    """What `copy.copy(x)` calls where there is such a thing; torch has none, and leaves it to the way of pickling."""
    tracker = CURRENT.tracker
    if tracker is not None and tracker.recorder.is_on():
        with torch._C.DisableTorchFunction():
            return tracker.recorder.__torch_function__(copy.copy, (), (self,), None)
    reduce = copyreg.dispatch_table.get(type(self))
    return copy._reconstruct(self, None, *(self.__reduce_ex__(4) if reduce is None else reduce(self)))  # type: ignore[attr-defined]


# -- threads -----------------------------------------------------------------------------------------------------------
# Threads that the model starts log with it; so do jobs that it gives to a pool, whoever made that. The threads of a pool
# themselves do not: they may work for others as well, and go on when the log has ended.

_POOL_WORKERS = (futures._worker, pool.worker)  # type: ignore[attr-defined]
_start, _submit = threading.Thread.start, futures.ThreadPoolExecutor.submit


def _branch() -> ModuleTracker | None:
    """What a thread is to log with that begins here; None if it is to run unlogged."""
    tracker = CURRENT.tracker
    return branch_off(tracker) if tracker is not None and tracker.recorder.is_on() else None


def _run_job(branch: ModuleTracker, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
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
    """A patch of a method of `ThreadPool` that is given a function and calls it in its threads by way of `run`."""
    original = getattr(pool.ThreadPool, name)

    def method(self: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        branch = _branch()
        return original(self, func if branch is None else partial(run, branch, func), *args, **kwargs)

    return Patch(pool.ThreadPool, name, method)


def _opaque(owner: Any, name: str, label: str, reason: str | None = None) -> Patch:
    """A patch that logs a call of `owner.name` as one operation called `label`."""
    original = getattr(owner, name)

    def opaque(*args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None or not tracker.recorder.is_on():
            return original(*args, **kwargs)
        if reason is not None and reason not in tracker.recorder.warnings:
            tracker.recorder.warnings.append(reason)
        return record_opaque(tracker.recorder, label, original, partial(original, *args, **kwargs), (args, kwargs))

    return Patch(owner, name, opaque)


def _transform_reason(name: str) -> str:
    return f"what runs inside torch.func.{name} cannot be seen from outside: it is logged as one operation"


def _patched_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`autograd.Function.apply`: the operations in its forward are logged, and its result is tied to its arguments."""
    original = super(autograd_function._SingleLevelFunction, cls).apply
    tracker = CURRENT.tracker
    if tracker is None or not tracker.recorder.is_on():  # torch makes such functions for its custom operators, too
        return original(*args, **kwargs)
    recorder = tracker.recorder
    if is_bookkeeping(cls):
        return hand_on(recorder, cls, args, partial(original, *args, **kwargs))
    num_before = len(recorder.rows)
    result = original(*args, **kwargs)
    tie_function(recorder, cls.__name__, cls, args, [tensor for _, tensor in plain_tensors(result)], num_before)
    return result


_compile: Callable[..., Any] = torch.compile


def _patched_compile(*args: Any, **kwargs: Any) -> Any:
    """`torch.compile`, called by the model (`flex_attention` does): what it returns runs as its source while logged."""
    compiled = _compile(*args, **kwargs)
    tracker = CURRENT.tracker
    if tracker is not None and tracker.on_compile is not None:
        tracker.on_compile()
    return compiled


# -- torch.distributed -------------------------------------------------------------------------------------------------
# Every function of it ends in a method of a process group, or of the back end in it, so that references to the functions,
# taken whenever, are seen too. Patched only where processes work together at all.


def _distributed_patches() -> list[Patch]:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return []
    c10d = distributed.distributed_c10d
    patches = _asking(c10d, _quiet_has, _quiet_has_unary, _quiet_has_variadic)
    patches += [
        _collective(owner, name)
        for owner in _with_subclasses(c10d.ProcessGroup, torch._C._distributed_c10d.Backend)
        for name in GROUP_METHODS
        if name in vars(owner)
    ]
    patches += [_waiting(owner, "wait") for owner in _with_subclasses(c10d.Work) if "wait" in vars(owner)]
    patches += [_waiting(c10d.ProcessGroup, name) for name in ("barrier", "monitored_barrier")]
    patches += [_gathering(name) for name in ("unshard", "wait_for_unshard", "reshard") if GROUP_MODULE in sys.modules]
    patches += [_opaque(c10d, f"_{name}", name) for name in ("object_to_tensor", "tensor_to_object")]
    return [*patches, Patch(distributed, "_broadcast_coalesced", _patched_broadcast_coalesced(distributed))]


def _with_subclasses(*classes: type) -> list[type]:
    found: list[type] = []
    pending = list(classes)
    while pending:
        kind = pending.pop()
        if kind not in found:
            found.append(kind)
            pending += type.__subclasses__(kind)
    return found


def _collective(owner: Any, name: str) -> Patch:
    original = vars(owner)[name]

    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None or not tracker.recorder.is_on():
            return original(group, *args, **kwargs)
        run = partial(original, group, *args, **kwargs)
        return record_collective(tracker.recorder, name, run, group, args, kwargs)

    return Patch(owner, name, collective)


def _waiting(owner: Any, name: str) -> Patch:
    original = vars(owner)[name]

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None or tracker.recorder.collected is not None:
            return original(work, *args, **kwargs)
        return record_wait(tracker.recorder, partial(original, work, *args, **kwargs), work)

    return Patch(owner, name, wait)


def _gathering(name: str) -> Patch:
    owner: Any = sys.modules[GROUP_MODULE].FSDPParamGroup
    original = vars(owner)[name]

    def gathering(group: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None or not tracker.recorder.is_on():
            return original(group, *args, **kwargs)
        return record_gathering(tracker.recorder, group, name, partial(original, group, *args, **kwargs))

    return Patch(owner, name, gathering)


def _patched_broadcast_coalesced(distributed: Any) -> Callable[..., Any]:
    original = distributed._broadcast_coalesced

    def broadcast_coalesced(process_group: Any, tensors: Any, buffer_size: int, src: int = 0) -> Any:
        tracker = CURRENT.tracker
        if tracker is None or tracker.recorder.collected is not None:
            return original(process_group, tensors, buffer_size, src)
        run = partial(original, process_group, tensors, buffer_size, src)
        return record_broadcast(tracker.recorder, run, process_group, tensors, src)

    return broadcast_coalesced


_PATCHES: tuple[Patch, ...] = (
    Patch(torch_modules, "_torchlens_current", CURRENT),
    Patch(_patched_function, "__code__", patched_call_impl.__code__),
    Patch(torch, "compile", _patched_compile),
    *(Patch(torch.Tensor, name, _patched_operator(name)) for name in OPERATOR_NAMES),
    *(
        patch
        for owner in (torch.overrides, torch.nn.functional, torch.functional, torch.nn.init)
        for patch in _asking(owner, _quiet_has, _quiet_has_unary, _quiet_has_variadic)
    ),
    *_asking(torch._tensor, _inline_has, _inline_has_unary, _inline_has_variadic),
    Patch(torch.overrides, "_pop_mode_temporarily", _patched_pop_mode_temporarily),
    Patch(autograd_function._SingleLevelFunction, "apply", classmethod(_patched_apply)),
    _opaque(torch._C.ScriptFunction, "__call__", "script_function"),
    _opaque(apis, "vmap_impl", "vmap", _transform_reason("vmap")),
    _opaque(eager_transforms, "grad_impl", "grad", _transform_reason("grad")),
    _opaque(eager_transforms, "grad_and_value_impl", "grad_and_value", _transform_reason("grad_and_value")),
    _opaque(eager_transforms, "_vjp_with_argnums", "vjp", _transform_reason("vjp")),
    _opaque(eager_transforms, "_jvp_with_argnums", "jvp", _transform_reason("jvp")),
    _reported(torch, "from_numpy"),
    _reported(torch, "frombuffer"),
    _reported(torch, "from_dlpack"),
    _reported(torch.nested, "nested_tensor"),
    _reported(torch.nested, "as_nested_tensor"),
    _reported(torch.Tensor, "as_subclass"),
    _reported(torch.Tensor, "set_"),
    Patch(torch.nn.Parameter, "__new__", staticmethod(_patched_new)),
    Patch(torch.Tensor, "__init__", _patched_init),
    Patch(torch.Tensor, "__copy__", _patched_copy),
    Patch(threading.Thread, "start", _patched_start),
    Patch(futures.ThreadPoolExecutor, "submit", _patched_submit),
    _pool_method("apply_async", _run_job),
    *(_pool_method(name, _run_one_of_many) for name in ("_map_async", "imap", "imap_unordered")),
)
