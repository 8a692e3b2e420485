"""The modules of a model and their parameters, by identity."""

from collections.abc import Container, Iterator
from time import perf_counter
from typing import Any, NamedTuple

import torch

from torchlens._capture.current import CURRENT
from torchlens._capture.distributed.sharding import parameter_pairs
from torchlens._capture.model_parts import named_modules
from torchlens._health.checking import Held
from torchlens._recording.regions import storage_of


class NamedModule(NamedTuple):
    """A module, by the first of its addresses."""

    address: str
    module_type: str
    module: torch.nn.Module


class ModelModules:
    """The parts of a model. They are read again at each step, because a model may change."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules: dict[int, NamedModule] = {}
        # id → address and the parameter itself; also of parameters that the model has had
        self.parameters: dict[int, tuple[str, torch.Tensor]] = {}
        self.storages: set[int] = set()  # of parameters and buffers
        self.is_compiled = False
        self._model = model
        # a parameter that FSDP has brought together → the one that it keeps
        self._sharded: dict[int, int] = {}
        self._replaced: list[tuple[torch.nn.Module, Any]] = []

    def refresh(self) -> None:
        """Reads the modules and parameters that the model has now."""
        self.modules, self.storages = {}, set()
        # What `torch.compile` made of a module is called in its place.
        wrappers = {
            id(module._modules["_orig_mod"]): module
            for module in self._model.modules()
            if "_orig_mod" in module._modules
        }
        addresses = set()
        for address, module in named_modules(self._model):
            if address not in addresses:  # the source of a compiled model has the same
                addresses.add(address)
                called = wrappers.get(id(module), module)
                name = type(called).__name__
                if isinstance(called, torch.jit.ScriptModule):
                    name = called.original_name
                self.modules[id(called)] = NamedModule(address, name, called)
            for held in _held(address, module):
                self.storages.add(storage_of(held.tensor))
                if held.is_parameter:
                    self.parameters.setdefault(id(held.tensor), held[:2])
        self.note_whole_parameters()

    def note_whole_parameters(self) -> None:
        """Maps the whole tensors that FSDP gathers, which receive the gradients, to the parameters
        that they represent.
        """
        modules = [named.module for named in self.modules.values()]
        for parameter, whole, _ in parameter_pairs(modules):
            if whole is not None and id(parameter) in self.parameters:
                self._sharded[id(whole)] = id(parameter)
                self.parameters[id(whole)] = self.parameters[id(parameter)][0], whole
                self.storages.add(storage_of(whole))

    def address_of_parameter(self, parameter: torch.Tensor) -> str | None:
        """The address of a parameter; None if it is none of the model's."""
        return self.parameters[id(parameter)][0] if id(parameter) in self.parameters else None

    def held_by(self, address: str, called: Container[str]) -> list[Held]:
        """The parameters and buffers that a module may read itself: its own, and those of modules
        inside not `called`.
        """
        prefix = f"{address}." if address else ""
        return [
            held
            for own, _, module in self.modules.values()
            if own == address or (own.startswith(prefix) and own not in called)
            for held in _held(own, module)
        ]

    def parameter_of(self, leaf: int) -> int:
        """The id of the parameter that a leaf (by its id) represents."""
        return self._sharded.get(leaf, leaf)

    def show_compiled(self) -> None:
        """Makes calls of modules visible after `module.compile()`, which bypasses `_call_impl`. May
        be repeated.
        """
        for named in self.modules.values():
            compiled = named.module._compiled_call_impl
            if compiled is not None and not isinstance(compiled, _VisibleCompiled):
                self._replaced.append((named.module, compiled))
                named.module._compiled_call_impl = _VisibleCompiled(named.module, compiled)
        self.is_compiled = any(
            named.module_type == "OptimizedModule" or named.module._compiled_call_impl is not None
            for named in self.modules.values()
        )

    def hide_compiled(self) -> None:
        """Undoes `show_compiled`. May be called again."""
        for module, compiled in self._replaced:
            if isinstance(
                module._compiled_call_impl, _VisibleCompiled
            ):  # else it was compiled once more
                module._compiled_call_impl = compiled
        self._replaced.clear()

    def uses_cuda(self) -> bool:
        """Whether a parameter is on CUDA: modules then return before their work is done."""
        return any(parameter.is_cuda for _, parameter in self.parameters.values())

    def forget(self) -> None:
        """Releases the model."""
        self.modules, self.parameters, self.storages = {}, {}, set()


def _held(address: str, module: torch.nn.Module) -> Iterator[Held]:
    """The parameters and buffers of a module."""
    prefix = f"{address}." if address else ""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield Held(f"{prefix}{name}", tensor, tensors is module._parameters)


class _VisibleCompiled:
    """Replaces the compiled code of a module and reports its calls to the watcher."""

    def __init__(self, module: torch.nn.Module, compiled: Any) -> None:
        self._module = module
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled, watcher, module = self._compiled, CURRENT.watcher, self._module
        if watcher is None or torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        if watcher.begins_with(module):
            return watcher.call(module, args, kwargs)
        watched = watcher.enter(module, args, kwargs, perf_counter())
        if watched is None:
            return compiled(*args, **kwargs)
        try:
            result = compiled(*args, **kwargs)
        except BaseException as error:
            watcher.end(watched)
            watcher.fail(watched, error, args, kwargs)
            raise
        watcher.end(watched)
        watcher.leave(watched, result, args, kwargs)
        return result
