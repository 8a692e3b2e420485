"""Records collectives and point-to-point operations of torch.distributed.

A torch function mode does not see these calls. The functions of torch.distributed end in methods of
its process groups, so the methods are patched (see `distributed_patches.py`); this catches a
function under any reference. The functional collectives that DTensor uses
(`torch.ops._c10d_functional`) are reported like any other operation.

All of them are asynchronous: the result is valid only after a wait, and its memory may be written
at any time before. An entry is made when the operation starts, and its value is saved when the wait
returns.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from types import FrameType
from typing import Any

import torch

from torchlens._capture.entries import written_by
from torchlens._capture.observer import CallKind
from torchlens._capture.recorder import Recorder
from torchlens._recording.operations import Kind, Operation, layer_type, named_operation
from torchlens._recording.regions import storage_of
from torchlens._recording.trees import plain_tensors
from torchlens._recording.unseen import NoTorchFunction
from torchlens._recording.user_code import is_user_code

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupMethod:
    """A method of a process group, the torch.distributed functions that call it, and its arguments.

    If several functions call the method, the first is used where user code calls the method
    directly. `arguments` has the role of each tensor argument, in the order of the function: "both"
    is read and written, "in" is read, "out" is overwritten. `is_listed`: the method takes its
    tensors in one more list than the function does.
    """

    functions: tuple[str, ...]
    arguments: tuple[str, ...]
    is_listed: bool = True
    rank: str = ""  # the function's name for its root or peer rank


_OUT_IN = ("out", "in")
_GATHER_SINGLE = ("all_gather_into_tensor", "all_gather_single", "_all_gather_base")
_SCATTER_SINGLE = ("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base")
GROUP_METHODS: dict[str, GroupMethod] = {
    "allreduce": GroupMethod(("all_reduce",), ("both",)),
    "allreduce_coalesced": GroupMethod(("all_reduce_coalesced",), ("both",), is_listed=False),
    "broadcast": GroupMethod(("broadcast",), ("both",), rank="group_src"),
    "reduce": GroupMethod(("reduce",), ("both",), rank="group_dst"),
    "allgather": GroupMethod(("all_gather",), _OUT_IN),
    "_allgather_base": GroupMethod(_GATHER_SINGLE, _OUT_IN),
    "all_gather_single": GroupMethod(_GATHER_SINGLE, _OUT_IN),
    "allgather_coalesced": GroupMethod(("all_gather_coalesced",), _OUT_IN, is_listed=False),
    "allgather_into_tensor_coalesced": GroupMethod(_GATHER_SINGLE, _OUT_IN, is_listed=False),
    "all_gather_single_coalesced": GroupMethod(_GATHER_SINGLE, _OUT_IN, is_listed=False),
    "gather": GroupMethod(("gather",), ("in", "out"), rank="group_dst"),
    "scatter": GroupMethod(("scatter",), _OUT_IN, rank="group_src"),
    "reduce_scatter": GroupMethod(("reduce_scatter",), _OUT_IN),
    "_reduce_scatter_base": GroupMethod(_SCATTER_SINGLE, _OUT_IN),
    "reduce_scatter_single": GroupMethod(_SCATTER_SINGLE, _OUT_IN),
    "reduce_scatter_tensor_coalesced": GroupMethod(_SCATTER_SINGLE, _OUT_IN, is_listed=False),
    "reduce_scatter_single_coalesced": GroupMethod(_SCATTER_SINGLE, _OUT_IN, is_listed=False),
    "alltoall": GroupMethod(("all_to_all",), _OUT_IN, is_listed=False),
    "alltoall_base": GroupMethod(("all_to_all_single",), _OUT_IN, is_listed=False),
    "all_to_all_single": GroupMethod(("all_to_all_single",), _OUT_IN, is_listed=False),
    "send": GroupMethod(("send", "isend"), ("in",), rank="group_dst"),
    "recv": GroupMethod(("recv", "irecv"), ("out",), rank="group_src"),
    "recv_anysource": GroupMethod(("recv", "irecv"), ("out",)),
}


@cache
def _operation(function: str, is_inplace: bool) -> Operation:
    func = getattr(torch.distributed, function, None) or getattr(
        torch.distributed.distributed_c10d, function
    )
    return Operation(
        func, function, layer_type(function), Kind.COLLECTIVE, (0,) if is_inplace else ()
    )


def _function_of(method: GroupMethod, frame: FrameType | None) -> str:
    """The torch.distributed function that user code called; these functions call each other."""
    called = method.functions[0]
    while frame is not None and len(method.functions) > 1 and not is_user_code(frame.f_code):
        called = frame.f_code.co_name if frame.f_code.co_name in method.functions else called
        frame = frame.f_back
    return called


def _is_called_by_user(frame: FrameType | None) -> bool:
    """True if user code called the torch.distributed function that led to `frame`."""
    while frame is not None and frame.f_code.co_filename.endswith(
        ("distributed_c10d.py", "c10d_logger.py")
    ):
        frame = frame.f_back
    return frame is not None and is_user_code(frame.f_code)


def _wait(work: Any) -> Any:
    return work.wait()


_WAIT = named_operation("wait", _wait)


@dataclass(slots=True, eq=False)
class Unfinished:
    """Entries of an asynchronous operation that has started but has not been waited for.

    `handle` is what the process group returned, or the result of a functional collective.
    """

    handle: Any
    entries: list[int]
    tensors: list[Tensor]
    # False if a part of torch that uses torch.distributed itself, such as DDP, started it.
    is_users: bool = True

    def is_awaited(self) -> bool:
        """True if a functional collective was waited for outside the recorder's view.

        Using the result of a functional collective waits for it.
        """
        return isinstance(self.handle, Tensor) and _num_functional() == 0


# -- start


def record_collective(
    recorder: Recorder,
    name: str,
    run: Callable[[], Any],
    group: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Records the call `run()` of the process group method `name`."""
    method = GROUP_METHODS[name]
    # Methods take written tensors first; functions with two tensor arguments may not.
    roles = tuple(sorted(method.arguments, reverse=True))
    given = {role: _argument(role, at, args, kwargs) for at, role in enumerate(roles)}
    if method.is_listed:
        given = {role: _unlisted(tree) for role, tree in given.items()}
    described = _described(method, group, args[len(roles) :], kwargs)
    return _record(recorder, method, given, described, run, sys._getframe(2))


