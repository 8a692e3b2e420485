"""The files of a run: kills, damaged bytes, files from strangers, the budget, resumed runs, full
disks.
"""

import json
import multiprocessing
import os
import random
import shutil
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._monitor.record import writer as writer_module
from torchlens._monitor.record.statistics import summarized
from torchlens._monitor.store import lines
from torchlens._monitor.store.folder import files_of_ranks, steps_path
from torchlens._monitor.store.lines import line_of
from torchlens._monitor.store.rank_files import RankFiles


def train(folder: Path, num_steps: int, budget: int = 0, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.monitor(model, folder, graph="modules", **options) as run:
        if budget:
            squeeze(run, budget)
        for _ in range(num_steps):
            loss = model(torch.randn(3, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            while run.counts.pending > 1_000:  # these loops are faster than any real one
                time.sleep(0.001)
    return run


def squeeze(run: Any, budget: int = 1 << 16) -> None:
    """Sets a smaller budget than users can ask for, so that merging begins early."""
    files = run._writer._files
    files.budget, files.file_bytes = budget, 1 << 12


def wait_for(run: Any, step: int) -> None:
    """Until a step is in the file: these loops are faster than any real one."""
    end = time.monotonic() + 60
    while run.last_step != step:
        assert time.monotonic() < end, run.problems
        time.sleep(0.001)


def steps_file(folder: Path) -> Path:
    """The only file of steps."""
    (file,) = files_of_ranks(folder)[0]
    return steps_path(folder, 0, file)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("rank*"))


def count_steps(r: tl.RunReader) -> int:
    return sum(count for _, _, count in r.step_groups)


# -- kills
# --------------------------------------------------------------------------------------------------


def _train_for_ever(folder: Path, announce: Any) -> None:
    torch.manual_seed(os.getpid())
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = tl.monitor(model, folder, budget=1 << 20, graph="modules")
    while True:
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        announce.send(run.last_step)


@pytest.mark.slow
def test_after_a_kill_at_any_moment_every_announced_step_is_there(tmp_path: Path) -> None:
    generator = random.Random(0)
    context = multiprocessing.get_context("fork")
    announced = -1
    for _ in range(5):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_train_for_ever, args=(tmp_path, sender))
        process.start()
        sender.close()
        for _ in range(generator.randrange(1, 60)):
            step = receiver.recv()
            announced = announced if step is None else step
        process.kill()
        process.join()
        while True:
            try:
                step = receiver.recv()
                announced = announced if step is None else step
            except (EOFError, OSError):
                break
        r = tl.open_run(tmp_path)
        assert r.step_groups[-1][1] >= announced
        assert (
            count_steps(r) == r.step_groups[-1][1] + 1
        )  # all of them, from the first process's first on
        assert all("cut off" in each for each in r.damage)
    assert announced > 0


# -- damaged bytes
# --------------------------------------------------------------------------------------------------


def test_a_file_that_ends_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    train(tmp_path, 5)
    before = tl.open_run(tmp_path)
    path = steps_file(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 211):
        path.write_bytes(whole[:length])
        r = tl.open_run(tmp_path)
        assert r.steps == before.steps[: len(r.steps)]
        assert len(r.damage) <= 1
        assert not r.is_finished
        for series in r.series():
            key = series.key
            known = before[key.module].kinds[key.kind][key.name]
            assert series.rms.tolist() == known.rms.tolist()[: len(series)]
    path.write_bytes(whole)
    log = tmp_path / "rank0.jsonl"
    whole = log.read_bytes()
    for length in range(0, len(whole), 211):
        log.write_bytes(whole[:length])
        r = tl.open_run(tmp_path)
        assert r.steps == before.steps
        assert len(r.series()) <= len(before.series())


@pytest.mark.parametrize("name", ["rank0.jsonl", "rank0-000001-000001-0.steps"])
def test_a_flipped_bit_is_reported_and_costs_only_its_line(tmp_path: Path, name: str) -> None:
    train(tmp_path, 5)
    path = tmp_path / name
    whole = path.read_bytes()
    generator = random.Random(1)
    for _ in range(50):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        r = tl.open_run(tmp_path)
        assert 1 <= len(r.damage) <= 2  # two if the bit makes or breaks the end of a line
        assert set(r.steps) <= set(range(5))
        assert len(r.steps) >= 3


@pytest.mark.slow
def test_a_line_with_its_checksum_that_makes_no_sense_is_reported_and_left_out(
    tmp_path: Path,
) -> None:
    """Every byte may be a stranger's."""
    train(tmp_path, 3)
    generator = random.Random(2)
    for path in (steps_file(tmp_path), tmp_path / "rank0.jsonl"):
        whole = path.read_bytes()
        texts = [line[9:] for line in whole.splitlines()]
        for _ in range(60):
            number = generator.randrange(len(texts))
            changed = bytearray(texts[number])
            for _ in range(generator.choice((1, 1, 8, 200))):
                changed[generator.randrange(len(changed))] = generator.choice(b'0919"[]{},-eEaA=x')
            if generator.random() < 0.3:
                del changed[generator.randrange(len(changed)) :]
            new = [*texts[:number], bytes(changed), *texts[number + 1 :]]
            path.write_bytes(b"".join(b"%08x %b\n" % (zlib.crc32(text), text) for text in new))
            r = tl.open_run(tmp_path)
            assert len(r.steps) <= 4
            for series in generator.sample(r.series(), min(3, len(r.series()))):
                series.to_pandas()
                if len(series):
                    series.histogram()
                    series.heat_map()
            assert isinstance(r.problems, list)
            assert isinstance(r.findings, list)
            assert isinstance(r.counts.recorded, int)
        path.write_bytes(whole)


def test_sizes_are_checked_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, 1)
    path = steps_file(tmp_path)
    whole = path.read_bytes()
    step = next(
        json.loads(line[9:])["step"] for line in whole.splitlines() if b'"step"' in line[:20]
    )
    deep = b'{"step":' + b"[" * 100_000
    for line in (
        line_of("step", {**step, "rows": ""}),
        line_of("step", {**step, "counts": step["counts"] * 2}),
        line_of("step", {**step, "width": 1 << 30}),
        line_of("step", {**step, "last": 1 << 70}),
        line_of("step", {**step, "count": 2}),
        line_of("step", []),
        line_of("scalars", [["a", 1, 1 << 70, 1, 1, 1, 1]]),
        line_of("scalars", 3),
        line_of("end", {}),
        line_of("something", 3),
        b"%08x %b\n" % (zlib.crc32(deep), deep),
    ):
        path.write_bytes(whole + line)
        r = tl.open_run(tmp_path)
        assert r.steps == [0]
        assert len(r.damage) == 1
        assert "is left out" in r.problems[-1]
    monkeypatch.setattr(lines, "_MAX_LINE_BYTES", 1 << 16)
    path.write_bytes(whole + b"x" * (1 << 17))
    r = tl.open_run(tmp_path)
    assert r.steps == [0]
    assert len(r.damage) == 1
    (tmp_path / "run.json").write_text("[" * 100_000)
    (tmp_path / "graph.json").write_text("3")
    r = tl.open_run(tmp_path)
    assert r.info == r.graph == {}
    assert "run.json is not JSON: RecursionError" in r.problems


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    train(tmp_path, 1)
    os.mkfifo(tmp_path / "rank0-000002-000002-0.steps")  # reading it would never end
    os.mkfifo(tmp_path / "rank1.jsonl")
    (tmp_path / "rank2.jsonl").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "a.points")
    (tmp_path / "run.json").unlink()
    os.mkfifo(tmp_path / "run.json")
    r = tl.open_run(tmp_path)
    assert (r.steps, r.ranks, r.info, r.projections) == ([0], [0], {}, {})
    assert r.problems == ["run.json cannot be read: it is not a regular file"]


