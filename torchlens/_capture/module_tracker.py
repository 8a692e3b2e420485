"""Entering and leaving modules."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from torchlens._capture.model_parts import Parts
from torchlens._capture.recorder import Recorder
from torchlens._capture.unreported import record_identity, record_opaque
from torchlens._recording.recording import ModuleCall
from torchlens._recording.trees import named_tensors
from torchlens._recording.user_code import KNOWN_CODE

_module_call: Callable[[tuple[Any, ...]], ModuleCall] = partial(
    tuple.__new__, ModuleCall
)  # `_make` at half the price
_known_code = KNOWN_CODE.get
_Tensor = torch.Tensor
_ONLY_TENSORS = frozenset({_Tensor})
_MODULE_CALL = torch.nn.Module._wrapped_call_impl.__code__


def patched_call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces the code of `nn.Module._call_impl` while a log or a measurement runs: as torch's
    own, but it reports to the tracker and the watcher.

    It runs among the names of torch's module, into which `_torchlens_current` is put for the time
    being. The module's `forward` is called from here, as torch calls it from here: a model that
    nests as deep as Python allows still can.
    """
    try:
        current = _torchlens_current  # type: ignore[name-defined]
    # between the call and this line, another thread's log has ended: here stands torch's own again
    except NameError:
        return self._call_impl(*args, **kwargs)
    watcher, tracker = current.watcher, current.tracker
    if (
        watcher is not None and not torch.compiler.is_compiling()
    ):  # the compiler, if it traces this, sees no watcher
        enter = current.clock()
        if watcher.begins_with(self):
            return watcher.call(self, args, kwargs)
        call = None if tracker is None else tracker.enter(self, args, kwargs)
        watched = watcher.enter(self, args, kwargs, enter)
    else:
        call, watched = None if tracker is None else tracker.enter(self, args, kwargs), None
    forward = self._slow_forward if torch._C._get_tracing_state() else self.forward
    has_hooks = (
        self._backward_hooks or self._backward_pre_hooks
        or self._forward_hooks or self._forward_pre_hooks
        or _global_backward_pre_hooks or _global_backward_hooks  # type: ignore[name-defined] # noqa: F821
        or _global_forward_hooks or _global_forward_pre_hooks  # type: ignore[name-defined] # noqa: F821
    )  # fmt: skip
    if call is None and watched is None:
        return current.call_impl(self, *args, **kwargs) if has_hooks else forward(*args, **kwargs)
    try:
        if call is not None and tracker.scripted and id(self) in tracker.scripted:
            result = tracker.run_scripted(current.call_impl, self, args, kwargs)
        else:
            result = (
                current.call_impl(self, *args, **kwargs) if has_hooks else forward(*args, **kwargs)
            )
    except BaseException as error:
        if watched is not None:
            watcher.end(watched)
        if call is not None:
            tracker.fail(call, error)
        if watched is not None:
            watcher.fail(watched, error, args, kwargs)
        raise
    if watched is None:
        tracker.leave(call, result)
        return result
    watcher.end(watched)
    if call is not None:
        tracker.leave(call, result)
    watcher.leave(watched, result, args, kwargs)
    return result


