"""The web page of runs: a self-contained file, or a page that loads its data from a server."""

import base64
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens._monitor.read.tables import (
    STATISTICS,
    RunTables,
    bfloat16,
    block,
    grouped,
    stride_for,
)
from torchlens._monitor.serve.module_page import graph_page
from torchlens._page.page import PAGE, Exploration, bundle, filled_template, write_page

if TYPE_CHECKING:
    from torchlens._monitor.read.reader import RunReader


RUN_PAGE = PAGE.parent / "runs_js"
# Levels of detail of a file, from most to least: the number of columns of the statistics in
# `_FIRST`, of the others, and of histograms. The first level that fits the maximum size is used.
_DETAIL = (
    (1024, 1024, 128), (1024, 256, 64), (1024, 128, 64), (1024, 128, 32), (512, 128, 32), (512, 64,
    32), (256, 64, 32),
    (256, 32, 16), (128, 32, 16), (64, 16, 16), (32, 16, 8), (16, 8, 8),
)  # fmt: skip
_FIRST = frozenset({"rms", "dead", "saturated", "nonfinite"})
_MOST_BYTES = 1_750_000
# Histogram counts are quantized to this many levels, relative to the fullest bin.
_LEVELS = 15
# The number of series from which the size of a level of detail is estimated.
_SERIES_TO_TRY = 60


def live_page_text(title: str) -> str:
    """The HTML of the page that loads its data from a server."""
    return _page_text({"title": title, "packed": ""}, connects=True)


def explore_runs(
    runs: "Sequence[RunReader]", target: Path | None, title: str | None
) -> Exploration:
    """Writes runs to one HTML file, which needs no network and no other file."""
    names = _names([run.folder for run in runs])
    tables = [RunTables(run) for run in runs]
    share = _MOST_BYTES // len(runs)
    packs = [_smallest(each, name, share) for each, name in zip(tables, names, strict=True)]
    body, index = b"", []
    for head, own in packs:
        index.append(_shifted(head, len(body)))
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


class _Contents:
    """The numbers of a run at the given detail. `pieces` can reduce them further."""

    def __init__(self, tables: RunTables, detail: tuple[int, int, int]) -> None:
        first, others, most_histograms = detail
        self.tables = tables
        self._statistics = tables.all_tables(
            {name: first if name in _FIRST else others for name in STATISTICS}
        )
        self._histograms = tables.all_histograms(most_histograms)
        self._kinds = dict.fromkeys(key.kind for key in tables.keys)

    def pieces(self, detail: tuple[int, int, int], every: int = 1) -> Iterator[tuple[str, bytes]]:
        """(key, block) of tables and histograms (key ''). With `every`, only of each n-th series,
        to estimate sizes.
        """
        first, others, most_histograms = detail
        for kind in self._kinds:
            numbers = self.tables.numbers(kind)[::every]
            for statistic in STATISTICS:
                stride, values = self._statistics[statistic]
                by = stride_for(values.shape[1], first if statistic in _FIRST else others)
                shown = (
                    values[numbers]
                    if by == 1
                    else grouped(values[numbers], by, STATISTICS[statistic])
                )
                head = {
                    "stride": stride * by,
                    "from": 0,
                    "columns": shown.shape[1],
                    "series": numbers.tolist(),
                }
                yield f"{kind}/{statistic}", block(head, _planes(bfloat16(shown)))
        for number in range(0, len(self.tables.keys), every):
            yield "", self._histograms.block(number, most_histograms, _LEVELS)

    def packed_size(self, detail: tuple[int, int, int]) -> int:
        """The size in the file at this detail, estimated from some of the series."""
        every = -(-len(self.tables.keys) // _SERIES_TO_TRY)
        body = b"".join(piece for _, piece in self.pieces(detail, every))
        return len(zlib.compress(body, 6)) * every * 4 // 3


def _smallest(tables: RunTables, name: str, most: int) -> tuple[dict[str, Any], bytes]:
    """The run packed with the most detail that fits in `most` bytes. For long runs, levels that are
    certain to be too large are skipped.
    """
    levels = list(_DETAIL)
    if sum(len(step.columns) for step in tables.steps) > 10_000:
        while (
            len(levels) > 1
            and len(tables.keys) * (3 * min(levels[0][0], len(tables.steps)) + 4 * levels[0][2])
            > 24 * most
        ):
            del levels[0]
    contents = _Contents(tables, levels[0])
    # The factor allows for a sample of series that compresses worse than all of them.
    while len(levels) > 1 and contents.packed_size(levels[0]) > 1.3 * most:
        del levels[0]
    while True:
        found = _packed(contents, name, levels.pop(0))
        if not levels or len(zlib.compress(found[1], 6)) * 4 // 3 <= most:
            return found


def _packed(
    contents: _Contents, name: str, detail: tuple[int, int, int]
) -> tuple[dict[str, Any], bytes]:
    """(index, data). The index holds (offset, length) of each table, histogram and scalar."""
    pieces: list[bytes] = []
    size = 0

    def place(piece: bytes) -> list[int]:
        nonlocal size
        piece += b" " * (-len(piece) % 8)
        pieces.append(piece)
        size += len(piece)
        return [size - len(piece), len(piece)]

    reader = contents.tables.reader
    found: dict[str, list[int]] = {}
    histograms: list[list[int]] = []
    for what, piece in contents.pieces(detail):
        if what:
            found[what] = place(piece)
        else:
            histograms.append(place(piece))
    scalars = {own: place(contents.tables.scalar(own, most=detail[0])) for own in reader.scalars}
    info = reader.info
    index = {
        "name": name,
        "model": str(info.get("model", "")),
        "summary": contents.tables.summary(),
        "graph": graph_page(reader.graph),
        "tables": found,
        "histograms": histograms,
        "scalars": scalars,
    }
    return index, b"".join(pieces)


def _planes(values: np.ndarray) -> np.ndarray:
    """Differences from column to column, all upper bytes before all lower bytes: this order
    compresses well.
    """
    changes = (
        np.diff(values.astype("<u2"), axis=1, prepend=np.zeros((len(values), 1), "<u2"))
        .astype("<u2")
        .reshape(-1)
    )
    return np.concatenate([(changes >> 8).astype("u1"), (changes & 255).astype("u1")])


def _shifted(index: dict[str, Any], by: int) -> dict[str, Any]:
    def moved(place: list[int]) -> list[int]:
        return [place[0] + by, place[1]]

    return {
        **index,
        "tables": {key: moved(place) for key, place in index["tables"].items()},
        "histograms": [moved(place) for place in index["histograms"]],
        "scalars": {key: moved(place) for key, place in index["scalars"].items()},
    }