def record_broadcast(
    recorder: Recorder, run: Callable[[], Any], group: Any, tensors: Sequence[Tensor], source: int
) -> Any:
    """Records the coalesced broadcast by which DDP synchronises buffers between ranks."""
    described = {"group_src": source, "group": _ranks(group)}
    return _record(
        recorder,
        GROUP_METHODS["broadcast"],
        {"both": list(tensors)},
        described,
        run,
        sys._getframe(2),
    )


def _record(
    recorder: Recorder,
    method: GroupMethod,
    given: dict[str, Any],
    described: dict[str, Any],
    run: Callable[[], Any],
    frame: FrameType,
) -> Any:
    operation = _operation(_function_of(method, frame), method.arguments == ("both",))
    args = tuple(given[role] for role in method.arguments)
    read = tuple(None if role == "out" else given[role] for role in method.arguments)
    written = [tensor for role in ("both", "out") for _, tensor in plain_tensors(given.get(role))]
    place = recorder.user_code(frame)
    with NoTorchFunction():
        references = recorder.references_to(read, None)
        observed = recorder.prepare(
            CallKind.COLLECTIVE, operation, args, described, references, written, place
        )
    start = perf_counter()
    try:
        with recorder.unrecorded():
            work = run()
    except BaseException as error:
        recorder.fail(error, operation, args, described, references, frame, observed)
        raise
    seconds = perf_counter() - start
    with NoTorchFunction():
        call = recorder.made_call(operation, args, described, references, place, seconds)
        # An operation that only sends has no result; its entry shows the tensor that was sent.
        result = given.get("out", given.get("both")) if written else given.get("in")
        # A call that writes several tensors in place counts as one operation per tensor: each reads
        # only itself.
        is_each = isinstance(given.get("both"), list | tuple)
        each_reads = (
            [{(0, index): references[0, index]} for index in range(len(written))] if is_each else ()
        )
        recorder.append_results(call, result, written, not written, not written, each_reads)
        recorder.end_observed(observed, work)
    if written:
        _begin(recorder, work, written, _is_called_by_user(frame))
    return work


