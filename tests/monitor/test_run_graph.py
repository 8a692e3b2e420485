"""The graph of a run: the log of the model's first call, stored without its tensors."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._monitor.serve.graph_page import graph_page
from torchlens._page.page_data import page_data


class Writing(nn.Module):
    """Writes in place, reads a value for an `if`, and uses a parameter twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        y = self.norm(x) + 1
        y[:, 0] = 0
        y = y.relu_()
        if y.sum() > 1000:
            y = y * scale
        for _ in range(3):
            y = self.fc(y) + y
        return torch.cat([y, y.flip(1)], dim=-1)


MODELS = {
    "in place": (Writing, (6, 4)),
    "convolutions": (
        lambda: nn.Sequential(
            *(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(inplace=True)) for _ in range(4))
        ),
        (2, 2, 5, 5),
    ),
    "attention": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        (2, 3, 8),
    ),
}


def graph_of_run(model: nn.Module, x: torch.Tensor, folder: Path, **options: Any) -> dict[str, Any]:
    with tl.monitor(model, folder, **options) as run:
        model(x).sum().backward()
        run.step()
    assert not run.problems
    return tl.open_run(folder).graph


@pytest.mark.parametrize("name", MODELS)
def test_the_page_of_a_run_shows_the_operations_that_a_log_of_the_model_has(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make(), torch.randn(*shape)
    page = graph_page(graph_of_run(model, x, tmp_path))["page"]
    history = tl.get_model_metadata(model, x)
    expected = page_data(history, {}, None, has_repeats=False)
    times = {"seconds", "places"}  # a call at another line of this file
    for column in ("stat", "grad"):  # no parameter comes with the run
        page["parameters"].pop(column)
        expected["parameters"].pop(column)
    assert page["receipt"].startswith(f"{type(model).__name__}: structure ")
    assert not page["receipt"].endswith("()")  # the versions are not stored
    for key in expected.keys() - times - {"entries", "strings", "statistics", "receipt"}:
        assert json.dumps(page[key]) == json.dumps(expected[key]), key
    for column in expected["entries"].keys() - {"micros", "place"}:
        assert page["entries"][column] == expected["entries"][column], column
    assert page["seconds"] > 0


def module_links(page: dict[str, Any]) -> list[tuple[str, str]]:
    words, titles = page["strings"], page["parts"]["title"]
    ends = zip(page["links"]["from"], page["links"]["to"], strict=True)
    return [(words[titles[source]], words[titles[target]]) for source, target in ends]


def test_a_graph_of_modules_is_a_chain_of_the_modules_that_call_no_other(tmp_path: Path) -> None:
    make, shape = MODELS["convolutions"]
    model, x = make(), torch.randn(*shape)
    graph = graph_of_run(model, x, tmp_path, graph="modules")
    page = graph_page(graph)["page"]
    inner = [f"{block}.{part}" for block in range(4) for part in range(2)]
    titles = [page["strings"][title] for title in page["parts"]["title"]]
    order = [title for title in titles if "." in title or title in ("input", "output")]
    assert [title for title in order if title in inner] == inner
    links = [ends for ends in module_links(page) if set(ends) <= set(inner)]
    assert sorted(links) == sorted(itertools.pairwise(inner))
    assert page["params"] == sum(parameter.numel() for parameter in model.parameters())
    assert graph["note"] == "The graph was asked for module by module."


def test_what_is_computed_between_modules_counts_as_made_by_the_last_of_them(
    tmp_path: Path,
) -> None:
    make, shape = MODELS["in place"]
    page = graph_page(graph_of_run(make(), torch.randn(*shape), tmp_path, graph="modules"))["page"]
    assert ("norm", "fc") in module_links(page)
    titles = [page["strings"][title] for title in page["parts"]["title"]]
    assert page["parts"]["passes"][titles.index("fc")] == 3


def test_a_graph_holds_no_path_of_the_machine(tmp_path: Path) -> None:
    graph = graph_of_run(Writing(), torch.randn(6, 4), tmp_path)
    assert str(Path(__file__).parent) not in json.dumps([graph, graph_page(graph)])


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a JSON value."""
    pairs = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    return [(value, key) for key, _ in pairs] + [
        place for _, inner in pairs for place in _places(inner)
    ]


def test_a_damaged_graph_is_shown_or_reported_but_never_an_error(tmp_path: Path) -> None:
    text = json.dumps(graph_of_run(Writing(), torch.randn(6, 4), tmp_path))
    generator, reported = random.Random(0), 0
    for _ in range(80):
        graph = json.loads(text)
        container, key = generator.choice(_places(graph["log"]))
        container[key] = generator.choice([None, -1, 10**30, 1.5, "x", [], {}, [[1]], {"a": 1}])
        found = graph_page(graph)
        json.dumps(found)
        reported += found["page"] is None
        assert (found["page"] is None) == (found["note"] == "The graph of this run cannot be read.")
    assert reported > 20
