"""A compiled model stays one graph, and trains the same: seen from outside, or run as its source in
recorded steps.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.monitor.loops import bits


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x) * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = Part(), nn.ReLU(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.first(x)))


def train(how: str, folder: Path | None, **options: Any) -> tuple[Any, int, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    source = Net()
    model: Any = source
    if how in ("wrapped", "outside"):
        model = torch.compile(source, backend=backend)
    elif how == "method":
        source.compile(backend=backend)
    else:
        source.first.compile(backend=backend)
    run = (
        None
        if folder is None
        else tl.monitor(source if how == "outside" else model, folder, **options)
    )
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(7):
        loss = model(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if run is not None:
        run.finish()
    return (losses, list(bits([source]))), len(graphs), run


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("how", ["wrapped", "outside", "method", "part"])
def test_a_compiled_model_is_one_graph_and_trains_the_same(
    how: str, every: int, tmp_path: Path
) -> None:
    plain, num_graphs, _ = train(how, None)
    assert num_graphs == 1
    monitored, num_monitored, run = train(how, tmp_path, every=every)
    assert monitored == plain
    assert num_monitored == 1
    assert run.problems == []
    r = tl.open_run(tmp_path)
    assert r.steps == list(range(0, 7, every))
    expected = {"part": {"", "first", "first.inside", "act", "last"}}.get(
        how, {"", "first.inside", "last"}
    )
    assert set(r.modules) == expected
    outputs = r["first"] if how == "part" else r[""]
    assert len(outputs.outputs.steps) == len(r.steps)
    assert len(outputs.gradients.steps) == len(r.steps)
    assert r["first.inside"].parameters["weight"].steps.tolist() == r.steps


@pytest.mark.slow
def test_recorded_steps_run_as_their_source_if_asked(tmp_path: Path) -> None:
    plain, _, _ = train("wrapped", None)
    monitored, num_graphs, run = train("wrapped", tmp_path, every=3, compiled="eager")
    assert monitored == plain  # the backend runs the same operations
    assert num_graphs == 1
    assert run.problems == []
    assert set(tl.open_run(tmp_path).modules) == {"", "first", "first.inside", "act", "last"}
