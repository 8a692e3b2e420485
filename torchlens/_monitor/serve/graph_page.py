"""Converts the graph of a run (graph.json) to the data of the viewer's page and to a hash."""

from typing import Any

from torchlens._graph.build import assemble_graph
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._history.receipt import exported_receipt
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
        page = page_data(_history_of(graph["log"]), {}, None, has_repeats=False)
        return {"page": page, "note": str(graph.get("note", ""))}
    except _UNREADABLE:
        return {"page": None, "note": "The graph of this run cannot be read."}


def graph_structure(graph: dict[str, Any]) -> str | None:
    """The structure of the model, as receipts have it; None if the graph is of modules alone, or
    cannot be read.
    """
    if not graph.get("log") or graph.get("note"):
        return None
    try:
        return exported_receipt(_history_of(graph["log"])._log).structure
    except _UNREADABLE:
        return None


def _history_of(log: dict[str, Any]) -> ModelHistory:
    """The history of the log. No tensor came with it."""
    recording = recording_of(log["graph"], log["seconds"], PythonReader(lambda note: None))
    recording.seconds_forward = float(log["seconds_forward"])
    decisions = decisions_of(log["graph"], recording)
    return ModelHistory(Log(recording, make_graph=lambda own: assemble_graph(own, decisions)))
