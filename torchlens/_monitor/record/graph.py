"""The graph of the model's calls in the first recorded step, made without a second forward pass.

graph.json holds

    "log"      the log of the model's first call, without its tensors: "graph" is a document of a
               trace (_trace/documents.py); "seconds" has the times of the operations,
               "seconds_forward" that of the call. null if nothing was called
    "note"     why the log has modules instead of operations, or ""

The operations come from a log of the model's first call, which returns the same result as a plain
call. A compiled model is not logged: its uncompiled source would round differently. In its place
stands a log of the module calls, in which each module that calls no other is one operation. What is
computed between modules is not seen there: a tensor that no module returned counts as made by the
module that ran last.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchlens._capture.model_parts import named_modules
from torchlens._capture.options import CaptureOptions
from torchlens._capture.session import Session
from torchlens._graph.build import build_graph
from torchlens._portable.documents import graph_document
from torchlens._portable.python_values import PythonWriter
from torchlens._recording.garbage_collector import pause_collector, resume_collector
from torchlens._recording.operations import IDENTITY, INPUT, OUTPUT, Operation, named_operation
from torchlens._recording.recording import ModuleCall, Recording, Row, make_row
from torchlens._recording.trees import named_tensors, plain_tensors
from torchlens._recording.unseen import call_unseen
from torchlens._recording.user_code import short_path
from torchlens._text.problems import Problems

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

    def __init__(self, model: torch.nn.Module, wants_log: bool, problems: Problems) -> None:
        self.wants_log = wants_log and not _is_compiled(model)
        self._note = (
            "The graph was asked for module by module."
            if not wants_log
            else "The model, or a part of it, is compiled: the operations inside are not seen."
            if not self.wants_log
            else "The model was not called as a whole: the operations between modules are not seen."
        )
        self._problems = problems
        self._recording: Recording | None = None
        self._result: Any = _NOT_RUN
        self._modules = _ModuleRows()

    def enter(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records the beginning of a module call."""
        self._modules.enter(call, [tensor for _, tensor in plain_tensors((args, kwargs))])

    def leave(self, call: Any, result: Any) -> None:
        """Records the outputs of a module call."""
        if call.parent is None:
            self._result = result
        self._modules.leave(call, [tensor for _, tensor in named_tensors(result)])

    def run_logged(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model once, logged. If logging fails, the result of the model's run is still
        returned.
        """
        self.wants_log = False
        self._result = _NOT_RUN
        num_calls = len(self._modules.calls)
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
                self._note = "The log failed."
                return self._result
            # The model raised.
            if len(self._modules.calls) > num_calls or not isinstance(error, Exception):
                raise
            self._problems.add_failure(error, "The graph has no operations")
            self._note = "The log failed."
            return module._wrapped_call_impl(*args, **kwargs)
        finally:
            self._result = _NOT_RUN
            try:
                resume_collector(self)
            finally:  # again, because an interrupt may cut the first call short
                resume_collector(self)
        self._recording = session.recording
        return result

    def finished(self, model: torch.nn.Module) -> Callable[[], dict[str, Any]]:
        """A function that makes the graph, in any thread."""
        note = self._note if self._recording is None else ""
        found = self._recording or self._modules.recording(model)
        recording = call_unseen(_without_tensors, found)
        problems = self._problems

        def make() -> dict[str, Any]:
            try:
                return {"log": _log_document(recording) if recording.rows else None, "note": note}
            except Exception as error:
                problems.add_failure(error, "The run has no graph")
                return {"log": None, "note": "The log of the operations could not be stored."}

        return make


class _ModuleRows:
    """The first call of each outermost module as a recording, in which a module that calls no other
    is an operation.
    """

    def __init__(self) -> None:
        self.calls = [ModuleCall("", 1, -1, None, 0)]  # of the model itself
        self._operations: dict[str, Operation] = {}  # by class
        self._passes: Counter[str] = Counter()
        self._rows: list[Row] = []
        self._given: list[tuple[int, list[int]]] = []
        self._returned: list[tuple[int, list[int]]] = []
        self._outputs: list[int] = []  # entries
        # By id of a tensor: a weak reference to it, and its entry.
        self._entries: dict[int, tuple[Any, int]] = {}

    def enter(self, call: Any, tensors: list[torch.Tensor]) -> None:
        address, parent = call.info.address, call.parent
        is_known = self._passes[address] > 0 if parent is None else parent.number < 0
        if is_known or len(self.calls) >= _MOST_CALLS:
            return
        self._passes[address] += 1
        if not self._rows and tensors:
            self._add(INPUT, 0, [], tensors[0])
        call.number = len(self.calls) if address else 0
        if address:
            around = 0 if parent is None else parent.number
            self.calls.append(ModuleCall(address, self._passes[address], around, None, 0))
        unknown = 0 if parent is None else len(self._rows) - 1
        self._given.append((call.number, self._entries_of(tensors, unknown)))

    def leave(self, call: Any, tensors: list[torch.Tensor]) -> None:
        if call.number < 0:
            return
        if call.number == len(self.calls) - 1:  # it has called no other
            kind, (_, given) = call.info.kind, self._given[-1]
            if kind not in self._operations:
                self._operations[kind] = named_operation(kind, IDENTITY.func)
            for tensor in tensors[:_MOST_TENSORS]:
                self._add(self._operations[kind], call.number, given, tensor)
        entries = self._entries_of(tensors, len(self._rows) - 1)
        self._returned.append((call.number, entries))
        if call.parent is None:
            self._outputs = entries

    def recording(self, model: torch.nn.Module) -> Recording:
        """The recording so far; without rows if nothing was called."""
        modules = named_modules(model)
        addresses, params, params_of = _parameters_of(modules)
        rows = [self._with_params(row, params_of) for row in self._rows]
        for entry in self._outputs:
            made = self._rows[entry]
            rows.append(made._replace(operation=OUTPUT, module_call=0, references=(entry,)))
        count = len(rows)
        return Recording(
            model_name=type(model).__name__,
            rows=rows,
            values=[None] * count,
            versions=[-1] * count,
            storages=list(range(count)),
            regions={},
            writes=[],
            inputs=[(("input",), 0)],
            outputs=[((), entry) for entry in range(len(self._rows), count)],
            buffers=[],
            params=params,
            param_addresses=addresses,
            module_params=params_of,
            outside_storages={},
            module_calls=self.calls,
            module_classes={address: type(module).__name__ for address, module in modules},
            module_entries=[each for each in self._given if each[0]],
            module_exits=[each for each in self._returned if each[0]],
            booleans={},
            leaves=set(),
            saved_args={},
            gradients={},
        )

    def _with_params(self, row: Row, params_of: dict[str, tuple[int, ...]]) -> Row:
        own = params_of.get(self.calls[row.module_call].address, ()) if row.module_call else ()
        references = (*row.references, *(-1 - number for number in own))
        return row._replace(references=references)

    def _add(self, operation: Operation, call: int, given: list[int], tensor: torch.Tensor) -> None:
        self._entries[id(tensor)] = _reference_to(tensor), len(self._rows)
        shape = tuple(map(int, tensor.shape)) if not tensor.is_nested else ()
        references = tuple(given)
        fields = (operation, (), None, references, call, None, 0, 0.0, None, shape, tensor.dtype)
        self._rows.append(make_row((*fields, None)))

    def _entries_of(self, tensors: list[torch.Tensor], unknown: int) -> list[int]:
        """The entries of tensors; `unknown` of one that no module returned."""
        known = [self._entries.get(id(tensor)) for tensor in tensors[:_MOST_TENSORS]]
        found = [unknown if own is None or own[0].expired() else own[1] for own in known]
        return [entry for entry in dict.fromkeys(found) if entry >= 0]


def _parameters_of(
    modules: Sequence[tuple[str, torch.nn.Module]],
) -> tuple[list[str], list[torch.nn.Parameter], dict[str, tuple[int, ...]]]:
    """The addresses of the parameters, the parameters, and for each module the numbers of its
    own.
    """
    addresses: list[str] = []
    params: list[torch.nn.Parameter] = []
    numbers: dict[int, int] = {}
    numbers_of: dict[str, tuple[int, ...]] = {}
    for address, module in modules:
        own = []
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            own.append(numbers.setdefault(id(parameter), len(params)))
            if own[-1] == len(params):
                addresses.append(f"{address}.{name}".removeprefix("."))
                params.append(parameter)
        numbers_of[address] = tuple(own)
    return addresses, params, numbers_of


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


def _is_compiled(model: torch.nn.Module) -> bool:
    return any(
        module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        for _, module in named_modules(model)
    )
