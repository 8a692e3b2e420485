"""Entries for calls and tensors that torch does not report to the recorder.

An opaque call is recorded as one operation, whatever it calls. An unknown tensor becomes an entry
in three cases: if a module keeps it as a plain attribute (like a buffer), if its class wraps other
tensors, such as a masked tensor (they are its parents), or if it was taken out of a wrapper (its
parent). All others (tensors in closures, globals, legacy constructors) stay unknown.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from torchlens._capture.dispatch_watch import DispatchWatch, watching
from torchlens._capture.entries import TENSORS
from torchlens._capture.model_parts import Attributes
from torchlens._capture.observer import CallKind
from torchlens._capture.recorder import Recorder
from torchlens._recording.operations import (
    BUFFER,
    IDENTITY,
    KNOWN_OPERATIONS,
    Operation,
    named_operation,
)
from torchlens._recording.origin import version_of
from torchlens._recording.recording import References, Row
from torchlens._recording.unseen import NoTorchFunction
from torchlens._recording.wrappers import inner_of

Tensor = torch.Tensor


def record_opaque(
    recorder: Recorder,
    name: str,
    func: Callable[..., Any],
    run: Callable[[], Any],
    arguments: Any,
    captured: Iterable[int] = (),
) -> Any:
    """Records `run()` as one operation; of the calls inside it, only what they read and write
    counts.

    `captured` are further entries and parameters that it reads.
    """
    operation, frame = named_operation(name, func), sys._getframe(2)
    with NoTorchFunction():
        recorder.complete()
        references = recorder.references_to((arguments,), None)
        place = recorder.user_code(frame)
        observed = recorder.begin_observed(
            CallKind.OPAQUE, operation, (arguments,), None, references, (), place
        )
    collected: dict[int, None] = dict.fromkeys(captured)
    watch = DispatchWatch(recorder)
    start = perf_counter()
    recorder.collected = collected
    try:
        with watching(watch):
            result = run()
    except BaseException as error:
        recorder.fail(error, operation, (arguments,), None, references, frame, observed)
        raise
    finally:
        recorder.collected = None
    seconds = perf_counter() - start
    known = set(references.values())
    for entry in (*collected, *watch.read):
        if entry not in known:
            references["captured", entry] = entry
    call = recorder.made_call(operation, (arguments,), None, references, place, seconds)
    with NoTorchFunction():
        written = watch.written_among(arguments)
        if observed is not None:
            observed.written = written
        recorder.append_results(call, result, written)
        recorder.end_observed(observed, result)
    return result


def record_identity(recorder: Recorder, tensor: Tensor) -> int:
    """Adds an entry for a tensor that a module returned unchanged."""
    entry, entry_before = len(recorder.rows), recorder.entry_of(tensor)
    with NoTorchFunction():
        observed = recorder.begin_observed(
            CallKind.IDENTITY, IDENTITY, (tensor,), None, (entry_before,), (), (None, 0)
        )
        if recorder.gradients is not None:
            recorder.watch_arguments((tensor,), None)
        call = recorder.made_call(IDENTITY, (tensor,), None, (entry_before,), (None, 0))
        recorder.append(call, tensor, None)
        recorder.end_observed(observed, tensor)
    return entry


def record_made(
    recorder: Recorder,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensor: Tensor,
) -> None:
    """Adds an entry for a tensor that `func` has just made."""
    operation, place = KNOWN_OPERATIONS[func], recorder.user_code(sys._getframe(2))
    with NoTorchFunction():
        references = recorder.references_to(args, kwargs)
        observed = recorder.begin_observed(
            CallKind.FUNCTION, operation, args, kwargs, references, (), place
        )
        call = recorder.made_call(operation, args, kwargs, references, place)
        recorder.append(call, tensor, None)
        recorder.end_observed(observed, tensor)


def record_swap(
    recorder: Recorder, first: Tensor, second: Tensor, swap: Callable[[], None]
) -> None:
    """Records `torch.utils.swap_tensors`: each tensor becomes an entry that reads the other one."""
    place = recorder.user_code(sys._getframe(2))
    with NoTorchFunction():
        recorder.complete()
        pair = (first, second)
        references = recorder.references_to(pair, None)
        observed = recorder.begin_observed(
            CallKind.FUNCTION, _SWAP, pair, None, references, pair, place
        )
        recorder.memory.exchange(first, second, swap)
        for index, tensor in enumerate(pair):
            call = recorder.made_call(_SWAP, pair, None, references, place)
            recorder.append(call, tensor, index, is_written=True)
            recorder.stand_for(tensor, len(recorder.rows) - 1)
        recorder.end_observed(observed, pair)


_SWAP = Operation(torch.utils.swap_tensors, "swap_tensors", "swaptensors", written=(0, 1))


def tie_function(
    recorder: Recorder,
    name: str,
    func: Any,
    args: tuple[Any, ...],
    outputs: Sequence[Tensor],
    first: int,
    before: Sequence[int | None],
) -> None:
    """Links the outputs of a custom autograd function, whose nodes exist only after it returned.

    An output becomes an entry of the function, with its arguments as parents, if no recorded
    operation made it, or if its ancestors do not lead back to before the function (it went through
    numpy, say). `before` are the arguments' entries before the call, and `first` is the first entry
    that the call made.
    """
    place = recorder.user_code(sys._getframe(2))
    operation = named_operation(name, func)
    with NoTorchFunction():
        recorder.complete()
        references = recorder.references_to(args, None)
        observed = recorder.begin_observed(
            CallKind.AUTOGRAD, operation, args, None, references, (), place, first
        )
        for index, tensor in enumerate(outputs):
            entry = recorder.entry_of(tensor) if recorder.has_own_entry(tensor) else None
            if entry is not None and (entry < first or _leads_outside(recorder, entry, first)):
                if entry >= first and tensor.grad_fn is not None:
                    recorder.rows[entry] = recorder.rows[entry]._replace(
                        gradfunc=type(tensor.grad_fn).__name__
                    )
                    own_before = [
                        known for arg, known in zip(args, before, strict=True) if tensor is arg
                    ]
                    is_argument = bool(own_before)  # see `mark_dirty`
                    if is_argument and tensor._is_view():
                        if not recorder.note_slice(entry, tensor, own_before[0]):
                            recorder.hidden_writes.add(entry)
                    elif recorder.gradients is not None:
                        if is_argument:
                            # The write was hooked at the node of the earlier entry.
                            recorder.gradients.gradients.forget_reaching(entry)
                        recorder.gradients.watch(entry, tensor)
                    if is_argument and recorder.memory.values[entry] is tensor:
                        # `mark_dirty` raises the version once more.
                        recorder.memory.versions[entry] = version_of(tensor)
                continue
            read = _read_inside(recorder, tensor, first) or references
            call = recorder.made_call(operation, args, None, read, place)
            recorder.append(call, tensor, None if len(outputs) == 1 else index)
        recorder.end_observed(observed, outputs)


def _read_inside(recorder: Recorder, tensor: Tensor, first: int) -> References:
    """Refers a wrapper output to the entry of its inner tensor, if the function made it."""
    inner = inner_of(tensor)
    entry = None if inner is None else recorder.entry_of(inner)
    return {} if entry is None or entry < first else {("captured", entry): entry}


def _leads_outside(recorder: Recorder, entry: int, first: int) -> bool:
    """True if an entry since `first` depends on an earlier entry, a parameter or an attribute."""
    pending, seen = [entry], {entry}
    while pending:
        references = recorder.rows[pending.pop()].references
        for parent in references.values() if isinstance(references, dict) else references:
            if parent is not None and parent not in seen:
                if parent < first or recorder.rows[parent].operation is BUFFER:
                    return True
                seen.add(parent)
                pending.append(parent)
    return False


def came_back(recorder: Recorder) -> str | None:
    """A warning if values left torch and tensors were made of NumPy's arrays afterwards.

    What a custom autograd function makes of them has the function's arguments as parents.
    """
    if recorder.first_handed_out is None:
        return None
    storages, rows = recorder.memory.storages, recorder.rows
    of_functions = {storages[entry] for entry, row in enumerate(rows) if _is_of_function(row)}
    names = {
        row.operation.name: None
        for entry, row in enumerate(rows[recorder.first_handed_out :], recorder.first_handed_out)
        if not any(reference is not None for reference in row.references)
        and _is_of_array(row)
        and storages[entry] not in of_functions
    }
    if not names:
        return None
    return (
        f"values left torch (numpy) and came back ({', '.join(names)}): what was computed between "
        "has no entries, and the tensors made of it have no parents"
    )


def _is_of_function(row: Row) -> bool:
    func: Any = row.operation.func
    return isinstance(func, type) and issubclass(func, torch.autograd.Function)


def _is_of_array(row: Row) -> bool:
    """True if a call made a tensor of an array of another library."""
    if row.operation.name in ("from_numpy", "frombuffer", "from_dlpack"):
        return True
    return row.operation.name in ("asarray", "as_tensor", "tensor") and any(
        isinstance(arg, np.ndarray) for arg in row.args
    )


class UnseenTensors:
    """Makes entries for unknown tensors when they first occur."""

    def __init__(self, attributes: Attributes) -> None:
        self._attributes = attributes
        # Attribute tensors found so far: address, entry, tensor.
        self.met: list[tuple[str, int, Tensor]] = []

    def meet(self, recorder: Recorder, tensor: Tensor) -> int | None:
        """The new entry of an unknown tensor; None if it stays unknown."""
        with NoTorchFunction():
            address = self._attributes.address_of(tensor)
            if address is not None:
                entry = recorder.add_source(BUFFER, tensor)
                recorder.memory.meet(entry, tensor)
                self.met.append((address, entry, tensor))
                return entry
            if recorder.collected is not None:
                return None
            return (
                _unwrapped(recorder, tensor)
                if type(tensor) in TENSORS
                else _wrapped(recorder, tensor)
            )


def is_of_unseen(operation: Operation) -> bool:
    """True if an entry is a wrapper or an unwrapped tensor, which no recorded call made."""
    func: Any = operation.func
    is_wrapper = (
        isinstance(func, type)
        and issubclass(func, Tensor)
        and func not in (Tensor, torch.nn.Parameter)
    )
    return func is getattr or is_wrapper


def _unwrapped(recorder: Recorder, tensor: Tensor) -> int | None:
    """An entry for a tensor that a wrapper holds; None if no known wrapper holds it."""
    holder, name, held = recorder.held.get(id(tensor), (0, "", None))
    if held is None or held() is not tensor:
        return None
    return _append(recorder, named_operation(name, getattr), (), (holder,), tensor)


def _wrapped(recorder: Recorder, tensor: Tensor) -> int | None:
    """An entry for a wrapper; None if none of the tensors in it is known."""
    inside = tuple(part for part in vars(tensor).values() if isinstance(part, Tensor))
    references = tuple(recorder.entry_of(part) for part in inside)
    if all(reference is None for reference in references):
        return None
    return _append(
        recorder, named_operation(type(tensor).__name__, type(tensor)), inside, references, tensor
    )


def _append(
    recorder: Recorder,
    operation: Operation,
    args: tuple[Tensor, ...],
    references: tuple[int | None, ...],
    tensor: Tensor,
) -> int:
    place = recorder.user_code(sys._getframe(2))
    entry = len(recorder.rows)
    recorder.keep_args(args, None)
    recorder.append(recorder.made_call(operation, args, None, references, place), tensor, None)
    return entry
