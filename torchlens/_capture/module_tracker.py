"""Tracks entering and leaving modules."""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from torchlens._capture.model_parts import Parts, named_modules
from torchlens._capture.recorder import Recorder
from torchlens._capture.selection import Selection
from torchlens._capture.unreported import record_identity, record_opaque
from torchlens._recording.recording import ModuleCall
from torchlens._recording.trees import Path, named_tensors
from torchlens._recording.unseen import NoTorchFunction
from torchlens._recording.user_code import KNOWN_CODE

# Faster than `_make`.
_module_call: Callable[[tuple[Any, ...]], ModuleCall] = partial(tuple.__new__, ModuleCall)
_known_code = KNOWN_CODE.get
_Tensor = torch.Tensor
_ONLY_TENSORS = frozenset({_Tensor})
_MODULE_CALL = torch.nn.Module._wrapped_call_impl.__code__


def patched_call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces the code of `nn.Module._call_impl` during a log or measurement: reports to tracker
    and watcher.

    It runs with the globals of torch's module, to which `_torchlens_current` is added meanwhile. It
    calls `forward` directly, as torch does, so that models nested to Python's recursion limit still
    run.
    """
    try:
        current = _torchlens_current  # type: ignore[name-defined]
    # The log of another thread has just ended and restored torch's own code.
    except NameError:
        return self._call_impl(*args, **kwargs)
    watcher, tracker = current.watcher, current.tracker
    # While torch.compile traces this, it must not see the watcher.
    if watcher is not None and not torch.compiler.is_compiling():
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
    """Records each call of a model's modules, and saves the outputs of those in `selection`."""

    def __init__(
        self, parts: Parts, recorder: Recorder, selection: Selection | None = None
    ) -> None:
        self.recorder = recorder
        self.entries: list[tuple[int, list[int]]] = []
        self.exits: list[tuple[int, list[int]]] = []
        self.parts: list[tuple[int, Path, int]] = []  # see Recording.module_parts
        # With other threads; pass numbers are then known only after the pass.
        self.is_shared = False
        # Called when the model compiles something.
        self.on_compile: Callable[[], None] | None = None
        recorder.module_code = patched_call_impl.__code__
        self._selection = selection
        self.saved: set[int] = set()  # entries that these modules returned
        self._parts = parts
        self._addresses = parts.addresses
        self.scripted = parts.scripted
        self._outside_modules: list[Any] = []  # kept alive so that ids stay unique
        self._classes = parts.classes
        # Names the tensors of modules that are found during the pass; None: such modules are not
        # recorded, as in the log of a model that calls others.
        self.name_tensor: Callable[[str, torch.Tensor], None] | None = None
        # Modules that have been looked for among those that the model made in the pass.
        self._strangers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._rows_before = [0]  # the number of rows at the start of each call
        self._num_calls: dict[str, int] = {}

    def enter(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], depth: int = 2
    ) -> int | None:
        """Records the start of a module call; returns its number, for `leave` or `fail`.

        None for a module that is not recorded, 0 for the model itself. Entering and leaving are two
        functions, because one function around the module would add a stack frame per level of
        nesting.
        """
        recorder = self.recorder
        address = self._addresses.get(id(module))
        if address is None and recorder.is_on():
            if self.name_tensor is not None:
                address = self._name_late(module)
            elif module not in self._strangers:
                self._strangers.add(module)
                self._parts.find_new_modules()
                address = self._addresses.get(id(module))
        # Not a module of the model, or called inside an operation.
        if address is None or not recorder.is_on():
            return self._enter_outside_module(module)
        if not address:
            return 0
        frame: Any = sys._getframe(depth)  # above the patched `_call_impl`
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
        """Returns None for a module outside the model; 0 for one that was scripted during the pass.

        The latter is recorded as an operation.
        """
        if not isinstance(module, torch.jit.ScriptModule) or not self.recorder.is_on():
            return None
        self.scripted.add(id(module))
        self._outside_modules.append(module)
        return 0

    def _name_late(self, module: Any) -> str:
        """Names a module that nothing led to before the pass, and those in it, by its class."""
        assert self.name_tensor is not None
        self._outside_modules.append(module)
        name, number = type(module).__name__, 2
        while name in self._classes:
            name, number = f"{type(module).__name__}_{number}", number + 1
        for inner, own in named_modules(module):
            address = f"{name}.{inner}" if inner else name
            self._addresses.setdefault(id(own), address)
            self._classes[address] = type(own).__name__
            for key, tensor in chain(own._parameters.items(), own._buffers.items()):
                if tensor is not None:
                    self.name_tensor(f"{address}.{key}", tensor)
        return self._addresses[id(module)]

    def leave(self, call: int, result: Any) -> None:
        """Records the end of a module call."""
        if not call:
            return
        recorder = self.recorder
        named: list[tuple[Path, _Tensor]]
        named = [((), result)] if type(result) is _Tensor else named_tensors(result)
        try:
            made = self._made_inside(call, result)
            self.exits.append((call, self._returned(call, named) if made is None else [made]))
        finally:
            recorder.module_call = recorder.module_calls[call].parent
            if call in recorder.handed_back:
                recorder.undo_handing_back(call, [tensor for _, tensor in named])

    def _made_inside(self, call: int, result: Any) -> int | None:
        """The entry of a plain result that the call made; None if `_returned` has to decide."""
        if type(result) is not _Tensor:
            return None
        recorder, memory = self.recorder, self.recorder.memory
        # The value to save may be another one.
        is_watched = self._selection is not None
        if is_watched and (not recorder.saves_all or memory.writes or memory.may_die):
            return None
        made = recorder.number_of(result)
        if made is None or made < self._rows_before[call]:
            return None
        if is_watched and self._is_saved(call):
            self.saved.add(made)
        return made

    def _returned(self, call: int, named: Iterable[tuple[Path, torch.Tensor]]) -> list[int]:
        """The entries that a call returned; what it did not make itself becomes a new entry."""
        recorder = self.recorder
        returned = []
        for path, tensor in named:
            entry = recorder.entry_of(tensor)
            if entry is None:
                recorder.meet(tensor)
            if entry is None or 0 <= entry < self._rows_before[call]:
                entry = record_identity(recorder, tensor)
            if entry >= 0:
                returned.append(entry)
                if path:
                    self.parts.append((call, path, entry))
                if self._is_saved(call):
                    self._save_output(entry, tensor)
        return returned

    def fail(self, call: int, error: BaseException) -> None:
        """Records that the module raised; the place is the end of the traceback."""
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        self.recorder.fail(error, None, (), None, (), place.tb_frame if place else None)
        if call:
            self.recorder.module_call = self.recorder.module_calls[call].parent
            if call in self.recorder.handed_back:
                self.recorder.undo_handing_back(call, ())

    def share(self) -> None:
        """Notes that other threads may call modules too."""
        self.is_shared = True

    def run_scripted(
        self, original: Callable[..., Any], module: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Runs a scripted module as one operation."""
        name = getattr(module, "original_name", type(module).__name__)
        arguments = (args, kwargs, list(module.parameters()))
        return record_opaque(
            self.recorder, name, module, lambda: original(module, *args, **kwargs), arguments
        )

    def _save_output(self, entry: int, tensor: torch.Tensor) -> None:
        memory = self.recorder.memory
        assert self._selection is not None
        with NoTorchFunction():
            self.recorder.complete()
            is_changed = self._selection.as_returned and memory.is_written_since(entry)
            memory.save(entry, tensor, is_changed and entry not in self.saved)
        self.saved.add(entry)

    def _is_saved(self, call: int) -> bool:
        if self._selection is None:
            return False
        address, pass_num, *_ = self.recorder.module_calls[call]
        return self._selection.may_mean_module(address, None if self.is_shared else pass_num)

    def _entries_of(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        entries = dict.fromkeys([self.recorder.meet(tensor) for tensor in tensors])
        return [entry for entry in entries if entry is not None and entry >= 0]


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among a module's arguments; does not search cache objects."""
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
