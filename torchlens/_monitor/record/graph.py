"""The graph of the model's calls in the first recorded step, made without a second forward pass.

graph.json holds

    "model"    the class of the model
    "modules"  every module: {"address", "type", "parent" (address), "parameters" (the number of
               elements of its own parameters), "is_called"}
    "calls"    every module call of the first recorded step, by start: {"module", "pass", "parent"
               (number of the enclosing call, or -1), "inputs" and "outputs" (shapes)}
    "edges"    [from, to], by number of call: an output of one call is an input of the other
    "log"      the log of the model's first call, without its tensors, or null: see "note". Its
               "graph" is a document of a trace (_trace/documents.py); "seconds" has the times of
               the operations, "seconds_forward" that of the call
    "note"     why there is no log, or ""

The operations come from a log of the model's first call, which returns the same result as a plain
call. A compiled model is not logged: its uncompiled source would round differently.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from torchlens._capture.model_parts import named_modules
from torchlens._capture.options import CaptureOptions
from torchlens._capture.session import Session
from torchlens._graph.build import build_graph
from torchlens._recording.garbage_collector import pause_collector, resume_collector
from torchlens._recording.recording import Recording
from torchlens._recording.trees import named_tensors, plain_tensors
from torchlens._recording.user_code import short_path
from torchlens._text.problems import Problems
from torchlens._trace.documents import graph_document
from torchlens._trace.python_values import PythonWriter

_MOST_CALLS = 20_000
_MOST_TENSORS = 8
_NOT_RUN = object()
# torch overflows its stack when it frees a long chain of autograd nodes that have Python objects.
_MOST_LOOKED_AT = 10_000
_reference_to: Any = torch._C._WeakTensorRef  # type: ignore[attr-defined]


class GraphMaker:
    """Records the module calls of one step and, if possible, the operations of the model's first
    call in it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        wants_log: bool,
        problems: Problems,
    ) -> None:
        self.wants_log = wants_log
        self.note = "" if wants_log else "The graph was asked for module by module."
        self._problems = problems
        self._recording: Recording | None = None
        self._result: Any = _NOT_RUN
        self._calls: list[dict[str, Any]] = []
        self._edges: dict[tuple[int, int], None] = {}
        self._passes: dict[str, int] = {}
        # By id of a tensor: a weak reference to it, and the number of the call that returned it.
        self._makers: dict[int, tuple[Any, int]] = {}
        if wants_log and _is_compiled(model):
            self.wants_log = False
            self.note = (
                "The model, or a part of it, is compiled: the operations inside are not seen."
            )

    def enter(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records the beginning of a module call."""
        if len(self._calls) >= _MOST_CALLS:
            return
        address = call.info.address
        call.number = len(self._calls)
        self._passes[address] = self._passes.get(address, 0) + 1
        tensors = [tensor for _, tensor in plain_tensors((args, kwargs))]
        for tensor in tensors:
            maker = self._makers.get(id(tensor))
            if maker is not None and not maker[0].expired():
                self._edges[maker[1], call.number] = None
        self._calls.append(
            {
                "module": address,
                "pass": self._passes[address],
                "parent": -1 if call.parent is None else call.parent.number,
                "inputs": _shapes(tensors),
                "outputs": [],
            }
        )

    def leave(self, call: Any, result: Any) -> None:
        """Records the outputs of a module call."""
        if call.parent is None:
            self._result = result
        if call.number < 0:
            return
        tensors = [tensor for _, tensor in named_tensors(result)]
        self._calls[call.number]["outputs"] = _shapes(tensors)
        for tensor in tensors[:_MOST_TENSORS]:
            self._makers[id(tensor)] = _reference_to(tensor), call.number

    def run_logged(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model once, logged. If logging fails, the result of the model's run is still
        returned.
        """
        self.wants_log = False
        self._result = _NOT_RUN
        num_calls = len(self._calls)
        session: _GraphSession | None = None
        try:
            session = _GraphSession(module)
            pause_collector(self)
            result = session.run(list(args), dict(kwargs))
        except BaseException as error:
            if self._result is not _NOT_RUN and isinstance(
                error, Exception
            ):  # the model had returned
                self._problems.add_failure(error, "The graph has no operations")
                self.note = "The log failed."
                return self._result
            if len(self._calls) > num_calls or not isinstance(error, Exception):  # the model raised
                raise
            self._problems.add_failure(error, "The graph has no operations")
            self.note = "The log failed."
            return module._wrapped_call_impl(*args, **kwargs)
        finally:
            self._result = _NOT_RUN
            resume_collector(self)
        self._recording = session.recording
        return result

    def finished(self, model: torch.nn.Module) -> Callable[[], dict[str, Any]]:
        """A function that makes the graph, in any thread. Clears the maker, which ends its use."""
        modules = module_rows(model, {each["module"] for each in self._calls})
        recording = None if self._recording is None else _without_tensors(self._recording)
        note, calls, edges = self.note, self._calls, list(self._edges)
        problems, name = self._problems, type(model).__name__
        self._recording, self._result, self._makers = None, _NOT_RUN, {}

        def make() -> dict[str, Any]:
            log, why = None, note
            if recording is not None:
                try:
                    log = _log_document(recording)
                except Exception as error:  # the rest of the graph is still valid
                    problems.add_failure(error, "The graph has no operations")
                    why = "The log of the operations could not be stored."
            return {
                "model": name,
                "modules": modules,
                "calls": calls,
                "edges": edges,
                "log": log,
                "note": why,
            }

        return make


def _log_document(recording: Recording) -> dict[str, Any]:
    """The log as JSON, from which the page of the run is made when it is opened."""
    graph = graph_document(recording, build_graph(recording), PythonWriter(lambda tensor, name: {}))
    graph["places"] = [(short_path(file), *rest) for file, *rest in graph["places"]]
    return {
        "graph": graph,
        "seconds": [row.seconds for row in recording.rows],
        "seconds_forward": recording.seconds_forward,
    }


def _without_tensors(recording: Recording) -> Recording:
    """The recording with meta tensors in place of the parameters, which the training changes while
    the graph is made.
    """
    params = [
        torch.nn.Parameter(
            torch.empty(param.shape, dtype=param.dtype, device="meta"), param.requires_grad
        )
        for param in recording.params
    ]
    values = [None] * len(recording.values)
    return replace(
        recording,
        params=params,
        values=values,
        param_stand_ins=[],
        slices=[],
        gradients={},
        saved_args={},
    )


class _GraphSession(Session):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, CaptureOptions(saves=False, max_nodes=_MOST_LOOKED_AT))

    def call_model(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Bypasses `model(...)`: a `__call__` defined by its class may already be on the stack."""
        return self.model._wrapped_call_impl(*args, **kwargs)


def module_rows(model: torch.nn.Module, called: set[str]) -> list[dict[str, Any]]:
    """A row for each module of a model, outer modules first."""
    found: dict[str, dict[str, Any]] = {}
    for address, module in named_modules(model):
        numbers = [
            parameter.numel() for parameter in module._parameters.values() if parameter is not None
        ]
        row = found.setdefault(
            address,
            {
                "address": address,
                "type": type(module).__name__,
                "parent": address.rpartition(".")[0] if address else None,
                "parameters": 0,
                "is_called": address in called,
            },
        )
        row["parameters"] += sum(map(int, numbers))
    return list(found.values())


def _is_compiled(model: torch.nn.Module) -> bool:
    return any(
        module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        for _, module in named_modules(model)
    )


def _shapes(tensors: list[torch.Tensor]) -> list[list[int]]:
    return [
        list(map(int, tensor.shape)) for tensor in tensors[:_MOST_TENSORS] if not tensor.is_nested
    ]
