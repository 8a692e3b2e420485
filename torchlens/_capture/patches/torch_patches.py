"""The patches of torch, for calls that it does not report to the recorder.

They cover module calls, the operator used in the source, and functions that bypass torch's
reporting. In threads that are not logging, each patched function behaves as before.
"""

import copy
import copyreg
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from types import ClassMethodDescriptorType
from typing import Any, NamedTuple

import torch
import torch.func
import torch.nn.init
import torch.utils.dlpack
from torch._functorch import apis, eager_transforms
from torch.autograd import function as autograd_function
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import module as torch_modules

from torchlens._capture.current import CURRENT, MODULE_CALL
from torchlens._capture.dispatch_watch import DispatchWatch, watching
from torchlens._capture.distributed.sharding import hand_on, is_bookkeeping
from torchlens._capture.gradients.backward_calls import record_backward
from torchlens._capture.module_tracker import patched_call_impl
from torchlens._capture.patches.mode_stack import without_mode
from torchlens._capture.recorder import Recorder
from torchlens._capture.unreported import record_made, record_opaque, record_swap, tie_function
from torchlens._recording.operations import OPERATOR_NAMES, operator_of
from torchlens._recording.trees import plain_tensors
from torchlens._recording.unseen import NoTorchFunction


class Patch(NamedTuple):
    """A temporary replacement of an attribute."""

    owner: Any
    name: str
    new: Any


# -- operators


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


# -- Python functions of torch
#
# `F.relu` calls `has_torch_function` to find out whether the call is overridden, which a mode
# makes true. Patched to return False, it goes on to its inner operation, which is logged. Code with
# a fast path for when no mode is active (nn.MultiheadAttention) takes it.

_has_torch_function = torch.overrides.has_torch_function
_has_torch_function_unary = torch.overrides.has_torch_function_unary
_has_torch_function_variadic = torch.overrides.has_torch_function_variadic
_DISABLED = torch._C._disabled_torch_function_impl
_NOT_OVERRIDING = frozenset(
    {torch.Tensor, torch.nn.Parameter, type(None), int, float, bool, str, tuple, list}
)


def _overrides(values: Any) -> bool:
    """True if the class of a value has its own, not a disabled, `__torch_function__`."""
    return any(
        type(value) not in _NOT_OVERRIDING
        and getattr(type(value), "__torch_function__", _DISABLED) is not _DISABLED
        for value in values
    )


_stack_depth, _mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at


def _is_quiet() -> bool:
    """True if no mode but the recorder is to be passed the call. A mode above it comes first."""
    tracker = CURRENT.tracker
    if tracker is None:
        return False
    depth = _stack_depth()
    return not depth or _mode_at(depth - 1) is tracker.recorder


def _quiet_has(values: Any) -> bool:
    if _is_quiet() and (_NOT_OVERRIDING.issuperset(map(type, values)) or not _overrides(values)):
        return False
    return _has_torch_function(values)


def _quiet_has_unary(value: Any) -> bool:
    if _is_quiet() and (type(value) in _NOT_OVERRIDING or not _overrides((value,))):
        return False
    return _has_torch_function_unary(value)


def _quiet_has_variadic(*values: Any) -> bool:
    if _is_quiet() and (_NOT_OVERRIDING.issuperset(map(type, values)) or not _overrides(values)):
        return False
    return _has_torch_function_variadic(*values)


# In torch/_tensor.py, only the call that the recorder inlines finds no mode: printing a tensor, for
# instance, also checks, and stays one call.


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
    new = {
        "has_torch_function": has,
        "has_torch_function_unary": unary,
        "has_torch_function_variadic": variadic,
    }
    return [Patch(owner, name, function) for name, function in new.items() if hasattr(owner, name)]


def quiet(owner: Any) -> list[Patch]:
    """Patches that make functions in `owner` find no active mode."""
    return _asking(owner, _quiet_has, _quiet_has_unary, _quiet_has_variadic)


_pop_mode_temporarily = torch.overrides._pop_mode_temporarily


class _PoppedMode:
    """Replaces torch's context manager that disables our mode during a call of a Python method.

    torch uses a generator. If Ctrl-C interrupts it, it would restore the mode when it is freed,
    which may be long after the log.
    """

    def __enter__(self) -> Any:
        self._mode = torch.overrides._pop_mode()
        return self._mode

    def __exit__(self, *error: object) -> None:
        torch.overrides._push_mode(self._mode)