# -- the budget
# --------------------------------------------------------------------------------------------------


def test_the_budget_is_kept_by_merging_and_counts_stay_exact(tmp_path: Path) -> None:
    budget = 1 << 16
    run = train(tmp_path, 200, budget=budget)
    assert run.problems == []
    assert budget / 4 < size_of(tmp_path) <= budget
    r = tl.open_run(tmp_path)
    assert r.damage == []
    groups = r.step_groups
    assert sum(count for _, _, count in groups) == 200
    assert [first for first, _, _ in groups] == [0, *(last + 1 for _, last, _ in groups[:-1])]
    assert max(count for _, _, count in groups) > 1
    assert groups[-1][2] == 1  # the newest are still whole
    outputs = r["0"].outputs
    assert outputs.num_calls.sum() == 200
    assert outputs.num_elements.sum() == outputs.num_sampled.sum() == 200 * 24
    assert outputs.heat_map().counts.sum() == 200 * 24
    assert r.counts.recorded == r.counts.offered == run.counts.offered
    scalars = r.scalars["loss"]
    assert scalars.counts.sum() == 200
    assert (scalars.low <= scalars.values).all()
    assert (scalars.values <= scalars.high).all()


def test_the_budget_is_kept_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the process is killed: before anything is merged, and when the old files are still
    beside the new one.
    """
    sizes = []
    replace = Path.replace

    def look(*_: Any) -> None:
        sizes.append(size_of(tmp_path))

    def looked_at(self: Path, target: Path) -> Path:
        look()
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", looked_at)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.monitor(model, tmp_path, graph="modules") as run:
        squeeze(run)
        run._writer.listeners.append(look)
        for _ in range(150):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            while run.counts.pending > 1_000:
                time.sleep(0.001)
    assert len(tl.open_run(tmp_path).steps) < 150
    assert max(sizes) <= 1 << 16


def test_merging_is_never_seen_half_done(tmp_path: Path) -> None:
    """A reader that looks again and again sees every step, in whichever files they are."""
    done = threading.Event()
    failures: list[Any] = []

    def read() -> None:
        r = tl.open_run(tmp_path)
        seen = 0
        while not done.is_set():
            r.refresh()
            fresh = tl.open_run(tmp_path)
            for reader in (r, fresh):
                groups = reader.step_groups
                total = sum(count for _, _, count in groups)
                if groups and total != groups[-1][1] + 1:
                    failures.append(groups)
                if total < seen:
                    failures.append((seen, total))
                seen = total

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.monitor(model, tmp_path, graph="modules") as run:
        squeeze(run)
        thread = threading.Thread(target=read)
        thread.start()
        for number in range(150):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            while run.last_step != number:
                done.wait(0.001)
    done.set()
    thread.join()
    assert failures == []
    assert any(file.level > 0 for file in files_of_ranks(tmp_path)[0])


def test_ranks_that_merged_differently_are_joined_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one rank has merged, the other may have whole: each step is there once, with what both
    saw of it.
    """
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        model = nn.Sequential(
            *(nn.Linear(4, 4) for _ in range(1 + rank))
        )  # the files fill at another pace
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with tl.monitor(model, tmp_path, graph="modules", step=0, every=3) as run:
            squeeze(run, 1 << 17)
            for number in range(300):
                model(torch.randn(3, 4)).sum().backward()
                optimizer.step()
                if number % 3 == 0:
                    wait_for(run, number)
        assert run.problems == []
    r = tl.open_run(tmp_path)
    groups = r.step_groups
    assert [first for first, _, _ in groups] == [0, *(last + 3 for _, last, _ in groups[:-1])]
    assert sum(count for _, _, count in groups) == 100
    assert 5 < len(groups) < 100
    outputs = r["0"].outputs
    assert outputs.num_calls.tolist() == [2 * count for _, _, count in groups]
    assert r["1"].outputs.num_calls.sum() == 100


