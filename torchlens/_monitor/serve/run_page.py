"""The web page of runs: a self-contained file, or a page that loads its data from a server."""

import base64
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens._monitor.read.run_tables import (
    STATISTICS,
    RunTables,
    block,
    histogram_block,
    stride_for,
)
from torchlens._monitor.serve.graph_page import graph_page
from torchlens._monitor.store.columns import Columns, merged
from torchlens._page.page import PAGE, Exploration, bundle, filled_template, write_page

if TYPE_CHECKING:
    from torchlens._monitor.read.reader import RunReader


RUN_PAGE = PAGE.parent / "runs_js"
# Levels of detail of a file, from most to least: the number of columns of the statistics in
# `_FIRST`, of the others, and of histograms. The first level that fits the maximum size is used.
_DETAIL = (
    (1024, 1024, 128), (1024, 256, 64), (1024, 128, 32), (512, 64, 32), (256, 64, 32),
    (256, 32, 16), (128, 32, 16), (64, 16, 16), (32, 16, 8), (16, 8, 8),
)  # fmt: skip
_FIRST = frozenset({"rms", "dead", "saturated", "nonfinite"})
_MOST_BYTES = 1_750_000
# Histogram counts are quantized to this many levels, relative to the fullest bin.
_LEVELS = 15


def live_page_text(title: str) -> str:
    """The HTML of the page that loads its data from a server."""
    return _page_text({"title": title, "packed": ""}, connects=True)


def explore_runs(
    runs: "Sequence[RunReader]", target: Path | None, title: str | None
) -> Exploration:
    """Writes runs to one HTML file, which needs no network and no other file."""
    names = _names([run.folder for run in runs])
    share = _MOST_BYTES // len(runs)
    body, index = b"", []
    for run, name in zip(runs, names, strict=True):
        head, own = _smallest(RunTables(run), name, share, len(body))
        index.append(head)
        body += own
    packed = zlib.compress(block({"runs": index}, np.frombuffer(body, "u1")), 9)
    data = {"title": title or " · ".join(names[:3]), "packed": base64.b64encode(packed).decode()}
    return write_page(_page_text(data, connects=False), target)


def _page_text(data: dict[str, Any], connects: bool) -> str:
    pane = (PAGE / "pane.html").read_text(encoding="utf-8")
    body = (RUN_PAGE / "run.html").read_text(encoding="utf-8").replace("%%PANE%%", pane)
    script = f"const openPane = {bundle(PAGE, 'start.js')};\n({bundle(RUN_PAGE, 'start.js')})();"
    return filled_template(
        data["title"], data, body, ["page.css", "../runs_js/run.css"], script, connects
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of each path: as few as make the names unique."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(own[-length:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(own[-1:])} ({number})" for number, own in enumerate(parts, 1)]


# -- packing ---------------------------------------------------------------------------------------


def _smallest(tables: RunTables, name: str, most: int, offset: int) -> tuple[dict[str, Any], bytes]:
    """The run packed with the most detail that fits in `most` bytes."""
    stride = stride_for(len(tables.steps), _DETAIL[0][2])
    groups = [
        merged([step.columns for step in tables.steps[first : first + stride]])
        for first in range(0, len(tables.steps), stride)
    ]
    for detail in _DETAIL:
        index, body = _packed(tables, groups, stride, name, detail, offset)
        if len(zlib.compress(body, 6)) * 4 // 3 <= most:
            break
    return index, body


def _packed(
    tables: RunTables,
    groups: Sequence[Columns],
    group_stride: int,
    name: str,
    detail: tuple[int, int, int],
    offset: int,
) -> tuple[dict[str, Any], bytes]:
    """(index, data). The index holds (offset, length) of each table, histogram and scalar. The
    histograms are made of groups of `group_stride` steps.
    """
    body = bytearray()

    def place(piece: bytes) -> list[int]:
        start = offset + len(body)
        body.extend(piece + b" " * (-len(piece) % 8))
        return [start, len(piece)]

    first, others, most_histograms = detail
    found = {}
    for kind in dict.fromkeys(key.kind for key in tables.keys):
        for statistic in STATISTICS:
            most = first if statistic in _FIRST else others
            head, values = tables.table(kind, statistic, most=most)
            found[f"{kind}/{statistic}"] = place(block(head, _planes(values)))
    by = stride_for(len(groups), most_histograms)
    head = {"stride": group_stride * by, "from": 0}
    histograms = [
        place(histogram_block(groups, number, by, head, _LEVELS))
        for number in range(len(tables.keys))
    ]
    reader = tables.reader
    info = reader.info
    index = {
        "name": name,
        "model": str(info.get("model", "")),
        "summary": tables.summary(),
        "graph": graph_page(reader.graph),
        "tables": found,
        "histograms": histograms,
        "scalars": {own: place(tables.scalar(own, most=first)) for own in reader.scalars},
    }
    return index, bytes(body)


def _planes(values: np.ndarray) -> np.ndarray:
    """Differences from column to column, all upper bytes before all lower bytes: this order
    compresses well.
    """
    changes = np.diff(values, axis=1, prepend=np.zeros((len(values), 1), "<u2")).reshape(-1)
    return np.concatenate([(changes >> 8).astype("u1"), (changes & 255).astype("u1")])