def record_functional(
    recorder: Recorder,
    operation: Operation,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> Any:
    """Records a functional collective, whose result is valid only after `wait_tensor`."""
    if operation.name == "_wrap_tensor_autograd":
        return _wrap(recorder, operation, func, args, kwargs)
    frame = sys._getframe(3)
    place = recorder.user_code(frame)
    references = recorder.references_to(args, kwargs)
    written = written_by(operation, args, kwargs)
    observed = recorder.prepare(
        CallKind.COLLECTIVE, operation, args, kwargs, references, written, place
    )
    start = perf_counter()
    try:
        result = func(*args, **(kwargs or {}))
    except BaseException as error:
        recorder.fail(error, operation, args, kwargs, references, frame, observed)
        raise
    seconds = perf_counter() - start
    is_wait = operation.name == "wait_tensor"
    if is_wait:
        _finish_tensor(recorder, args[0] if args else (kwargs or {})["tensor"], seconds)
    call = recorder.made_call(operation, args, kwargs, references, place, seconds)
    recorder.append_results(call, result, written, is_finished=is_wait)
    recorder.end_observed(observed, result)
    tensors = [tensor for _, tensor in plain_tensors(result)]
    if not is_wait and tensors:
        _begin(recorder, tensors[0], tensors)
    return result


def _wrap(
    recorder: Recorder,
    operation: Operation,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> Any:
    """Registers a tensor that waits on first use under the entry of the result it wraps."""
    observed = recorder.begin_observed(
        CallKind.COLLECTIVE, operation, args, kwargs, (), (), (None, 0)
    )
    result = func(*args, **(kwargs or {}))
    recorder.end_observed(observed, result)
    entry = recorder.entry_of(args[0])
    if entry is not None and isinstance(result, Tensor):
        recorder.stand_in(entry, result)
    return result


def _begin(recorder: Recorder, handle: Any, tensors: list[Tensor], is_users: bool = True) -> None:
    with NoTorchFunction():
        entries = [
            entry for entry in map(recorder.entry_of, tensors) if entry is not None and entry >= 0
        ]
        # No handle: this process is not in the group, or one handle covers several operations.
        if handle is None:
            recorder.finish_entries(entries)
        else:
            recorder.unfinished.append(Unfinished(handle, entries, tensors, is_users))


# -- wait


def record_wait(recorder: Recorder, run: Callable[[], Any], work: Any = None) -> Any:
    """Records the wait `run()` for a handle `work`, or a barrier if `work` is None.

    Some back ends write the result only during the wait.
    """
    mine = [unfinished for unfinished in recorder.unfinished if unfinished.handle is work]
    written = [tensor for unfinished in mine for tensor in unfinished.tensors]
    with NoTorchFunction():
        observed = recorder.begin_observed(
            CallKind.COLLECTIVE, _WAIT, (), None, (), written, (None, 0)
        )
    start = perf_counter()
    try:
        with recorder.unrecorded():
            result = run()
    except BaseException as error:
        operation = (
            recorder.rows[mine[0].entries[0]].operation if mine and mine[0].entries else _WAIT
        )
        recorder.fail(error, operation, (), None, (), sys._getframe(2), observed)
        for unfinished in mine:
            recorder.unfinished.remove(unfinished)
            recorder.drop_entries(unfinished.entries)
        raise
    seconds = perf_counter() - start
    with NoTorchFunction():
        recorder.end_observed(observed, result)
    for unfinished in mine:
        _finish(recorder, unfinished, seconds)
    return result


def _finish_tensor(recorder: Recorder, tensor: Tensor, seconds: float) -> None:
    storage = storage_of(tensor)
    for unfinished in list(recorder.unfinished):
        if isinstance(unfinished.handle, Tensor) and storage in map(storage_of, unfinished.tensors):
            _finish(recorder, unfinished, seconds)


def _finish(recorder: Recorder, unfinished: Unfinished, seconds: float) -> None:
    recorder.unfinished.remove(unfinished)
    for entry in unfinished.entries:
        row = recorder.rows[entry]
        recorder.rows[entry] = row._replace(seconds=row.seconds + seconds)
    with NoTorchFunction():
        recorder.finish_entries(unfinished.entries)


def finish_collectives(recorder: Recorder) -> list[Tensor]:
    """Ends the unfinished operations of a pass; returns the tensors that may still be written.

    Completed operations count as waited for; the entries of others get no value. This function does
    not block: another process may be waiting for this one to reach the code after the log.
    """
    under_way: list[Tensor] = []
    for unfinished in list(recorder.unfinished):
        if _is_done(unfinished.handle):
            _finish(recorder, unfinished, 0.0)
            continue
        recorder.drop_entries(unfinished.entries)
        under_way += unfinished.tensors
        for name in {
            recorder.rows[entry].operation.name
            for entry in unfinished.entries
            if unfinished.is_users
        }:
            reason = (
                f"{name} was begun but not waited for before the forward pass ended: its result "
                "has no saved value"
            )
            if reason not in recorder.warnings:
                recorder.warnings.append(reason)
    recorder.unfinished.clear()
    return under_way


def _is_done(handle: Any) -> bool:
    # A functional collective: every process has started it, and using its result waits for it.
    if isinstance(handle, Tensor):
        with NoTorchFunction():
            torch.ops._c10d_functional.wait_tensor(handle)
        return True
    if handle.is_completed():
        return True
    # The future may be done before the operation itself is marked as completed.
    try:
        return bool(handle.get_future().done())
    except (NotImplementedError, RuntimeError):  # a back end without futures
        return False


# -- arguments


def _argument(role: str, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument of a process group method that has this role; None if it is missing."""
    if position < len(args):
        return args[position]
    start = {"out": "output", "in": "input"}.get(role, "tensor")
    return next(
        (value for name, value in kwargs.items() if name.startswith((start, "tensor"))), None
    )


def _unlisted(tree: Any) -> Any:
    """`tree` without its outermost list; None if that list is empty."""
    if isinstance(tree, list | tuple) and len(tree) <= 1:
        return tree[0] if tree else None
    return tree


def _described(
    method: GroupMethod, group: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments other than tensors, under torch.distributed's names, as plain Python values."""
    found: dict[str, Any] = {}
    for value in (*rest, *kwargs.values()):
        op = getattr(value, "reduceOp", value if hasattr(value, "RedOpType") else None)
        if op is not None:
            found["op"] = getattr(getattr(op, "op", op), "name", str(op))
        if method.rank and method.rank not in found:
            root = getattr(value, "rootRank", value if isinstance(value, int) else None)
            if root is not None:
                found[method.rank] = int(root)
    if method.functions == ("all_to_all_single",):
        sizes = [
            list(value) for value in (*rest, *kwargs.values()) if isinstance(value, list | tuple)
        ]
        if any(sizes):
            found.update(zip(("output_split_sizes", "input_split_sizes"), sizes, strict=False))
    return found | {"group": _ranks(group)}


def _ranks(group: Any) -> str:
    """The ranks in a process group, or its size if torch does not know the ranks.

    torch does not know them if a back end is called directly.
    """
    try:
        return f"ranks {', '.join(map(str, torch.distributed.get_process_group_ranks(group)))}"
    except (KeyError, ValueError, RuntimeError):
        return f"{group.size()} ranks"


# -- counts


def _num_functional() -> int | None:
    """The number of functional collectives not waited for; None if unknown."""
    count = getattr(torch._C._distributed_c10d, "_get_work_registry_size", None)
    return None if count is None else int(count())


def num_collectives() -> int | None:
    """The number of collectives that this process has started, at any level; None if unknown."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 0
    try:
        groups: Any = distributed.distributed_c10d._world.pg_map
        return sum(group._get_sequence_number_for_group() for group in groups)
    except (AttributeError, RuntimeError):
        # Another version of torch, or a back end without sequence numbers.
        return None