def test_a_step_that_came_in_two_parts_is_merged_as_one(tmp_path: Path) -> None:
    """The second optimizer is seen for the first time when the first has ended the step: what it
    did comes later.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]
    with tl.monitor(model, tmp_path, graph="modules") as run:
        squeeze(run)
        for number in range(120):
            model(torch.randn(3, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            wait_for(run, number)
    assert run.problems == []
    r = tl.open_run(tmp_path)
    assert r.problems == []
    assert r.step_groups[0][2] > 1
    assert sum(count for _, _, count in r.step_groups) == 120
    for part in "01":
        assert r[part].updates["weight"].num_calls.sum() == 120
    assert r.counts.recorded == run.counts.offered


def test_what_a_checkpoint_supersedes_in_the_midst_of_merged_steps_is_cut(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for first in (0, 50):
        with tl.monitor(model, tmp_path, graph="modules", step=first) as run:
            squeeze(run)
            for number in range(first, 150):
                model(torch.randn(3, 4)).sum().backward()
                optimizer.step()
                wait_for(run, number)
    groups = tl.open_run(tmp_path).step_groups
    assert any(last == 49 for _, last, _ in groups)
    assert [first for first, _, _ in groups] == [0, *(last + 1 for _, last, _ in groups[:-1])]
    assert sum(count for _, _, count in groups) == 150


def _train_a_little(folder: Path, first: int, announce: Any) -> None:
    """A session that is killed at some moment after it has announced its steps."""
    torch.manual_seed(first)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(1 + first % 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = tl.monitor(model, folder, graph="modules", step=first)
    squeeze(run)
    for number in range(first, first + 12):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        wait_for(run, number)
        announce.send(number)
    time.sleep(600)


@pytest.mark.slow
def test_the_budget_is_kept_over_sessions_that_were_killed(tmp_path: Path) -> None:
    """Each leaves files behind, and some go back to a checkpoint: together they take no more than
    one that ran through.
    """
    context = multiprocessing.get_context("fork")
    generator = random.Random(0)
    step, last = 0, -1
    for _ in range(12):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_train_a_little, args=(tmp_path, step, sender))
        process.start()
        for _ in range(generator.randrange(1, 13)):
            last = receiver.recv()
        process.kill()
        process.join()
        while receiver.poll():
            last = receiver.recv()
        step = max(last + 1 - generator.choice((0, 0, 3, 8)), 0)
    assert size_of(tmp_path) <= (1 << 16) + (1 << 14), files_of_ranks(tmp_path)
    r = tl.open_run(tmp_path)
    groups = r.step_groups
    assert [first for first, _, _ in groups] == [0, *(each + 1 for _, each, _ in groups[:-1])]
    assert groups[-1][1] >= last
    assert sum(count for _, _, count in groups) == groups[-1][1] + 1
    assert max(count for _, _, count in groups) > 1
    assert len(r.sessions) == 12
    assert r.problems == []
    held = sum(int(series.num_calls.sum()) for series in r.series())
    assert (r.counts.recorded, r.counts.dropped) == (held, 0)


def test_files_of_several_sessions_are_merged_with_exact_counts(tmp_path: Path) -> None:
    """Their series have other numbers, their counts begin anew, and what was superseded is left
    out.
    """
    expected = {"0": 0, "1": 0}
    for session, (first, end) in enumerate(((0, 40), (40, 70), (55, 90), (90, 91), (91, 140))):
        parts = [nn.Linear(4, 4), nn.Linear(4, 4)][: 1 + session % 2]
        model = nn.Sequential(*parts)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with tl.monitor(model, tmp_path, graph="modules", step=first) as run:
            squeeze(run, 1)
            for number in range(first, end):
                model(torch.randn(3, 4)).sum().backward()
                optimizer.step()
                run.log(loss=float(number))
                wait_for(run, number)
        stays = {1: 15, 2: 35}.get(session, end - first)
        for part in range(len(parts)):
            expected[str(part)] += stays
    assert len(files_of_ranks(tmp_path)[0]) == 2  # all that is closed is one file
    r = tl.open_run(tmp_path)
    groups = r.step_groups
    assert [first for first, _, _ in groups] == [0, *(last + 1 for _, last, _ in groups[:-1])]
    assert sum(count for _, _, count in groups) == 140
    # A block of several steps that reaches beyond where the next session begins keeps what was seen
    # of it.
    for address, count in expected.items():
        assert count <= r[address].outputs.num_calls.sum() <= count + 15
    held = sum(int(series.num_calls.sum()) for series in r.series())
    assert r.counts.offered == r.counts.recorded == held
    assert 140 <= r.scalars["loss"].counts.sum() <= 155
    assert r.is_finished


def test_lines_that_make_no_sense_are_reported_when_files_are_merged(tmp_path: Path) -> None:
    train(tmp_path, 3)
    with steps_file(tmp_path).open("ab") as file:
        file.write(line_of("scalars", [["loss"]]) + b"torn")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tl.monitor(model, tmp_path, graph="modules") as run:
        squeeze(run)
        for number in range(3, 60):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            wait_for(run, number)
    r = tl.open_run(tmp_path)
    assert r.damage == []
    assert r.problems == ["Lines that could not be read were left out when files were merged (1)"]
    assert r.steps[-1] == 59
    assert count_steps(r) == 60


def test_what_was_merged_but_not_removed_when_its_process_was_killed_is_removed(
    tmp_path: Path,
) -> None:
    train(tmp_path, 2)
    own = steps_file(tmp_path)
    whole = own.read_bytes()
    own.rename(tmp_path / "rank0-000001-000003-1.steps")
    replaced = [
        "rank0-000001-000001-0.steps",
        "rank0-000001-000003-0.steps",
        "rank0-000002-000003-1.steps",
    ]
    for name in (*replaced, "rank1-000001-000001-0.steps"):
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "rank1.jsonl").write_bytes((tmp_path / "rank0.jsonl").read_bytes())
    assert tl.open_run(tmp_path)["0"].outputs.num_calls.tolist() == [2, 2]  # of two ranks
    train(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.glob("*.steps")) == [
        "rank0-000001-000003-1.steps",
        "rank0-000004-000004-0.steps",
        "rank1-000001-000001-0.steps",
    ]


def test_what_was_being_merged_when_its_process_was_killed_is_removed(tmp_path: Path) -> None:
    train(tmp_path, 2)
    (tmp_path / "rank0-000001-000002-1.steps.77.tmp").write_bytes(b"half")
    train(tmp_path, 2)
    assert list(tmp_path.glob("*.tmp")) == []
    assert tl.open_run(tmp_path).steps == [0, 1, 2, 3]


def test_a_budget_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tl.monitor(model, tmp_path, graph="modules") as run:
        run._writer._files.budget = 100
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    assert run.problems == [
        "The files take more than their budget (budget=), and what is left cannot be merged"
    ]
    assert run.counts.recorded == run.counts.offered
    assert tl.open_run(tmp_path).steps == [0]


# -- continuing
# --------------------------------------------------------------------------------------------------


def test_a_run_that_is_begun_again_goes_on(tmp_path: Path) -> None:
    train(tmp_path, 4)
    for path in (steps_file(tmp_path), tmp_path / "rank0.jsonl"):
        path.write_bytes(path.read_bytes()[:-20])  # the ends are torn
    train(tmp_path, 3)
    r = tl.open_run(tmp_path)
    assert r.steps == list(range(7))
    assert r.scalars["loss"].steps.tolist() == list(range(7))
    assert len(r.sessions) == 2
    assert len(r.damage) == 2
    assert r.is_finished


def test_a_training_that_goes_on_from_a_checkpoint_supersedes_what_came_after_it(
    tmp_path: Path,
) -> None:
    train(tmp_path, 6)
    first = tl.open_run(tmp_path)["0"].outputs.rms
    train(tmp_path, 5, step=3)
    r = tl.open_run(tmp_path)
    assert r.steps == list(range(8))
    rms = r["0"].outputs.rms
    assert rms[:3].tolist() == first[:3].tolist()
    assert not np.isin(rms[3:], first).any()
    assert r["0"].outputs.num_calls.tolist() == [1] * 8


def test_a_cell_that_is_run_again_without_finish_goes_on_after_what_it_has_recorded(
    tmp_path: Path,
) -> None:
    runs = []
    for _ in range(3):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runs.append(tl.monitor(model, tmp_path, graph="modules"))
        for number in range(5):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            runs[-1].log(number=number)
    assert [run.is_finished for run in runs] == [True, True, False]
    runs[-1].finish()
    r = tl.open_run(tmp_path)
    assert r.steps == r.scalars["number"].steps.tolist() == list(range(15))
    assert len(r.sessions) == 3


# -- too fast, and no place left
# ---------------------------------------------------------------------------------------


def test_what_comes_too_fast_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def slow(*args: Any) -> Any:
        gate.wait()
        return summarized(*args)

    monkeypatch.setattr(writer_module, "summarized", slow)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tl.monitor(model, tmp_path, graph="modules")
    monkeypatch.setattr(writer_module, "MOST_PARTS", 64)
    for _ in range(300):  # the training is not held up
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        run.log(number=1.0)
    counts = run.counts
    assert counts.dropped > 0
    assert counts.offered == counts.recorded + counts.dropped + counts.pending
    gate.set()
    run.finish()
    counts = run.counts
    assert counts.pending == 0
    assert 0 < counts.recorded < counts.offered == counts.recorded + counts.dropped
    r = tl.open_run(tmp_path)
    assert r.counts == counts
    assert sum(drop.observations for drop in r.drops) == counts.dropped
    assert sum(int(series.num_calls.sum()) for series in r.series()) == counts.recorded
    assert len(r.scalars["number"]) == 300


def test_a_loop_that_is_faster_than_the_writer_loses_no_more_than_a_moment_to_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def slow(*args: Any) -> Any:
        gate.wait()
        return summarized(*args)

    monkeypatch.setattr(writer_module, "summarized", slow)
    monkeypatch.setattr(writer_module, "LONGEST_WAIT", -1.0)  # whatever waits has waited too long
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tl.monitor(model, tmp_path, graph="modules", log=["outputs"])
    for number in range(50):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        run.log(number=number)
    assert run.counts.pending <= writer_module.FEW_PARTS + 1
    gate.set()
    run.finish()
    r = tl.open_run(tmp_path)
    assert r.counts.dropped == run.counts.dropped >= 50 - writer_module.FEW_PARTS - 1
    assert r.scalars["number"].values.tolist() == list(range(50))


def test_without_a_place_to_write_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RankFiles.write
    calls = []

    def full(self: RankFiles, data: bytes) -> None:
        calls.append(data)
        if 3 < len(calls) < 8:
            raise OSError(28, "No space left on device")
        write(self, data)

    monkeypatch.setattr(RankFiles, "write", full)
    run = train(tmp_path, 12)
    assert "No space left on device" in run.problems[0]
    counts = run.counts
    assert counts.pending == 0
    assert counts.dropped > 0
    assert counts.recorded + counts.dropped == counts.offered
    r = tl.open_run(tmp_path)
    assert r.counts.dropped == counts.dropped
    assert sum(int(series.num_calls.sum()) for series in r.series()) == counts.recorded


def test_a_line_that_found_no_room_is_not_in_the_way_of_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    calls = []

    def full(file: int, data: Any) -> int:
        if not isinstance(data, memoryview):  # not ours
            return write(file, data)
        calls.append(len(data))
        if 5 <= len(calls) < 9:  # a part finds room, the rest does not
            if len(calls) % 2:
                return write(file, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    run = train(tmp_path, 30)
    assert "No space left on device" in run.problems[0]
    counts = run.counts
    assert 0 < counts.dropped < counts.offered == counts.recorded + counts.dropped
    r = tl.open_run(tmp_path)
    assert r.counts == counts
    assert r.is_finished
    assert sum(int(series.num_calls.sum()) for series in r.series()) == counts.recorded
    assert not any("rank0" in problem for problem in r.problems)


def test_what_is_written_to_a_file_that_was_removed_is_not_called_recorded(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()

    run = tl.monitor(model, tmp_path / "run", graph="modules")
    step()
    wait_for(run, 0)
    steps_file(tmp_path / "run").unlink()
    for _ in range(5):
        step()
    run.finish()
    assert tl.open_run(tmp_path / "run").steps == [1, 2, 3, 4, 5]

    run = tl.monitor(model, tmp_path / "gone", graph="modules")
    step()
    wait_for(run, 0)
    while not (tmp_path / "gone" / "graph.json").exists():  # the last file to be written
        time.sleep(0.001)
    recorded = run.counts.recorded
    shutil.rmtree(tmp_path / "gone")
    for _ in range(5):
        step()
    run.finish()
    assert run.counts.recorded == recorded
    assert run.counts.dropped == run.counts.offered - recorded > 0
    assert len(run.problems) < 5  # the same for all steps
    assert "No such file" in run.problems[0]
