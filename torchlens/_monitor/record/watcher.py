"""Watches the calls of a model's modules during a recorded step.

The model gets no hooks and no attributes: `nn.Module._call_impl` is patched while a step is
recorded (see _capture/module_tracker.py). Inputs and outputs are sampled immediately, before an
in-place operation can change them.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple

import torch

from torchlens._capture.current import CURRENT, WatcherGroup
from torchlens._capture.model_parts import named_modules
from torchlens._capture.module_tracker import patched_call_impl
from torchlens._capture.patches.patching import is_inside_compiled, keep_from_compiler
from torchlens._health.activations import BOUNDED, activation_kind
from torchlens._monitor.record.collector import Collector
from torchlens._monitor.record.graph import GraphMaker
from torchlens._monitor.record.monitor_options import MonitorOptions
from torchlens._monitor.record.samples import PLAIN_TYPES
from torchlens._monitor.record.series import Units, unit_axis
from torchlens._recording.trees import named_tensors, plain_tensors
from torchlens._recording.unseen import call_unseen, is_seen

# The number of sampled tensors among the inputs, or the outputs, of a module call.
_MAX_TENSORS = 8
_Tensor = torch.Tensor
# What is recorded of a call. When a checkpoint recomputes in the backward pass: only gradients.
_NOTHING, _GRADIENTS, _ALL = 0, 1, 2
_COMPILED = "OptimizedModule"  # the class of modules made by `torch.compile`


class ModuleInfo(NamedTuple):
    """A module of the model, under its first address."""

    address: str
    kind: str  # its class
    is_wanted: bool


@dataclass(slots=True, eq=False)
class WatchedCall:
    """A running module call."""

    info: ModuleInfo
    parent: "WatchedCall | None"
    takes: int
    source: Any  # of a compiled module: the original, called inside it
    number: int = -1  # in the graph, while one is recorded


class ModuleWatcher:
    """Samples the tensors of module calls; a `Watcher` of _capture/current.py."""

    def __init__(
        self,
        model: torch.nn.Module,
        options: MonitorOptions,
        collector: Collector,
        margin: float,
        graph: GraphMaker | None,
    ) -> None:
        self.collector = collector
        self.infos: dict[int, ModuleInfo] = {}
        self.num_calls = 0  # in this step
        # The thread whose calls are recorded in this step; None before the first call.
        self.thread: int | None = None
        self.graph = graph
        self._options = options
        self._margin = margin
        # Called for an unknown module: the model may have changed since the step began.
        self.on_unknown: Callable[[], None] | None = None
        self._has_looked = False  # `on_unknown` was called in this step
        self._strangers: set[int] = set()  # ids of modules outside the model
        # Weak references: an unfinished run must not keep the model alive.
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._has_inputs, self._has_outputs = "inputs" in options.log, "outputs" in options.log
        self._has_gradients = "gradients" in options.log
        self._current: WatchedCall | None = None
        self._model = weakref.ref(model)
        self.refresh(named_modules(model))

    def begin_step(self) -> None:
        """Resets the state of the step, before a recorded step."""
        self._current = self.thread = None
        self.num_calls = 0
        self._has_looked = False

    def refresh(self, modules: Sequence[tuple[str, torch.nn.Module]]) -> None:
        """Updates the known modules, which may have changed since the last step."""
        known = self._modules
        if len(modules) == len(known) and all(
            own is last() for (_, own), last in zip(modules, known, strict=True)
        ):
            return
        self.infos, self._modules = {}, [weakref.ref(module) for _, module in modules]
        addresses: set[str] = set()
        for address, module in modules:
            if address in addresses and type(module).__name__ != _COMPILED:
                # The source of a compiled module has the same address, and runs inside it.
                continue
            addresses.add(address)
            kind, is_wanted = type(module).__name__, self._options.wants(address)
            self.infos[id(module)] = ModuleInfo(address, kind, is_wanted)

    def forget(self) -> None:
        """Drops all references to modules."""
        self.infos, self._modules, self._current = {}, [], None

    # -- module calls ------------------------------------------------------------------------------

    def begins_with(self, module: Any) -> bool:
        """Whether to log the operations of this call, for the graph."""
        graph = self.graph
        return (
            graph is not None
            and graph.wants_log
            and self._current is None
            and module is self._model()
            and self._watches_this_thread()
            and CURRENT.tracker is None
            and not is_inside_compiled()
            and self._takes() == _ALL
        )

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model once, logged for the graph."""
        assert self.graph is not None
        return self.graph.run_logged(module, args, kwargs)

    def enter(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], time: float
    ) -> WatchedCall | None:
        """Samples the inputs of a module call, before it runs."""
        if not self._watches_this_thread():
            return None
        info = self.infos.get(id(module)) or self._unknown(module)
        parent = self._current
        if info is None or self._is_current_source(module):
            return None
        takes = self._takes() if parent is None else parent.takes
        if takes == _NOTHING and self.thread is None:
            return None  # an evaluation does not determine the training thread
        self.thread = get_ident()
        self._current = call = WatchedCall(info, parent, takes, _source_of(module))
        self.num_calls += 1
        if takes == _ALL:
            try:
                self._note_call(call, args, kwargs)
            except Exception as error:  # the training must not notice
                self._add_failure(error, info, "was given")
        return call

    def _is_current_source(self, module: Any) -> bool:
        """Whether the running call is that of the compiled module that a module is the source
        of.
        """
        return self._current is not None and self._current.source is module

    def _watches_this_thread(self) -> bool:
        """Concurrent calls of two threads are not nested: only those of the first are recorded."""
        return self.collector.is_armed and self.thread in (None, get_ident())

    def _add_failure(self, error: Exception, info: ModuleInfo, what: str) -> None:
        self.collector.problems.add_failure(
            error, f"What {info.address or 'the model'!r} {what} was not recorded"
        )

    def _note_call(self, call: WatchedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        info = call.info
        if self.graph is not None:
            self.graph.enter(call, args, kwargs)
        if not (self._has_inputs and info.is_wanted):
            return
        if len(args) == 1 and not kwargs and type(args[0]) in PLAIN_TYPES and not is_seen():
            self.collector.note(info.address, "inputs", "", args[0])
        else:
            call_unseen(self._note_inputs, info, args, kwargs)

    def _unknown(self, module: Any) -> ModuleInfo | None:
        """The info of a module not in `infos`: a compiled one, or one added to the model since the
        last refresh. None for modules outside the model.
        """
        if (source := _source_of(module)) is not None:
            return self.infos.get(id(source))
        if id(module) in self._strangers or self._has_looked or self.on_unknown is None:
            return None
        self._has_looked = True
        self.on_unknown()
        info = self.infos.get(id(module))
        if info is None:
            self._strangers.add(id(module))
        return info

    def end(self, watched: WatchedCall) -> None:
        """Ends a call, after the module has returned or raised."""
        self._current = watched.parent

    def leave(
        self, watched: WatchedCall, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Samples the outputs of a call and registers hooks to sample their gradients."""
        takes, info = watched.takes, watched.info
        if takes == _NOTHING or not self.collector.is_armed:
            return
        try:
            if takes == _ALL and self.graph is not None:
                self.graph.leave(watched, result)
            if info.is_wanted:
                if type(result) in PLAIN_TYPES and not is_seen():
                    self._note_outputs(info, takes, result)
                else:
                    call_unseen(self._note_outputs, info, takes, result)
            if watched.parent is None:
                self.collector.check_size()
        except Exception as error:  # the training must not notice
            self._add_failure(error, info, "returned")

    def fail(
        self,
        watched: WatchedCall,
        error: BaseException,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Records nothing: the module raised."""

    def _takes(self) -> int:
        """What is recorded of an outermost call."""
        if torch._C._current_graph_task_id() != -1:
            return _GRADIENTS
        if not torch.is_grad_enabled() and not self._options.evaluation:
            model = self._model()
            if model is not None and not model.training:
                return _NOTHING
        return _ALL

    # -- tensors -----------------------------------------------------------------------------------

    def _note_inputs(self, info: ModuleInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, tensor in itertools.islice(_named(args, kwargs), _MAX_TENSORS):
            self.collector.note(info.address, "inputs", name, tensor)

    def _note_outputs(self, info: ModuleInfo, takes: int, result: Any) -> None:
        collector, films = self.collector, self.collector.films
        tensors = _first_results(result)
        if takes == _ALL and films is not None and tensors:
            films.capture(films.outputs, info.address, tensors[0][1])
        for name, tensor in tensors:
            if self._has_outputs and takes == _ALL:
                number = collector.note(info.address, "outputs", name, tensor)
                if number >= 0 and number not in collector.names.units:
                    self._describe(number, info)
            if self._has_gradients:
                collector.follow_gradient(info.address, name, tensor)

    def _describe(self, number: int, info: ModuleInfo) -> None:
        """Sets the units and the saturation limits of a series, for its statistics."""
        names = self.collector.names
        source = names.known(info.address, "inputs", "")
        names.units[number] = Units(source, unit_axis(info.kind))
        kind = activation_kind(info.kind)
        if kind in BOUNDED and kind != "softmax":  # softmax has no limits per element
            low, high = BOUNDED[kind]
            margin = self._margin * (high - low)
            names.limits[number] = low + margin, high - margin


def _source_of(module: Any) -> Any:
    """The module that was compiled; None for any that is no result of `torch.compile`."""
    return module._orig_mod if type(module).__name__ == _COMPILED else None


def hide_from_compiler(is_hidden: bool) -> None:
    """Makes `torch.compile` skip our patches, so that watching a model does not recompile it."""
    keep_from_compiler(patched_call_impl.__code__, is_hidden, with_calls=False)
    for watcher in (ModuleWatcher, WatcherGroup):
        for method in (
            watcher.begins_with,
            watcher.enter,
            watcher.end,
            watcher.leave,
            watcher.fail,
        ):
            keep_from_compiler(method.__code__, is_hidden, with_calls=True)


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, _Tensor]]:
    """(name, tensor) for the tensors among arguments: '0', '1', 'mask', 'states.0'; '' for the only
    argument.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], _Tensor):
        yield "", args[0]
        return
    for path, tensor in plain_tensors(args):
        yield _text(path), tensor
    for name, value in kwargs.items():
        for path, tensor in plain_tensors(value):
            yield _text((name, *path)), tensor


def _first_results(result: Any) -> list[tuple[str, _Tensor]]:
    if type(result) in PLAIN_TYPES:
        return [("", result)]
    return list(itertools.islice(_named_results(result), _MAX_TENSORS))


def _named_results(result: Any) -> Iterator[tuple[str, _Tensor]]:
    if isinstance(result, _Tensor):
        yield "", result
        return
    is_plain = isinstance(result, list | tuple | Mapping)
    for path, tensor in plain_tensors(result) if is_plain else named_tensors(result):
        yield _text(path), tensor


def _text(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