def _patched_pop_mode_temporarily() -> Any:
    return _pop_mode_temporarily() if CURRENT.tracker is None else _PoppedMode()


class _WatchedDisabling:
    """Replaces `torch._C.DisableTorchFunction`, under which torch reports nothing to the recorder.

    What runs there has no entries: a warning names it. Saved values that it overwrites are kept.
    """

    def __enter__(self) -> None:
        tracker, self._stack = CURRENT.tracker, ExitStack()
        is_on = tracker is not None and tracker.recorder.is_on()
        self._stack.enter_context(NoTorchFunction())
        if tracker is not None and is_on:
            tracker.recorder.complete()
            watch = DispatchWatch(tracker.recorder)
            self._stack.callback(_warn_of_hidden, tracker.recorder, watch)
            self._stack.enter_context(watching(watch))

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _warn_of_hidden(recorder: Recorder, watch: DispatchWatch) -> None:
    if watch.names:
        recorder.warnings.append(
            f"the model ran {', '.join(watch.names)} under torch._C.DisableTorchFunction, which "
            "hides operations from the log: they have no entries, and operations that read their "
            "results lack these as parents"
        )


# -- functions that torch does not report


def _reported(owner: Any, name: str) -> Patch:
    """A patch that reports calls of `owner.name` to the recorder, as torch does for other
    functions.
    """
    original = getattr(owner, name)

    def reported(*args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None or not tracker.recorder.is_on():
            return original(*args, **kwargs)
        # As torch does, only our mode is off: torch 2.6 imports its compiler inside such a call,
        # which fails where others are.
        with without_mode(tracker.recorder):
            return tracker.recorder.__torch_function__(original, (), args, kwargs or None)

    return Patch(owner, name, reported)


# Three ways to make a tensor from another one.


def _patched_new(kind: type, *args: Any, **kwargs: Any) -> Any:
    """Makes a parameter: `nn.Parameter(x)`, also inside the model."""
    tracker = CURRENT.tracker
    parameter: Any = _new_parameter(kind, *args, **kwargs)
    if (
        tracker is not None
        and tracker.recorder.is_on()
        and tracker.recorder.entry_of(parameter) is None
    ):
        record_made(tracker.recorder, kind, args, kwargs, parameter)
        tracker.recorder.expect_parameters()
    return parameter


_new_parameter = torch.nn.Parameter.__new__


def _patched_init(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """`__init__` of `torch.Tensor` and derived classes, after `torch.Tensor(x)` was made."""
    kind = type(self)
    if kind.__init__ is not _patched_init:  # a subclass's own `__init__`, which calls this one
        object.__init__(self, *args, **kwargs)
        return
    tracker = CURRENT.tracker
    if tracker is not None and tracker.recorder.is_on() and tracker.recorder.entry_of(self) is None:
        record_made(tracker.recorder, kind, args, kwargs, self)


def _patched_copy(self: torch.Tensor) -> Any:
    """`__copy__` for tensors; torch defines none and copies them by way of pickling."""
    tracker = CURRENT.tracker
    if tracker is not None and tracker.recorder.is_on():
        with NoTorchFunction():
            return tracker.recorder.__torch_function__(copy.copy, (), (self,), None)
    reduce = copyreg.dispatch_table.get(type(self))
    parts = self.__reduce_ex__(4) if reduce is None else reduce(self)
    return copy._reconstruct(self, None, *parts)  # type: ignore[attr-defined]


def _patched_swap(t1: torch.Tensor, t2: torch.Tensor) -> None:
    """`torch.utils.swap_tensors`, which makes no new tensors."""
    tracker = CURRENT.tracker
    if tracker is None or not tracker.recorder.is_on():
        _swap(t1, t2)
        return
    record_swap(tracker.recorder, t1, t2, partial(_swap, t1, t2))


_swap = torch.utils.swap_tensors


def opaque(owner: Any, name: str, label: str, reason: str | None = None) -> Patch:
    """A patch that logs a call of `owner.name` as one operation named `label`."""
    original = getattr(owner, name)

    def opaque(*args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None or not tracker.recorder.is_on():
            return original(*args, **kwargs)
        if reason is not None and reason not in tracker.recorder.warnings:
            tracker.recorder.warnings.append(reason)
        return record_opaque(
            tracker.recorder, label, original, partial(original, *args, **kwargs), (args, kwargs)
        )

    return Patch(owner, name, opaque)


def _unlogged(owner: Any, name: str) -> Patch:
    """A patch that lets `owner.name` run unlogged.

    Tracers run a function to see what it does, some on tensors without values: that is no part of
    the pass. And asking a tensor of one trace for its shape while another is made crashes the
    process (`torch.jit.trace`, torch 2.13).
    """
    original = getattr(owner, name)

    def unlogged(*args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None:
            return original(*args, **kwargs)
        with tracker.recorder.paused():
            CURRENT.tracker = None
            try:
                return original(*args, **kwargs)
            finally:
                CURRENT.tracker = tracker

    return Patch(owner, name, unlogged)


def _patched_functionalize(
    func: Callable[..., Any], *, remove: str = "mutations"
) -> Callable[..., Any]:
    """`torch.func.functionalize`: a call of the function it returns is one operation."""
    transformed = _functionalize(func, remove=remove)

    @wraps(func)
    def functionalized(*args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None or not tracker.recorder.is_on():
            return transformed(*args, **kwargs)
        reason = _transform_reason("functionalize")
        if reason not in tracker.recorder.warnings:
            tracker.recorder.warnings.append(reason)
        run = partial(transformed, *args, **kwargs)
        return record_opaque(tracker.recorder, "functionalize", transformed, run, (args, kwargs))

    return functionalized


_functionalize = eager_transforms.functionalize


def _patched_vjp(*args: Any, **kwargs: Any) -> Any:
    """`torch.func.vjp`: one operation, as is each call of the function that it returns."""
    tracker = CURRENT.tracker
    if tracker is None or not tracker.recorder.is_on():
        return _vjp(*args, **kwargs)
    recorder, reason = tracker.recorder, _transform_reason("vjp")
    if reason not in recorder.warnings:
        recorder.warnings.append(reason)
    results, pull_back, *rest = record_opaque(
        recorder, "vjp", _vjp, partial(_vjp, *args, **kwargs), (args, kwargs)
    )
    log = weakref.ref(recorder.memory)  # shared by all threads of a log
    with NoTorchFunction():
        made = next(recorder.entry_of(tensor) for _, tensor in plain_tensors(results))
    given = () if made is None else tuple(recorder.rows[made].references.values())

    @wraps(pull_back)
    def logged_pull_back(*args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        captured = given if tracker is not None and log() is tracker.recorder.memory else ()
        if tracker is None or not tracker.recorder.is_on():
            if tracker is not None:  # inside another transform, as in `jacrev`
                tracker.recorder.collect_entries(captured)
            return pull_back(*args, **kwargs)
        recorder, run = tracker.recorder, partial(pull_back, *args, **kwargs)
        return record_opaque(recorder, "vjp_fn", pull_back, run, (args, kwargs), captured)

    return results, logged_pull_back, *rest


_vjp = eager_transforms._vjp_with_argnums


def _transform_reason(name: str) -> str:
    return (
        f"what runs inside torch.func.{name} cannot be seen from outside: it is logged as one "
        "operation"
    )


def _patched_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`autograd.Function.apply`: logs the operations in its forward, and links its results."""
    original = super(autograd_function._SingleLevelFunction, cls).apply
    tracker = CURRENT.tracker
    # torch also uses such functions for its custom operators.
    if tracker is None or not tracker.recorder.is_on():
        return original(*args, **kwargs)
    recorder = tracker.recorder
    if is_bookkeeping(cls):
        return hand_on(recorder, cls, args, partial(original, *args, **kwargs))
    num_before = len(recorder.rows)
    entries_before = [
        recorder.entry_of(arg) if isinstance(arg, torch.Tensor) else None for arg in args
    ]
    result = original(*args, **kwargs)
    outputs = [tensor for _, tensor in plain_tensors(result)]
    tie_function(recorder, cls.__name__, cls, args, outputs, num_before, entries_before)
    return result


# The class through whose `apply` every call of a custom function goes. Newer releases of torch
# implement `Function.apply` in C; in older ones it is Python and calls the base class's.
_APPLIED: Any = (
    autograd_function.Function
    if isinstance(vars(autograd_function.Function)["apply"], ClassMethodDescriptorType)
    else autograd_function._SingleLevelFunction
)


def _patched_backward(*args: Any, **kwargs: Any) -> None:
    """`torch.autograd.backward`, which every `backward()` calls: its results are the gradients."""
    tracker = CURRENT.tracker
    if tracker is None or not tracker.recorder.is_on():
        _backward(*args, **kwargs)
    else:
        record_backward(tracker.recorder, _backward, args, kwargs)


def _patched_engine(*args: Any, **kwargs: Any) -> Any:
    """What `torch.autograd.grad` and `backward` call: the first leaves no gradients behind, but
    returns them, so none of an entry or a parameter is collected.
    """
    tracker = CURRENT.tracker
    hooks = None if tracker is None else tracker.recorder.gradients
    if hooks is None or kwargs.get("accumulate_grad"):
        return _run_engine(*args, **kwargs)
    with hooks.gradients.watch.paused():
        return _run_engine(*args, **kwargs)


_backward = torch.autograd.backward
_run_engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
_compile: Callable[..., Any] = torch.compile


def _patched_compile(*args: Any, **kwargs: Any) -> Any:
    """`torch.compile`, called by the model (like `flex_attention`): runs eagerly in a log."""
    compiled = _compile(*args, **kwargs)
    tracker = CURRENT.tracker
    if tracker is not None and tracker.on_compile is not None:
        tracker.on_compile()
    return compiled


# What tracers go through, and what they end in: a name that was imported earlier gets there too.
_TRACERS: dict[Any, tuple[str, ...]] = {
    torch.export: ("export", "draft_export"),
    proxy_tensor._MakefxTracer: ("trace",),
    torch.jit: ("trace_module",),
    torch.jit._trace: ("_trace_impl", "trace_module", "_get_trace_graph"),
    torch._C: (
        "_create_function_from_trace",
        "_create_function_from_trace_with_dict",
        "_create_graph_by_tracing",
    ),
    torch._C.ScriptModule: ("_create_method_from_trace", "_create_method_from_trace_with_dict"),
}

# The patches needed to observe module calls.
MODULE_PATCHES: tuple[Patch, ...] = (
    Patch(torch_modules, "_torchlens_current", CURRENT),
    Patch(MODULE_CALL, "__code__", patched_call_impl.__code__),
)
PATCHES: tuple[Patch, ...] = (
    Patch(torch, "compile", _patched_compile),
    *(Patch(torch.Tensor, name, _patched_operator(name)) for name in OPERATOR_NAMES),
    *(
        patch
        for owner in (torch.overrides, torch.nn.functional, torch.functional, torch.nn.init)
        for patch in quiet(owner)
    ),
    *_asking(torch._tensor, _inline_has, _inline_has_unary, _inline_has_variadic),
    Patch(torch.overrides, "_pop_mode_temporarily", _patched_pop_mode_temporarily),
    Patch(torch.utils, "swap_tensors", _patched_swap),
    Patch(torch._C, "DisableTorchFunction", _WatchedDisabling),
    Patch(_APPLIED, "apply", classmethod(_patched_apply)),
    Patch(torch.autograd, "backward", _patched_backward),
    Patch(torch.autograd, "_engine_run_backward", _patched_engine),
    opaque(torch._C.ScriptFunction, "__call__", "script_function"),
    opaque(apis, "vmap_impl", "vmap", _transform_reason("vmap")),
    opaque(eager_transforms, "grad_impl", "grad", _transform_reason("grad")),
    opaque(
        eager_transforms,
        "grad_and_value_impl",
        "grad_and_value",
        _transform_reason("grad_and_value"),
    ),
    Patch(eager_transforms, "_vjp_with_argnums", _patched_vjp),
    opaque(eager_transforms, "_jvp_with_argnums", "jvp", _transform_reason("jvp")),
    *(
        Patch(owner, "functionalize", _patched_functionalize)
        for owner in (eager_transforms, torch.func)
    ),
    *(
        _unlogged(owner, name)
        for owner, names in _TRACERS.items()
        for name in names
        if hasattr(owner, name)
    ),
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
)
