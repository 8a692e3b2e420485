"""Converts the graph of a run (graph.json) to the data of the viewer's page: its operations if they
were logged, otherwise its modules and their calls.
"""

from typing import Any, NamedTuple

from torchlens._graph.build import assemble_graph
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._page.entry_columns import Strings
from torchlens._page.page_data import page_data
from torchlens._page.part_names import KINDS, PARTS, SIDES
from torchlens._text.numbers import shape_text
from torchlens._trace.document_reading import decisions_of, recording_of
from torchlens._trace.python_values import PythonReader
from torchlens.errors import TraceError

_MAX_CALLS = 20_000
# What reading a file that is damaged, or that another program wrote, may raise.
_UNREADABLE = (
    LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, TraceError,
)  # fmt: skip


def graph_page(graph: dict[str, Any]) -> dict[str, Any]:
    """{"page", "note"}: the data of the page, or None and the reason."""
    note = str(graph.get("note", ""))
    try:
        if isinstance(graph.get("log"), dict):
            return {"page": _operations_page(graph["log"]), "note": note}
        return {"page": _ModulePage(graph).data() if graph else None, "note": note}
    except _UNREADABLE:
        return {"page": None, "note": "The graph of this run cannot be read."}


def _operations_page(log: dict[str, Any]) -> dict[str, Any]:
    """The page of the logged operations. No tensor came with them."""
    recording = recording_of(log["graph"], log["seconds"], PythonReader(lambda note: None))
    recording.seconds_forward = float(log["seconds_forward"])
    decisions = decisions_of(log["graph"], recording)
    history = ModelHistory(Log(recording, make_graph=lambda own: assemble_graph(own, decisions)))
    return page_data(history, {}, None, has_repeats=False)


class _Part(NamedTuple):
    """A module at one place where it is called: its address, the number of the part around it, and
    its calls there. A leaf calls no other module.
    """

    address: str
    around: int
    calls: list[int]
    is_leaf: bool


