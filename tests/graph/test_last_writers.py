"""Who last wrote what: the same as byte by byte, at any size, however often memory is written."""

import gc
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from tests.graph.byte_exact import bytes_of, random_view, writers_of
from tests.sampling import first
from tests.validate.proof import prove
from torchlens._capture.memory import process_memory
from torchlens._graph.last_writers import Answer, Question, last_writers
from torchlens._recording import cells
from torchlens._recording.cells import Lattice
from torchlens._recording.recording import Write
from torchlens._recording.regions import Region, region_of

SHAPES = [(12,), (6, 10), (3, 4, 8), (2, 3, 4, 6), (30, 20), (7, 5, 3)]


def some_regions(generator: np.random.Generator) -> list[Region]:
    shape = SHAPES[generator.integers(0, len(SHAPES))]
    skipped = int(generator.choice([0, 8]))
    base = torch.zeros(int(np.prod(shape)) + skipped)[skipped:].view(shape)
    return [region_of(random_view(generator, base)) for _ in range(generator.integers(1, 8))]


def some_case(seed: int) -> tuple[list[Write], list[Question]]:
    generator = np.random.default_rng(seed)
    regions = some_regions(generator)
    num_writes = int(generator.integers(1, 12))
    writes = [
        Write(2 * number + 1, 0, regions[generator.integers(0, len(regions))])
        for number in range(num_writes)
    ]
    questions = []
    for _ in range(generator.integers(1, 8)):
        after = int(generator.integers(-1, 2 * num_writes))
        region = regions[generator.integers(0, len(regions))]
        if region.num_elements:
            questions.append(
                Question(region, after, int(generator.integers(after + 1, 2 * num_writes + 3)))
            )
    return writes, questions


def bytes_of_boxes(lattice: Lattice, region: Region) -> set[int]:
    found: set[int] = set()
    for box in lattice.boxes(region) or []:
        offsets = np.array([lattice.origin])
        for (start, step, count), stride in zip(box, lattice.strides, strict=True):
            offsets = (offsets[:, None] + (start + step * np.arange(count)) * stride).reshape(-1)
        found.update(offsets.tolist())
    return found


# A quarter of the random programs is enough while one works.
STARTS = [0, *(pytest.param(start, marks=pytest.mark.slow) for start in range(100, 400, 100))]


@pytest.mark.parametrize("start", STARTS)
def test_the_boxes_of_a_region_are_its_bytes(start: int) -> None:
    for seed in range(start, start + 100):
        regions = some_regions(np.random.default_rng(seed))
        lattice = Lattice.of(regions)
        for region in regions:
            assert bytes_of_boxes(lattice, region) == (
                set(bytes_of(region).tolist()) if region.num_elements else set()
            ), seed


