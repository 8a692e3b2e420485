"""Entering and leaving modules."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from torchlens.capture.parts import Parts
from torchlens.capture.recorder import Recorder
from torchlens.capture.recording import ModuleCall
from torchlens.capture.trees import named_tensors
from torchlens.capture.user_code import KNOWN_CODE
from torchlens.capture.whole_calls import record_identity, record_opaque

__all__ = ["ModuleTracker"]


_module_call: Callable[[tuple[Any, ...]], ModuleCall] = partial(tuple.__new__, ModuleCall)  # `_make` at half the price
_known_code = KNOWN_CODE.get
_Tensor = torch.Tensor
_MODULE_CALL = torch.nn.Module._wrapped_call_impl.__code__


class ModuleTracker:
    """Writes down each call of a model's modules.

    `saved_addresses` are modules (`features.6`, or `features.6:2` for one pass) whose outputs are to be saved.
    """

    def __init__(self, parts: Parts, recorder: Recorder, saved_addresses: Iterable[str] = ()) -> None:
        self.recorder = recorder
        self.entries: list[tuple[int, list[int]]] = []
        self.exits: list[tuple[int, list[int]]] = []
        # Whether a saved output was written to, through a view, between its operation and the module's return.
        self.is_uncertain = False
        # Called when the model compiles something.
        self.on_compile: Callable[[], None] | None = None
        recorder.module_code = ModuleTracker.call.__code__
        self._saved_addresses = frozenset(saved_addresses)
        self._addresses = parts.addresses
        self._scripted = parts.scripted
        self._num_calls: dict[str, int] = {}

    def call(self, original: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module, taking note of what went in and what came out."""
        recorder = self.recorder
        address = self._addresses.get(id(module))
        if not address or not recorder.is_on():
            return self._call_outside(original, module, args, kwargs, address)
        parent = recorder.module_call
        frame: Any = sys._getframe(2)  # past the patched `_call_impl`
        if frame.f_code is _MODULE_CALL:
            frame = frame.f_back
        code, instruction = frame.f_code, frame.f_lasti
        known = _known_code(id(code))
        if known is None or not known[0]:
            code, instruction = recorder.user_code(frame)
        pass_num = self._num_calls[address] = self._num_calls.get(address, 0) + 1
        call = len(recorder.module_calls)
        recorder.module_calls.append(_module_call((address, pass_num, parent, code, instruction)))
        if len(args) == 1 and not kwargs and type(args[0]) is _Tensor:
            entry = recorder.entry_of(args[0])
            self.entries.append((call, [] if entry is None or entry < 0 else [entry]))
        else:
            self.entries.append((call, self._known(_tensors_in((args, kwargs)))))
        num_before = len(recorder.rows)
        recorder.module_call = call
        try:
            if self._scripted and id(module) in self._scripted:
                result = self._run_scripted(original, module, args, kwargs)
            else:
                result = original(module, *args, **kwargs)
            returned = []
            for tensor in (result,) if type(result) is _Tensor else [tensor for _, tensor in named_tensors(result)]:
                entry = recorder.entry_of(tensor)
                if entry is not None and 0 <= entry < num_before:
                    entry = record_identity(recorder, tensor)
                if entry is not None and entry >= 0:
                    returned.append(entry)
                    if self._saved_addresses:
                        self._save_output(address, pass_num, entry, tensor)
            self.exits.append((call, returned))
            return result
        except BaseException as error:
            self._note_failure(error)
            raise
        finally:
            recorder.module_call = parent

    def _call_outside(
        self, original: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], address: str | None
    ) -> Any:
        """Runs the model itself, or a module that leaves no record: not one of the model's, or part of an operation."""
        if address is None or not self.recorder.is_on():
            return original(module, *args, **kwargs)
        try:
            if id(module) in self._scripted:
                return self._run_scripted(original, module, args, kwargs)
            return original(module, *args, **kwargs)
        except BaseException as error:
            self._note_failure(error)
            raise

    def _save_output(self, address: str, pass_num: int, entry: int, tensor: torch.Tensor) -> None:
        if not self._saved_addresses.isdisjoint((address, f"{address}:{pass_num}")):
            with torch._C.DisableTorchFunction():
                self.recorder.memory.save(entry, tensor)
            self.is_uncertain |= self.recorder.memory.is_written_since(entry)

    def _note_failure(self, error: BaseException) -> None:
        """Something other than an operation raised: the place is where the traceback ends."""
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        self.recorder.fail(error, None, (), None, (), place.tb_frame if place else None)

    def _run_scripted(self, original: Callable[..., Any], module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(module, "original_name", type(module).__name__)
        arguments = (args, kwargs, list(module.parameters()))
        return record_opaque(self.recorder, name, module, lambda: original(module, *args, **kwargs), arguments)

    def _known(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        entries = dict.fromkeys([self.recorder.entry_of(tensor) for tensor in tensors])
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
