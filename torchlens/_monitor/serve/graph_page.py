"""Converts the graph of a run (graph.json) to the data of the viewer's page."""

from typing import Any

from torchlens._graph.build import assemble_graph
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._page.page_data import page_data
from torchlens._portable.document_reading import decisions_of, recording_of
from torchlens._portable.python_values import PythonReader
from torchlens.errors import TraceError

# What reading a file that is damaged, or that another program wrote, may raise.
_UNREADABLE = (
    LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, TraceError,
)  # fmt: skip


def graph_page(graph: dict[str, Any]) -> dict[str, Any]:
    """{"page", "note"}: the data of the page, or None and the reason."""
    if not graph.get("log"):
        return {"page": None, "note": str(graph.get("note", ""))}
    try:
        return {"page": _page_of(graph["log"]), "note": str(graph.get("note", ""))}
    except _UNREADABLE:
        return {"page": None, "note": "The graph of this run cannot be read."}


def _page_of(log: dict[str, Any]) -> dict[str, Any]:
    """The page of the log. No tensor came with it."""
    recording = recording_of(log["graph"], log["seconds"], PythonReader(lambda note: None))
    recording.seconds_forward = float(log["seconds_forward"])
    decisions = decisions_of(log["graph"], recording)
    history = ModelHistory(Log(recording, make_graph=lambda own: assemble_graph(own, decisions)))
    return page_data(history, {}, None, has_repeats=False)
