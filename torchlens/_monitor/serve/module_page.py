"""The graph of a run as the viewer's page takes it: operations if they were logged, else modules
and their calls.
"""

from typing import Any, NamedTuple

from torchlens._page.names import KINDS, PARTS, SIDES
from torchlens._text.numbers import shape_text

_MAX_CALLS = 20_000
_MAX_DEPTH = 200


def graph_page(graph: dict[str, Any]) -> dict[str, Any]:
    """{"page", "note"}: the page's data, or None and the reason. The file may be a stranger's."""
    page, note = graph.get("page"), str(graph.get("note", ""))
    if isinstance(page, dict):
        return {"page": page, "note": note}
    if not graph:
        return {"page": None, "note": ""}
    try:
        made = _modules(graph)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return {"page": None, "note": "The graph of this run cannot be read."}
    return {"page": made, "note": note}


class _Strings:
    def __init__(self) -> None:
        self.found: dict[str, int] = {"": 0}

    def __call__(self, text: Any) -> int:
        return self.found.setdefault(str(text), len(self.found))


class _Part(NamedTuple):
    """A module where it was called: its address, the part around it, and its calls."""

    address: str
    around: int
    calls: list[int]


def _modules(graph: dict[str, Any]) -> dict[str, Any] | None:
    """Modules as parts, each where it was called. One that calls no other is an operation, with an
    entry for each call.
    """
    calls = graph["calls"][:_MAX_CALLS]
    children = _children(calls)
    parts = _parts(calls, children, str(graph["model"]))
    part_of = {call: number for number, part in enumerate(parts) for call in part.calls}
    leaves = [call for call in sorted(part_of) if call not in children]
    if not leaves:
        return None
    entry_of = {call: place for place, call in enumerate(leaves)}
    parents: list[list[int]] = [[] for _ in leaves]
    links: dict[tuple[int, int], None] = {}
    for source, target in graph["edges"]:
        last = _last_leaf(int(source), children)
        if last in entry_of and target in entry_of and last != target:
            parents[entry_of[target]].append(entry_of[last])
            if part_of[last] != part_of[target]:
                links[part_of[last], part_of[target]] = None
    strings = _Strings()
    entries = _entry_columns([calls[call] for call in leaves], parents, strings)
    rows = {str(row["address"]): row for row in graph["modules"]}
    columns, parameters = _part_columns(parts, entry_of, rows, str(graph["model"]), strings)
    return {
        "title": str(graph["model"]), "model": str(graph["model"]), "tensors": len(leaves),
        "bytes": 0, "params": sum(parameters["count"]), "paramBytes": 0, "seconds": 0,
        "valueless": "", "note": "", "leftOut": None, "failure": None,
        "entries": entries, "parts": columns, "parameters": parameters,
        "links": {
            "from": [source for source, _ in links], "to": [target for _, target in links],
            "around": [-1] * len(links), "residual": [0] * len(links),
        },
        "conditions": {"edges": [], "read": []}, "idle": [], "places": [], "overlays": [],
        "kinds": list(KINDS), "partKinds": list(PARTS), "sides": list(SIDES),
        "statistics": _NO_STATISTICS, "strings": list(strings.found),
    }  # fmt: skip


def _children(calls: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The calls inside each call; -1 has those that no other is around."""
    depths: list[int] = []
    children: dict[int, list[int]] = {}
    for number, call in enumerate(calls):
        above = int(call["parent"])
        if not -1 <= above < number:
            raise ValueError("a call inside a later one")
        depths.append(0 if above < 0 else depths[above] + 1)
        if depths[-1] > _MAX_DEPTH:
            raise ValueError("calls that are nested too deeply")
        children.setdefault(above, []).append(number)
    return children


def _parts(calls: list[dict[str, Any]], children: dict[int, list[int]], model: str) -> list[_Part]:
    """The parts in order, each before those inside it. The first is the page: the model itself."""
    found = [_Part(model, -1, [])]

    def add(around: int, inside: list[int]) -> None:
        groups: dict[str, list[int]] = {}
        for call in inside:
            groups.setdefault(str(calls[call]["module"]), []).append(call)
        for address, own in groups.items():
            found.append(_Part(address, around, own))
            add(len(found) - 1, _inside(own, children))

    outermost = children.get(-1, [])
    of_model = [call for call in outermost if str(calls[call]["module"]) == ""]
    add(0, [*_inside(of_model, children), *(call for call in outermost if call not in of_model)])
    return found


def _inside(calls: list[int], children: dict[int, list[int]]) -> list[int]:
    return [inner for call in calls for inner in children.get(call, ())]


def _last_leaf(call: int, children: dict[int, list[int]]) -> int:
    """What made the result of a call: the last call inside it."""
    while call in children:
        call = children[call][-1]
    return call


def _entry_columns(
    calls: list[dict[str, Any]], parents: list[list[int]], strings: _Strings
) -> dict[str, list[Any]]:
    shapes = [shape_text(map(int, call["outputs"][0])) if call["outputs"] else "" for call in calls]
    count = len(calls)
    return {
        "label": [strings(f"{call['module']}:{int(call['pass'])}") for call in calls],
        "shape": [strings(shape) for shape in shapes],
        "parents": parents,
        **{name: [0] * count for name in ("dtype", "bytes", "micros", "flops", "args")},
        **{name: [-1] * count for name in ("place", "stat", "grad")},
        **{name: [None] * count for name in ("backward", "gradnorm")},
    }


def _part_columns(
    parts: list[_Part],
    entry_of: dict[int, int],
    rows: dict[str, dict[str, Any]],
    model: str,
    strings: _Strings,
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """(columns of the parts, columns of the parameters: one row for all of a module)."""
    found = []
    addresses: list[int] = []
    counts: list[int] = []
    for number, part in enumerate(parts):
        is_page = number == 0
        row = {"type": model} if is_page else rows.get(part.address, {})
        is_leaf = not is_page and all(call in entry_of for call in part.calls)
        num_own = int(row.get("parameters", 0))
        kind = "module" if not is_leaf else "weights" if num_own else "compute"
        found.append(
            {
                "part": PARTS.index("operation" if is_leaf else "module"),
                "parent": part.around,
                "title": strings(part.address),
                "path": strings("" if is_page else part.address),
                "type": strings(row.get("type", "")),
                "kind": KINDS.index(kind),
                "isModule": int(not is_page),
                "side": SIDES.index(""),
                "passes": max(1, len(part.calls)),
                "entries": [[entry_of[call]] for call in part.calls] if is_leaf else [],
                "buffers": [],
                "params": [len(addresses)] if num_own else [],
                "place": -1,
            }
        )
        if num_own:
            addresses.append(strings(f"{part.address}.*"))
            counts.append(num_own)
    nothing = [0] * len(counts)
    none = [-1] * len(counts)
    parameters = {
        "address": addresses, "shape": nothing, "dtype": nothing, "count": counts,
        "bytes": nothing, "stat": none, "grad": none, "trained": [1] * len(counts),
    }  # fmt: skip
    return {name: [each[name] for each in found] for name in found[0]}, parameters


_NO_STATISTICS = {
    "bins": 1, "histograms": "", "heat": "",
    **{name: [] for name in ("rows", "cols", "low", "high", "min", "max", "mean", "std", "zeros",
    "nonfinite", "nan")},
    **{name: [] for name in ("sample", "heatlow", "heathigh")},
}  # fmt: skip