class _ModulePage:
    """The page of the modules. A module that calls no other is an operation, with an entry for each
    call.
    """

    def __init__(self, graph: dict[str, Any]) -> None:
        self.model = str(graph["model"])
        self.calls = graph["calls"][:_MAX_CALLS]
        self.rows = {str(row["address"]): row for row in graph["modules"]}
        self.children: dict[int, list[int]] = {}  # the calls inside each; -1 has the outermost
        for number, call in enumerate(self.calls):
            if not -1 <= call["parent"] < number:
                raise ValueError("a call inside a later one")
            self.children.setdefault(call["parent"], []).append(number)
        self.parts = self._parts()
        self.part_of = {call: part for part, own in enumerate(self.parts) for call in own.calls}
        leaves = sorted(self.part_of.keys() - self.children.keys())
        self.entry_of = {call: entry for entry, call in enumerate(leaves)}
        self.edges = self._edges(graph["edges"])
        self.strings = Strings()

    def data(self) -> dict[str, Any] | None:
        """The page's data; None if no module was called."""
        if not self.entry_of:
            return None
        parameters = self._parameter_columns()
        return {
            "title": self.model, "model": self.model, "tensors": len(self.entry_of),
            "bytes": 0, "params": sum(parameters["count"]), "paramBytes": 0, "seconds": 0,
            "valueless": "", "note": "", "leftOut": None, "failure": None,
            "entries": self._entry_columns(), "parts": self._part_columns(),
            "parameters": parameters, "links": self._link_columns(),
            "conditions": {"edges": [], "read": []}, "idle": [], "places": [], "overlays": [],
            "kinds": list(KINDS), "partKinds": list(PARTS), "sides": list(SIDES),
            "statistics": _NO_STATISTICS, "strings": list(self.strings.found),
        }  # fmt: skip

    def _parts(self) -> list[_Part]:
        """The parts in order, each before those inside it. The first is the model itself."""
        children = self.children
        found = [_Part(self.model, -1, [], is_leaf=False)]

        def add(around: int, inside: list[int]) -> None:
            groups: dict[str, list[int]] = {}
            for call in inside:
                groups.setdefault(str(self.calls[call]["module"]), []).append(call)
            for address, own in groups.items():
                found.append(_Part(address, around, own, children.keys().isdisjoint(own)))
                add(len(found) - 1, [inner for call in own for inner in children.get(call, ())])

        inside = []
        for call in children.get(-1, ()):
            inside += [call] if self.calls[call]["module"] else children.get(call, [])
        add(0, inside)
        return found

    def _edges(self, edges: Any) -> list[tuple[int, int]]:
        """The edges between leaves: from the leaf that made what another one is given."""
        found = [(self._last_leaf(source), target) for source, target in edges]
        return [ends for ends in found if self.entry_of.keys() >= {*ends} and ends[0] != ends[1]]

    def _last_leaf(self, call: int) -> int:
        """The call that made the result of a call: the last one inside it."""
        while call in self.children:
            call = self.children[call][-1]
        return call

    def _num_parameters(self, number: int) -> int:
        row = self.rows.get(self.parts[number].address) if number else None
        return int(row["parameters"]) if row else 0

    def _part_columns(self) -> dict[str, list[Any]]:
        strings, found = self.strings, []
        num_owners = 0
        for number, part in enumerate(self.parts):
            row = self.rows.get(part.address, {}) if number else {"type": self.model}
            has_parameters = self._num_parameters(number) > 0
            found.append(
                {
                    "part": PARTS.index("operation" if part.is_leaf else "module"),
                    "parent": part.around,
                    "title": strings(part.address),
                    "path": strings(part.address if number else ""),
                    "type": strings(str(row.get("type", ""))),
                    "kind": KINDS.index(_kind(part, has_parameters)),
                    "isModule": int(number > 0),
                    "side": SIDES.index(""),
                    "passes": max(1, len(part.calls)),
                    "entries": [[self.entry_of[call]] for call in part.calls if part.is_leaf],
                    "buffers": [],
                    "params": [num_owners] if has_parameters else [],
                    "place": -1,
                }
            )
            num_owners += has_parameters
        return {name: [each[name] for each in found] for name in found[0]}

    def _parameter_columns(self) -> dict[str, list[Any]]:
        """A row for all parameters of a part."""
        owners = [number for number in range(len(self.parts)) if self._num_parameters(number) > 0]
        count = len(owners)
        return {
            "address": [self.strings(f"{self.parts[number].address}.*") for number in owners],
            "count": [self._num_parameters(number) for number in owners],
            **{name: [0] * count for name in ("shape", "dtype", "bytes")},
            **{name: [-1] * count for name in ("stat", "grad")},
            "trained": [1] * count,
        }

    def _entry_columns(self) -> dict[str, list[Any]]:
        calls, count = [self.calls[call] for call in self.entry_of], len(self.entry_of)
        parents: list[list[int]] = [[] for _ in calls]
        for source, target in self.edges:
            parents[self.entry_of[target]].append(self.entry_of[source])
        return {
            "label": [self.strings(f"{call['module']}:{call['pass']}") for call in calls],
            "shape": [self.strings(_output_text(call)) for call in calls],
            "parents": parents,
            **{name: [0] * count for name in ("dtype", "bytes", "micros", "flops", "args")},
            **{name: [-1] * count for name in ("place", "stat", "grad")},
            **{name: [None] * count for name in ("backward", "gradnorm")},
        }

    def _link_columns(self) -> dict[str, list[int]]:
        ends = [(self.part_of[source], self.part_of[target]) for source, target in self.edges]
        links = dict.fromkeys(each for each in ends if each[0] != each[1])
        return {
            "from": [source for source, _ in links],
            "to": [target for _, target in links],
            "around": [-1] * len(links),
            "residual": [0] * len(links),
        }


def _output_text(call: dict[str, Any]) -> str:
    return shape_text(call["outputs"][0]) if call["outputs"] else ""


def _kind(part: _Part, has_parameters: bool) -> str:
    return "module" if not part.is_leaf else "weights" if has_parameters else "compute"


_NO_STATISTICS = {
    "bins": 1, "histograms": "", "heat": "",
    **{name: [] for name in ("rows", "cols", "low", "high", "min", "max", "mean", "std", "zeros",
    "nonfinite", "nan", "sample", "heatlow", "heathigh")},
}  # fmt: skip
