"""A history as a Mermaid flowchart, which GitHub, GitLab and many notebooks draw."""

from collections.abc import Sequence
from typing import Any

from torchlens._history.log import Log
from torchlens._history.receipt import exported_receipt
from torchlens._text.error_wording import check_count
from torchlens._text.numbers import shape_text
from torchlens._text.plain_text import printable

# Mermaid refuses more than 500 edges unless its settings are changed.
_MOST_NODES = 120


def to_mermaid(history: Any, depth: int | None = None) -> str:
    """The flowchart, in which each module at this depth is one node; without a depth, the deepest
    that keeps it small.
    """
    log: Log = history._log
    if depth is not None:
        check_count("depth", depth, 0)
        return _chart(log, depth)
    deepest = max(map(len, log.graph.module_chains), default=0)
    found = 0
    for tried in range(1, deepest + 2):
        if len(set(_homes(log, tried))) > _MOST_NODES:
            break
        found = tried
    return _chart(log, found)


def _homes(log: Log, depth: int) -> list[int]:
    """For each entry the node that shows it: itself, or -1 - call for a call of a module."""
    chains, recorded = log.graph.module_chains, log.graph.recorded
    aside = {*log.graph.inputs, *log.graph.outputs, *log.graph.buffers}
    homes = []
    for entry in range(len(recorded)):
        chain = chains[log.row(entry).module_call]
        is_inside = entry not in aside and len(chain) >= max(depth, 1)
        homes.append(-1 - chain[depth - 1] if depth and is_inside else entry)
        if not depth and entry not in aside:
            homes[-1] = -1
    return homes


def _chart(log: Log, depth: int) -> str:
    homes = _homes(log, depth)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for entry, home in enumerate(homes):
        first.setdefault(home, entry)
        last[home] = entry
    names = {home: f"n{number}" for number, home in enumerate(first)}
    receipt = printable(str(exported_receipt(log)))
    lines = ["flowchart TD", f"  %% {receipt}"]
    for home, name in names.items():
        lines.append(f"  {name}{_box(log, home, last[home])}")
    edges = dict.fromkeys(
        (homes[parent], home)
        for entry, home in enumerate(homes)
        for parent in log.graph.parents[entry]
        if homes[parent] != home
    )
    lines += [f"  {names[a]} --> {names[b]}" for a, b in edges]
    return "\n".join(lines) + "\n"


def _box(log: Log, home: int, entry: int) -> str:
    """The shape and text of a node: round ends for inputs and outputs, a box for a module."""
    row = log.row(entry)
    if home < 0:
        call = log.recording.module_calls[-1 - home]
        kind = log.recording.module_classes.get(call.address, "")
        words = [call.address or log.recording.model_name, kind, shape_text(row.shape)]
        return f'["{_text(words)}"]'
    if entry in log.boundary_addresses:
        return f'(["{_text([log.boundary_addresses[entry][0], shape_text(row.shape)])}"])'
    return f'("{_text([log.label(entry), shape_text(row.shape)])}")'


def _text(words: Sequence[str]) -> str:
    """Lines of a label; characters that Mermaid reads otherwise are escaped."""
    return "<br/>".join(filter(None, map(_escaped, words)))


def _escaped(word: str) -> str:
    for char, code in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        word = word.replace(char, code)
    return word