class ModuleTracker:
    """Writes down each call of a model's modules.

    `saved_addresses` are modules (`features.6`, or `features.6:2` for one pass) whose outputs are
    to be saved.
    """

    def __init__(
        self, parts: Parts, recorder: Recorder, saved_addresses: Iterable[str] = ()
    ) -> None:
        self.recorder = recorder
        self.entries: list[tuple[int, list[int]]] = []
        self.exits: list[tuple[int, list[int]]] = []
        # Whether a saved output may be another than was asked for: it was written to, through a
        # view, between its operation and the module's return; or threads called modules, and which
        # call was the second is known when all are over.
        self.is_uncertain = False
        # Called when the model compiles something.
        self.on_compile: Callable[[], None] | None = None
        recorder.module_code = patched_call_impl.__code__
        self._saved_addresses = frozenset(saved_addresses)
        self.saved: set[int] = set()  # the entries that came out of these modules
        self._addresses = parts.addresses
        self.scripted = parts.scripted
        self._outside_modules: list[Any] = []  # alive, so that no other gets their ids
        self._rows_before = [0]  # how many rows there were when each call began
        self._num_calls: dict[str, int] = {}

    def enter(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], depth: int = 2
    ) -> int | None:
        """Takes note of what goes into a module; returns the number of the call, which `leave` or
        `fail` is to be told.

        None for a module that leaves no record, 0 for the model itself. Entering and leaving are
        two functions, not one around the module: that would stand on the stack once for each level
        of nesting, and the stack has a limit.
        """
        recorder = self.recorder
        address = self._addresses.get(id(module))
        if (
            address is None or not recorder.is_on()
        ):  # not one of the model's, or part of an operation
            return self._enter_outside_module(module)
        if not address:
            return 0
        frame: Any = sys._getframe(depth)  # past the patched `_call_impl`
        if frame.f_code is _MODULE_CALL:
            frame = frame.f_back
        code, instruction = frame.f_code, frame.f_lasti
        known = _known_code(id(code))
        if known is None or not known[0]:
            code, instruction = recorder.user_code(frame)
        pass_num = self._num_calls[address] = self._num_calls.get(address, 0) + 1
        call = len(recorder.module_calls)
        recorder.module_calls.append(
            _module_call((address, pass_num, recorder.module_call, code, instruction))
        )
        self.entries.append((call, self._given(args, kwargs)))
        self._rows_before.append(len(recorder.rows))
        recorder.module_call = call
        return call

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """The entries among the arguments of a module."""
        if len(args) == 1 and not kwargs and type(args[0]) is _Tensor:
            entry = self.recorder.number_of(args[0])
            if entry is None:
                entry = self.recorder.meet(args[0])
            return [entry] if entry is not None and entry >= 0 else []
        is_plain = not kwargs and _ONLY_TENSORS.issuperset(map(type, args))
        return self._entries_of(args if is_plain else _tensors_in((args, kwargs)))

    def _enter_outside_module(self, module: Any) -> int | None:
        """A module that is not the model's leaves no record; but one that was compiled as the model
        ran is an operation.
        """
        if not isinstance(module, torch.jit.ScriptModule) or not self.recorder.is_on():
            return None
        self.scripted.add(id(module))
        self._outside_modules.append(module)
        return 0

    def leave(self, call: int, result: Any) -> None:
        """Takes note of what came out."""
        if not call:
            return
        recorder = self.recorder
        tensors = (
            (result,)
            if type(result) is _Tensor
            else [tensor for _, tensor in named_tensors(result)]
        )
        try:
            made = self._made_inside(call, result)
            self.exits.append((call, self._returned(call, tensors) if made is None else [made]))
        finally:
            recorder.module_call = recorder.module_calls[call].parent
            if call in recorder.handed_back:
                recorder.undo_handing_back(call, tensors)

    def _made_inside(self, call: int, result: Any) -> int | None:
        """The entry of a plain result that the call made; None if that takes a closer look."""
        if type(result) is not _Tensor:
            return None
        recorder, memory = self.recorder, self.recorder.memory
        if self._saved_addresses and (
            not recorder.saves_all or memory.writes or memory.may_die
        ):  # the value to save may be another one
            return None
        made = recorder.number_of(result)
        if made is None or made < self._rows_before[call]:
            return None
        if self._saved_addresses and self._is_saved(call):
            self.saved.add(made)
        return made

    def _returned(self, call: int, tensors: Iterable[torch.Tensor]) -> list[int]:
        """The entries that a call returned. What it was given and hands back becomes a new one."""
        recorder = self.recorder
        returned = []
        for tensor in tensors:
            entry = recorder.entry_of(tensor)
            is_older = entry is not None and 0 <= entry < self._rows_before[call]
            if entry is None:
                entry = recorder.meet(tensor)
                is_older = entry is not None
            if is_older:
                entry = record_identity(recorder, tensor)
            if entry is not None and entry >= 0:
                returned.append(entry)
                if self._saved_addresses and self._is_saved(call):
                    self._save_output(entry, tensor)
        return returned

    def fail(self, call: int, error: BaseException) -> None:
        """The module raised: where something other than an operation did, the place is where the
        traceback ends.
        """
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        self.recorder.fail(error, None, (), None, (), place.tb_frame if place else None)
        if call:
            self.recorder.module_call = self.recorder.module_calls[call].parent
            if call in self.recorder.handed_back:
                self.recorder.undo_handing_back(call, ())

    def share(self) -> None:
        """Other threads are going to call modules, too."""
        self.is_uncertain = bool(self._saved_addresses)

    def run_scripted(
        self, original: Callable[..., Any], module: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Runs a scripted module, which is one operation."""
        name = getattr(module, "original_name", type(module).__name__)
        arguments = (args, kwargs, list(module.parameters()))
        return record_opaque(
            self.recorder, name, module, lambda: original(module, *args, **kwargs), arguments
        )

    def _save_output(self, entry: int, tensor: torch.Tensor) -> None:
        memory = self.recorder.memory
        with torch._C.DisableTorchFunction():
            self.recorder.complete()
            is_written = memory.is_written_since(entry)
            memory.save(entry, tensor, is_written and entry not in self.saved)
        self.saved.add(entry)
        self.is_uncertain |= is_written

    def _is_saved(self, call: int) -> bool:
        address, pass_num, *_ = self.recorder.module_calls[call]
        return address in self._saved_addresses or f"{address}:{pass_num}" in self._saved_addresses

    def _entries_of(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        entries = dict.fromkeys([self.recorder.meet(tensor) for tensor in tensors])
        return [entry for entry in entries if entry is not None and entry >= 0]


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    """Tensors that a module is given. A cache object that is handed through is not looked into."""
    found: list[torch.Tensor] = []
    pending = [tree]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple | deque):
            pending.extend(reversed(item))
        elif isinstance(item, Mapping):
            pending.extend(reversed(list(item.values())))
        elif item is not None and is_dataclass(item) and not isinstance(item, type):
            pending.extend(getattr(item, own.name, None) for own in reversed(fields(item)))
    return found
