"""Entering and leaving modules."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from torchlens.capture.recorder import Recorder
from torchlens.capture.recording import ModuleCall
from torchlens.capture.trees import named_tensors

__all__ = ["ModuleTracker", "named_modules"]


_module_call = ModuleCall._make
_Tensor = torch.Tensor


class ModuleTracker:
    """Knows the modules of a model by address and writes down each call of one.

    `saved_addresses` are modules (`features.6`, or `features.6:2` for one pass) whose outputs are to be saved.
    """

    def __init__(
        self, modules: Sequence[tuple[str, torch.nn.Module]], recorder: Recorder, saved_addresses: Iterable[str] = ()
    ) -> None:
        self.recorder = recorder
        self.entries: list[tuple[int, list[int]]] = []
        self.exits: list[tuple[int, list[int]]] = []
        self.classes: dict[str, str] = {}
        # Whether a saved output was written to, through a view, between its operation and the module's return.
        self.is_uncertain = False
        # Called when the model compiles something.
        self.on_compile: Callable[[], None] | None = None
        recorder.module_code = ModuleTracker.call.__code__
        self._saved_addresses = frozenset(saved_addresses)
        self._addresses: dict[int, str] = {}
        self._num_calls: dict[str, int] = {}
        self._scripted: set[int] = set()
        for name, module in modules:
            self._addresses[id(module)] = name
            if isinstance(module, torch.jit.ScriptModule):
                self._scripted.add(id(module))
                self.classes[name] = getattr(module, "original_name", None) or type(module).__name__
            else:
                self.classes[name] = type(module).__name__

    def call(self, original: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module, taking note of what went in and what came out."""
        recorder = self.recorder
        address = self._addresses.get(id(module))
        if address is None or recorder.collected is not None:
            return original(module, *args, **kwargs)
        if address == "":
            try:
                return self._run(original, module, args, kwargs)
            except BaseException as error:
                self._note_failure(error)
                raise
        parent = recorder.module_call
        code, instruction = recorder.user_code(sys._getframe(2))  # past the patched `_call_impl`
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
            is_scripted = id(module) in self._scripted
            result = self._run(original, module, args, kwargs) if is_scripted else original(module, *args, **kwargs)
            returned = []
            for tensor in (result,) if type(result) is _Tensor else [tensor for _, tensor in named_tensors(result)]:
                entry = recorder.entry_of(tensor)
                if entry is not None and 0 <= entry < num_before:
                    entry = recorder.record_identity(tensor)
                if entry is not None and entry >= 0:
                    returned.append(entry)
                    if self._saved_addresses and not self._saved_addresses.isdisjoint((address, f"{address}:{pass_num}")):
                        with torch._C.DisableTorchFunction():
                            recorder.memory.save(entry, tensor)
                        self.is_uncertain |= recorder.memory.is_written_since(entry)
            self.exits.append((call, returned))
            return result
        except BaseException as error:
            self._note_failure(error)
            raise
        finally:
            recorder.module_call = parent

    def _note_failure(self, error: BaseException) -> None:
        """Something other than an operation raised: the place is where the traceback ends."""
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        self.recorder.fail(error, None, (), None, (), place.tb_frame if place else None)

    def _run(self, original: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(module) not in self._scripted:
            return original(module, *args, **kwargs)
        name = getattr(module, "original_name", type(module).__name__)
        arguments = (args, kwargs, list(module.parameters()))
        return self.recorder.record_opaque(name, module, lambda: original(module, *args, **kwargs), arguments)

    def _known(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        entries = dict.fromkeys([self.recorder.entry_of(tensor) for tensor in tensors])
        return [entry for entry in entries if entry is not None and entry >= 0]


def named_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each module once, with its address, outer ones first; `_orig_mod` of compiled modules is left out of addresses.

    The same as `model.named_modules()`, without a generator for each level.
    """
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("", model)]
    while pending:
        address, module = pending.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        yield address, module
        children = module._modules
        if children:
            prefix = f"{address}." if address else ""
            pending.extend([(_address(prefix, name), child) for name, child in reversed(children.items())])


def _address(prefix: str, name: str) -> str:
    return prefix[:-1] if name == "_orig_mod" else prefix + name


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    """Tensors that a module is given. A cache object that is handed through is not looked into."""
    found: list[torch.Tensor] = []
    pending = [tree]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            pending.extend(reversed(item))
        elif isinstance(item, Mapping):
            pending.extend(reversed(list(item.values())))
        elif item is not None and is_dataclass(item) and not isinstance(item, type):
            pending.extend(getattr(item, field.name, None) for field in reversed(fields(item)))
    return found
