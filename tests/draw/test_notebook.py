"""What a notebook shows, in a real kernel."""

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

MODEL = """
import torch, torchlens as tl

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
x = torch.rand(2, 4)
history = tl.log_forward_pass(model, x)
"""


def shown(folder: Path, *cells: str) -> list[list[tuple[str, dict[str, str]]]]:
    """Of each cell, what it displayed and what it evaluated to, by kind of content."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in (MODEL, *cells)]
    )
    NotebookClient(
        notebook,
        timeout=None,
        startup_timeout=1200,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    return [
        [(output.output_type, dict(output.get("data", {}))) for output in cell.outputs]
        for cell in notebook.cells[1:]
    ]


def kinds(outputs: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, set[str]]]:
    return [(output_type, set(data)) for output_type, data in outputs]


def test_a_notebook_shows_each_thing_once(tmp_path: Path) -> None:
    history, page, table, drawing, again, graph, profile = shown(
        tmp_path,
        "history",
        "history.explore(None)",
        "history.to_pandas()",
        "drawing = history.render_graph(vis_opt='rolled')\ndrawing",
        "drawing",
        "tl.show_model_graph(model, x)",
        "with tl.profile(model) as profile:\n    model(x).sum().backward()\nprofile",
    )
    picture = {"text/plain", "image/svg+xml"}
    assert kinds(history) == [("execute_result", picture)]
    assert "linear_1_1" in history[0][1]["image/svg+xml"]
    assert kinds(page) == [("execute_result", {"text/plain", "text/html"})]
    assert "<iframe" in page[0][1]["text/html"]
    assert kinds(table) == [("execute_result", {"text/plain", "text/html"})]
    # Shown by the call, so that what the cell evaluates to is only named; in another cell it is
    # shown again.
    assert kinds(drawing) == [("display_data", picture), ("execute_result", {"text/plain"})]
    assert kinds(again) == [("execute_result", picture)]
    assert kinds(graph) == kinds(drawing)
    assert "1 step, " in profile[0][1]["text/plain"]
    assert (tmp_path / "graph.gv.pdf").read_bytes().startswith(b"%PDF")
