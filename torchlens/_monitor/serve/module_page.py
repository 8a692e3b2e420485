"""The graph of a run as the viewer's page takes it: operations where they were logged, else who
called whom.
"""

from typing import Any

from torchlens._page.names import KINDS, PARTS, SIDES

_MOST_CALLS = 20_000
_MOST_DEEP = 200


def graph_page(graph: dict[str, Any]) -> dict[str, Any]:
    """{"page", "note"}: the page's data, or None and why there is none. What a file says is not
    trusted.
    """
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


def _modules(graph: dict[str, Any]) -> dict[str, Any] | None:
    """Modules as parts, each where it was called; one that calls no other is an operation, with an
    entry for each call.
    """
    calls = graph["calls"][:_MOST_CALLS]
    if not calls:
        return None
    strings = _Strings()
    rows = {str(row["address"]): row for row in graph["modules"]}
    depths: list[int] = []
    children: dict[int, list[int]] = {}
    for number, call in enumerate(calls):
        above = int(call["parent"])
        if not -1 <= above < number:
            raise ValueError("a call inside one that came later")
        depths.append(0 if above < 0 else depths[above] + 1)
        if depths[-1] > _MOST_DEEP:
            raise ValueError("calls that are nested too deeply")
        children.setdefault(above, []).append(number)
    order: list[tuple[str, int, list[int]]] = [
        (str(graph["model"]), -1, [])
    ]  # address, part around, calls: parts in order
    part_of: dict[int, int] = {}

    def add(around: int, own: list[int]) -> None:
        groups: dict[str, list[int]] = {}
        for number in own:
            groups.setdefault(str(calls[number]["module"]), []).append(number)
        for address, numbers in groups.items():
            part = len(order)
            order.append((address, around, numbers))
            part_of.update(dict.fromkeys(numbers, part))
            add(part, [inner for number in numbers for inner in children.get(number, [])])

    # The model itself is the page; what is called inside it is shown.
    roots = [number for number in children.get(-1, []) if str(calls[number]["module"]) == ""]
    others = [number for number in children.get(-1, []) if number not in roots]
    add(0, [*(inner for number in roots for inner in children.get(number, [])), *others])
    leaves = [number for number in sorted(part_of) if not children.get(number)]
    if not leaves:
        return None
    entry_of = {number: place for place, number in enumerate(leaves)}
    parents: list[list[int]] = [[] for _ in leaves]
    links: dict[tuple[int, int], None] = {}
    for source, target in graph["edges"]:
        last = _last_leaf(int(source), children)
        if last in entry_of and target in entry_of and last != target:
            parents[entry_of[target]].append(entry_of[last])
            if part_of[last] != part_of[target]:
                links[part_of[last], part_of[target]] = None
    count = len(leaves)
    shapes = [
        strings("×".join(map(str, (calls[number]["outputs"] or [[]])[0]))) for number in leaves
    ]
    columns: dict[str, list[Any]] = {
        "label": [strings(f"{calls[n]['module']}:{int(calls[n]['pass'])}") for n in leaves],
        "shape": shapes,
        "dtype": [0] * count, "bytes": [0] * count, "micros": [0] * count, "flops": [0] * count,
        "place": [-1] * count,
        "stat": [-1] * count, "grad": [-1] * count, "args": [0] * count, "parents": parents,
        "backward": [None] * count,
        "gradnorm": [None] * count,
    }  # fmt: skip
    parts: dict[str, list[Any]] = {
        name: []
        for name in (
            "part", "parent", "title", "path", "type", "kind", "isModule", "side", "passes",
            "entries", "buffers", "params",
            "place",
        )
    }  # fmt: skip
    numbers_of_parameters: list[int] = []
    addresses: list[int] = []
    for part, (address, around, numbers) in enumerate(order):
        is_leaf = part > 0 and all(number in entry_of for number in numbers)
        row = rows.get(address, {}) if part else {}
        own = int(row.get("parameters", 0))
        values = {
            "part": PARTS.index("operation" if is_leaf else "module"),
            "parent": around,
            "title": strings(address),
            "path": strings(address if part else ""),
            "type": strings(row.get("type", graph["model"] if not part else "")),
            "kind": KINDS.index(
                "weights" if is_leaf and own else "compute" if is_leaf else "module"
            ),
            "isModule": int(part > 0),
            "side": SIDES.index(""),
            "passes": max(1, len(numbers)),
            "entries": [[entry_of[number]] for number in numbers] if is_leaf else [],
            "buffers": [],
            "params": [len(addresses)] if own else [],
            "place": -1,
        }
        for name, value in values.items():
            parts[name].append(value)
        if own:
            numbers_of_parameters.append(own)
            addresses.append(strings(f"{address}.*"))
    num_parameters = len(addresses)
    return {
        "title": str(graph["model"]), "model": str(graph["model"]), "tensors": count, "bytes": 0,
        "params": sum(numbers_of_parameters), "paramBytes": 0, "seconds": 0, "valueless": "",
        "note": "", "leftOut": None,
        "failure": None, "entries": columns, "parts": parts,
        "links": {
            "from": [a for a, _ in links], "to": [b for _, b in links], "around": [-1] * len(links),
            "residual": [0] * len(links),
        },
        "conditions": {"edges": [], "read": []}, "idle": [],
        "parameters": {
            "address": addresses, "shape": [0] * num_parameters, "dtype": [0] * num_parameters,
            "count": numbers_of_parameters, "bytes": [0] * num_parameters,
            "stat": [-1] * num_parameters,
            "grad": [-1] * num_parameters, "trained": [1] * num_parameters,
        },
        "places": [], "overlays": [], "kinds": list(KINDS), "partKinds": list(PARTS),
        "sides": list(SIDES),
        "statistics": _NO_STATISTICS, "strings": list(strings.found),
    }  # fmt: skip


_NO_STATISTICS = {
    "bins": 1, "histograms": "", "heat": "",
    **{name: [] for name in ("rows", "cols", "low", "high", "min", "max", "mean", "std", "zeros",
    "nonfinite", "nan")},
    **{name: [] for name in ("sample", "heatlow", "heathigh")},
}  # fmt: skip


def _last_leaf(number: int, children: dict[int, list[int]]) -> int:
    """What made the result of a call: the last call inside it."""
    while children.get(number):
        number = children[number][-1]
    return number