@pytest.mark.parametrize(
    "limits", [{}, {"_MOST_BOXES": 2}, {"_MOST_CELLS": 4}], ids=["boxes", "odd ones", "runs"]
)
@pytest.mark.parametrize("start", STARTS)
def test_random_writes_are_answered_as_byte_by_byte(
    start: int, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in limits.items():
        monkeypatch.setattr(cells, name, limit)
    for seed in range(start, start + 100):
        writes, questions = some_case(seed)
        found = last_writers(writes, questions)
        for question in questions:
            writers, is_covered = writers_of(question, writes)
            assert found[question] == Answer(tuple(writers), is_covered, True), (seed, question)


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits", [{"_MOST_BOXES": 1, "_MOST_RUNS": 3}, {"_MOST_CELLS": 4, "_MOST_RUNS": 3}]
)
def test_what_is_too_irregular_misses_no_writer_and_says_so(
    limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in limits.items():
        monkeypatch.setattr(cells, name, limit)
    num_inexact = 0
    for seed in range(200):
        writes, questions = some_case(seed)
        found = last_writers(writes, questions)
        for question in questions:
            writers, is_covered = writers_of(question, writes)
            answer = found[question]
            assert set(writers) <= set(answer.writers), seed
            assert is_covered or not answer.is_covered, seed
            if answer.is_exact:
                assert answer == Answer(tuple(writers), is_covered, True), seed
            num_inexact += not answer.is_exact
    assert num_inexact > 20


def test_regular_regions_are_exact_at_any_size() -> None:
    rows, columns = 1 << 20, 1 << 18  # a tensor of a terabyte
    whole = Region(0, (rows, columns), (columns, 1), 4)
    parts = [
        Region(3, (rows,), (columns,), 4),
        Region(5 * columns, (columns,), (1,), 4),
        Region(0, (rows // 2, columns), (2 * columns, 1), 4),
        Region(0, (rows, columns // 2), (columns, 2), 4),
    ]
    writes = [Write(number + 1, 0, region) for number, region in enumerate(parts)]
    odd_column = Region(7, (rows,), (columns,), 4)
    questions = [
        Question(whole, 0, 9),
        Question(parts[0], 0, 9),
        Question(parts[1], 0, 9),
        Question(odd_column, 0, 9),
    ]
    found = last_writers(writes, questions)
    assert [found[question] for question in questions] == [
        Answer((1, 2, 3, 4), False, True),
        Answer((1, 2, 3), True, True),
        Answer((2, 4), True, True),
        Answer((2, 3), False, True),
    ]


# -- in models -------------------------------------------------------------------------------------


class Runs(nn.Module):
    """A model that runs a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


@pytest.mark.slow
@pytest.mark.parametrize("start", first(1, range(0, 120, 40)))
def test_random_views_read_what_they_look_at_as_byte_by_byte(start: int) -> None:
    num_partial = 0
    for seed in range(start, start + 40):
        generator = np.random.default_rng(seed)
        shape = SHAPES[generator.integers(0, len(SHAPES))]
        regions = [region_of(random_view(generator, torch.zeros(shape))) for _ in range(12)]
        steps = [
            (region, bool(generator.integers(0, 2))) for region in regions if region.item_bytes == 4
        ]

        def run(x: torch.Tensor, steps: list[tuple[Region, bool]] = steps) -> list[torch.Tensor]:
            y, results = x * 1, []
            for region, is_written in steps:
                view = y.as_strided(region.shape, region.strides, region.offset)
                if is_written and not region.overlaps_itself:
                    view.add_(1)
                results.append(view)
            return [view * 2 for view in results]

        history = tl.log_forward_pass(Runs(run), torch.rand(shape))
        log = history._log
        writes: list[Write] = []
        views: list[int] = []
        made = 1  # after the input
        for number, row in enumerate(log.recording.rows):
            if row.operation.name == "as_strided":
                views.append(number)
            elif row.operation.name == "add_":
                writes.append(Write(number, 0, steps[len(views) - 1][0]))
        for (region, _), view in zip(steps, views, strict=True):
            writers, is_covered = writers_of(Question(region, made, view), writes)
            expected = writers if is_covered and region.num_elements else [made, *writers]
            assert [
                log.graph.recorded[parent] for parent in log.graph.parents[log.graph.entry_of[view]]
            ] == expected, seed
            num_partial += len(expected) < len([write for write in writes if write.entry < view])
        assert prove(Runs(run), torch.rand(shape)).findings == [], seed
    assert num_partial > 50


def count_cells(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the number of cells whenever memory is divided into some."""
    counts: list[int] = []
    divide = cells.cells_of

    def counted(regions: Any) -> Any:
        found = divide(regions)
        counts.append(int(np.prod(found.shape)))
        return found

    monkeypatch.setattr("torchlens._graph.last_writers.cells_of", counted)
    return counts


def test_a_column_of_a_large_tensor_is_two_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_cells(monkeypatch)

    def write(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[:, 0].add_(1)
        return y * 2

    history = tl.log_forward_pass(Runs(write), torch.rand(1500, 1500))
    assert history["mul_2_4"].parent_layers == ["mul_1_1", "add_1_3"]
    assert counts == [2]


def test_a_log_with_parents_that_may_be_too_many_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "_MOST_BOXES", 2)
    monkeypatch.setattr(cells, "_MOST_RUNS", 2)

    def write(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        column = y[:, 3]
        y.diagonal().add_(1)
        y[:, 5].mul_(2)
        return column * 2

    history = tl.log_forward_pass(Runs(write), torch.rand(9, 9))
    with pytest.warns(UserWarning, match="irregular"):
        assert history["mul_3_7"].parent_layers == ["getitem_1_2", "add_1_4"]


@pytest.mark.slow
def test_nothing_outlives_the_graph() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        for number in range(20):
            y[:, number] += 1
            y[number].add_(1)
            y[number::7, ::3].mul_(2)
        return y * 2

    def log() -> Any:
        history = tl.log_forward_pass(Runs(write), torch.rand(300, 300), layers_to_save="none")
        assert len(history) > 100
        return weakref.ref(history)

    log()
    gc.collect()
    tracemalloc.start()
    try:
        gone = log()
        gc.collect()
        assert gone() is None
        # Without the block that keeps glibc from returning memory too early, which a log may make.
        others = tracemalloc.Filter(False, process_memory.__file__)
        left = tracemalloc.take_snapshot().filter_traces([others])
        kept = sum(statistic.size for statistic in left.statistics("filename"))
    finally:
        tracemalloc.stop()
    assert kept < 300_000
