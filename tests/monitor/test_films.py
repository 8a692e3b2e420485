"""Videos and projections: a film shows the tensors of its steps, also after a SIGKILL, and points
do not jump.
"""

import importlib.util
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._monitor.films.film_process import (
    NeighbourEmbedding,
    Painter,
    Points,
    PrincipalComponents,
    projection_path,
    read_projection,
    shown_as,
)
from torchlens._monitor.films.film_worker import Capture, FilmWorker


def decoded(path: Path) -> list[np.ndarray]:
    import av

    with av.open(str(path)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def assert_same(found: list[np.ndarray], painted: list[np.ndarray]) -> None:
    """As far as a film that is compressed can be the same: pictures are nearer to their own than to
    any other.
    """
    for place, picture in enumerate(found):
        distances = [np.abs(picture.astype(int) - other.astype(int)).mean() for other in painted]
        assert int(np.argmin(distances)) == place
        assert distances[place] < 6


def pictures(
    how: str, arrays: list[np.ndarray], steps: list[int], size: tuple[int, int] = (160, 120)
) -> list[np.ndarray]:
    painter = Painter(how, *size)
    return [painter.picture(step, array) for step, array in zip(steps, arrays, strict=True)]


def test_only_the_rows_that_are_shown_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[str, tuple[int, ...]] = {}

    def offer(self: FilmWorker, step: int, capture: Capture) -> None:
        sent[Path(capture.name).name] = tuple(capture.tensor.shape)
        self.counts.offered += 1
        self.counts.dropped += 1

    monkeypatch.setattr(FilmWorker, "offer", offer)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    with tl.monitor(model, tmp_path / "a") as run:
        run.video("0", tmp_path / "images.mp4")
        run.video("0", tmp_path / "bars.mp4", show="histogram")
        run.video("1", tmp_path / "points.mp4")  # nothing that could be seen as an image
        run.video("3", tmp_path / "rows.mp4", show="pca")
        model(torch.rand(9, 1, 8, 8))
        run.step()
    assert sent == {
        "images.mp4": (1, 4, 6, 6),
        "bars.mp4": (9, 4, 6, 6),
        "points.mp4": (9, 4, 1, 1),
        "rows.mp4": (9, 3),
    }
    assert "4 of 4 pictures or projections dropped" in repr(run)


@pytest.mark.slow
def test_a_video_shows_what_the_module_returned(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    truth: dict[str, list[np.ndarray]] = {"0": [], "2": [], "doubled": []}
    with tl.monitor(model, tmp_path / "a") as run:
        film = run.video("0", tmp_path / "0.mp4", size=(160, 120))
        rare = tl.current_run().video(
            "2", tmp_path / "2.mp4", show="histogram", every=3, size=(160, 120)
        )
        tl.current_run().video("doubled", tmp_path / "d.mp4", show="pca", size=(160, 120))
        brief = run.video("*", tmp_path / "all" / "{module}.mp4", size=(160, 120))
        brief.stop()
        with pytest.raises(
            ValueError, match=r"path must have \{module\} in it for several modules"
        ):
            run.video("*", tmp_path / "x.mp4")
        with pytest.raises(ValueError, match="show must be 'auto', 'images'"):
            run.video("0", tmp_path / "x.mp4", show="umap")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"path must end in .mp4"):
            run.video("0", tmp_path / "x.gif")
        for step in range(8):
            if step == 6:
                film.pause()
            x = torch.randn(9, 1, 8, 8)
            y = model(x)
            truth["doubled"].append(run.watch("doubled", y * 2).detach().numpy().copy())
            truth["0"].append(model[0](x).detach().numpy().copy())
            truth["2"].append(y.detach().numpy().copy())
            y.square().mean().backward()
            optimizer.step()
    assert not run.problems
    assert (film.num_taken, rare.num_taken, brief.num_taken) == (6, 3, 0)
    assert run.work_counts.done == 6 + 3 + 8
    found = decoded(tmp_path / "0.mp4")
    assert len(found) == 6
    assert_same(found, pictures("images", truth["0"][:6], list(range(6))))
    found = decoded(tmp_path / "2.mp4")
    assert len(found) == 3
    assert_same(found, pictures("histogram", truth["2"][::3], [0, 3, 6]))
    projector = PrincipalComponents(is_fixed=False)
    points = [projector.project(array.astype(np.float32))[0] for array in truth["doubled"]]
    assert_same(decoded(tmp_path / "d.mp4"), pictures("points", points, list(range(8))))
    assert not (tmp_path / "all").exists()


KILLED = """
import sys, time
import numpy as np, torch
import torchlens as tl
folder = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(12, 9)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
run = tl.monitor(model, folder + '/a', graph='modules')
run.video('', folder + '/out.mp4', show='images', size=(160, 120))
arrays = []
for step in range(12):
    out = model(torch.randn(8, 12))
    arrays.append(out.detach().numpy().copy())
    out.square().mean().backward()
    optimizer.step()
np.save(folder + '/arrays.npy', np.stack(arrays))
while run.work_counts.done < 12:
    time.sleep(0.01)
print(run._films.worker.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_video_shows_the_gradient_of_what_the_module_returned(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    truth: list[np.ndarray] = []
    with tl.monitor(model, tmp_path / "a") as run:
        film = run.video("0", tmp_path / "0.mp4", what="gradients", size=(160, 120))
        with pytest.raises(ValueError, match="what must be 'outputs' or 'gradients'"):
            run.video("0", tmp_path / "x.mp4", what="weights")  # type: ignore[arg-type]
        for _ in range(4):
            hidden = model[0](torch.randn(9, 1, 8, 8))
            hidden.retain_grad()
            model[2](model[1](hidden)).square().mean().backward()
            assert hidden.grad is not None
            truth.append(hidden.grad.numpy().copy())
            optimizer.step()
    assert not run.problems
    assert film.num_taken == 4
    found = decoded(tmp_path / "0.mp4")
    assert len(found) == 4
    assert_same(found, pictures("images", truth, list(range(4))))
    other = tl.monitor(model, tmp_path / "b", log="outputs")
    with other, pytest.raises(ValueError, match="must include 'gradients'"):
        other.video("0", tmp_path / "x.mp4", what="gradients")


@pytest.mark.slow
def test_a_video_plays_after_a_sigkill(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    os.kill(worker, signal.SIGKILL)
    process.kill()
    process.wait()
    process.stdout.close()
    found = decoded(tmp_path / "out.mp4")
    assert len(found) >= 11  # the last picture may be held back until the next comes
    arrays = list(np.load(tmp_path / "arrays.npy"))
    assert_same(found, pictures("images", arrays, list(range(12))))


def test_a_track_keeps_its_time_and_its_frequency(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.monitor(model, tmp_path, every=2, modules="") as run:
        over = run.embed("", name="over", seconds=1e-9)
        rare = run.embed("", every=3)
        with pytest.raises(ValueError, match="'' is embedded already"):
            run.embed("", "tsne")
        with pytest.raises(ValueError, match="seconds must be a number above 0"):
            run.embed("", name="b", seconds=-1)
        with pytest.raises(ValueError, match=r"No module has an address like 'layer.\*'"):
            run.embed("layer.*")
        for _ in range(9):
            model(torch.randn(6, 2)).sum().backward()
            optimizer.step()
        assert not over.is_on
    assert over.num_taken == 0
    assert rare.num_taken == 3
    assert [step for step, _, _ in tl.open_run(tmp_path).projections[""]] == [0, 4, 8]
    with pytest.raises(RuntimeError, match="No run is being recorded"):
        tl.current_run()


# -- pictures
# --------------------------------------------------------------------------------------------------


def test_a_picture_says_from_which_number_to_which_its_colours_go() -> None:
    array = np.array([[-2.0, 3.0], [0.0, 0.0]])
    found = Painter("images", 320, 200).picture(7, array)
    line, low, high = found[12], found[30, 5], found[30, 314]
    darkest, brightest = (np.flatnonzero((line == colour).all(1)) for colour in (low, high))
    assert len(darkest)
    assert len(brightest)
    assert darkest.max() < brightest.min()
    other = Painter("images", 320, 200).picture(7, array * 2)
    assert (other[24:] == found[24:]).all()
    assert (other[:24] != found[:24]).any()  # the numbers are others
    small = Painter("images", 64, 64).picture(7, array)  # no room
    assert not (small[12] == low).all(1).any()


def test_images_have_one_scale_over_all_pictures() -> None:
    painter = Painter("images", 64, 64)
    first = painter.picture(0, np.array([[0.0, 1.0], [0.5, np.nan]]))
    assert first.shape == (64, 64, 3)
    dark, bright = first[30, 5], first[30, 60]
    assert bright.sum() > dark.sum()
    assert first[60, 60].tolist() == [255, 0, 160]  # NaN
    second = painter.picture(1, np.array([[0.0, 1.0], [2.0, 2.0]]))
    assert second[30, 5].tolist() == dark.tolist()
    assert second[60, 5].tolist() == bright.tolist()  # the largest so far
    assert second[30, 60].tolist() != bright.tolist()
    channels = Painter("images", 200, 224).picture(
        0, np.arange(4.0).reshape(1, 4, 1, 1) * np.ones((1, 4, 5, 5))
    )
    assert len({tuple(channels[y, x]) for y in (40, 200) for x in (20, 180)}) == 4
    assert [shown_as(shape) for shape in ((3,), (3, 1), (3, 4), (1, 2, 3, 4))] == [
        "histogram", "histogram", "images", "images",
    ]  # fmt: skip


def test_bars_are_as_high_as_there_are_elements() -> None:
    values = np.random.default_rng(0).normal(size=2000)
    picture = Painter("histogram", 640, 124).picture(0, values)
    counts, _ = np.histogram(values, 64)
    heights = (picture[24:, 1::10] == [96, 165, 250]).all(-1).sum(0)
    assert heights.tolist() == pytest.approx((counts / counts.max() * 96).tolist(), abs=1)


# -- projections
# --------------------------------------------------------------------------------------------------


def spectrum(points: np.ndarray) -> float:
    centred = points - points.mean(0)
    values = np.linalg.svd(centred, compute_uv=False) ** 2
    return float(values[:2].sum() / values.sum())


def test_projections_show_most_of_the_variance_and_do_not_jump(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    points = generator.normal(size=(60, 12)) * np.linspace(3, 0.1, 12)
    job = Points(tmp_path, "a/b", {"method": "pca", "basis": "aligned"})
    arrays = []
    for step in range(6):
        arrays.append(points + 0.05 * generator.normal(size=points.shape))
        job.add(step, arrays[-1].astype(np.float32))
    found = read_projection(tmp_path, "a/b")
    assert [step for step, _, _ in found] == list(range(6))
    for array, (_, _, share) in zip(arrays, found, strict=True):
        assert share == pytest.approx(spectrum(array), rel=1e-4)
    for (_, before, _), (_, after, _) in itertools.pairwise(found):
        assert (
            np.abs(after - before).max() < 1.0
        )  # signs or axes that change places would move points by several
    fixed = Points(tmp_path, "fixed", {"method": "pca", "basis": "fixed"})
    fixed.add(0, points)
    fixed.add(1, points + 1)
    (_, first, _), (_, second, _) = read_projection(tmp_path, "fixed")
    assert np.ptp(second - first, axis=0) == pytest.approx([0, 0], abs=1e-5)
    fixed.add(2, np.array([[np.nan, np.inf]]))
    with projection_path(tmp_path, "fixed").open("a") as file:
        file.write('{"step": 3, "share": null, "poi')  # torn by a crash
    assert [step for step, _, _ in read_projection(tmp_path, "fixed")] == [0, 1, 2]


@pytest.mark.slow
def test_a_run_projects_in_a_process_of_its_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(40, 6)
    truth = []
    with tl.monitor(model, tmp_path, every=2) as run:
        run.embed("0", rows=30)
        run.embed("9")
        with pytest.raises(ValueError, match="method must be 'pca'"):
            run.embed("0", "umap")  # type: ignore[arg-type]
        for _ in range(6):
            truth.append(model[0](x).detach().numpy().copy())
            model(x).square().mean().backward()
            optimizer.step()
    assert run.problems == [
        "Nothing was seen of '9': no module has this address, nor was it watched."
    ]
    counts = run.work_counts
    assert (counts.offered, counts.done, counts.dropped) == (
        3,
        3,
        0,
    )  # the first call of the module in a recorded step
    found = tl.open_run(tmp_path).projections["0"]
    assert [step for step, _, _ in found] == [0, 2, 4]
    for step, points, share in found:
        assert points.shape == (30, 2)
        assert share == pytest.approx(spectrum(truth[step][:30]), rel=1e-3)


def clusters(generator: np.random.Generator) -> np.ndarray:
    centres = np.repeat(np.eye(3, 10) * 6, 40, 0)
    return centres + generator.normal(size=centres.shape)


def test_tsne_finds_groups_and_begins_where_it_ended() -> None:
    generator = np.random.default_rng(0)
    features = clusters(generator)
    projector = NeighbourEmbedding()
    last, share = projector.project(features)
    assert np.isnan(share)
    distances = ((last[:, None] - last) ** 2).sum(-1)
    np.fill_diagonal(distances, np.inf)
    assert (distances.argmin(1) // 40 == np.arange(120) // 40).mean() > 0.95
    for _ in range(2):
        features = features + 0.05 * generator.normal(size=features.shape)
        points = projector.project(features)[0]
        assert np.abs(points - last).mean() < 0.1 * last.std()
        last = points
    order = generator.permutation(120)  # the same points in another order, and fewer
    points = projector.project(features[order][:90])[0]
    assert np.abs(points - last[order][:90]).mean() < 0.3 * last.std()  # fewer points spread less
    assert np.isfinite(projector.project(np.full((20, 10), np.nan))[0]).all()
    assert projector.project(np.zeros((2, 10)))[0].shape == (2, 2)


@pytest.mark.parametrize("count", [4, 5, 32])
@pytest.mark.parametrize("kind", ["spread", "same", "line"])
def test_tsne_of_a_small_batch_is_finite(count: int, kind: str) -> None:
    generator = np.random.default_rng(count)
    projector = NeighbourEmbedding()
    for _ in range(2):
        features = generator.normal(
            size=(count, 144)
        )  # in so many dimensions all are equally far from each other
        if kind == "same":
            features[:] = features[0]
        elif kind == "line":
            features[:] = np.arange(count)[:, None]
        points = projector.project(features)[0]
        assert np.isfinite(points).all()
        assert np.abs(points).max() < 1e4


def test_principal_components_of_other_batches_keep_their_directions() -> None:
    generator = np.random.default_rng(0)
    projector = PrincipalComponents(is_fixed=False)
    bases: list[np.ndarray] = []
    scale = np.array(
        [3.0, 2.9, 0.3, 0.2]
    )  # which of the first two comes first changes with the batch
    for number in range(12):
        batch = generator.normal(size=(200 + 10 * (number % 2), 4)) * scale
        points, share = projector.project(batch)
        assert share > 0.95
        centred = batch - batch.mean(0)
        basis = np.linalg.lstsq(centred, points, rcond=None)[0]
        bases.append(basis)
        assert np.abs(basis - bases[0]).max() < 0.2


def test_a_missing_package_is_named_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with tl.monitor(nn.Linear(2, 2), tmp_path) as run:
        with pytest.raises(ImportError, match=r"t-SNE, is not .*pip install 'torchlens\[tsne\]'"):
            run.embed("", "tsne")
        with pytest.raises(ImportError, match=r"PyAV, .*pip install 'torchlens\[video\]'"):
            run.video("", tmp_path / "a.mp4")


def test_words_of_pytorch_inspector_say_what_to_write(tmp_path: Path) -> None:
    with tl.monitor(nn.Linear(2, 2), tmp_path / "run") as run:
        for name, cure in [
            ("frequency", "every=10"),
            ("timeout", "seconds=30"),
            ("displayND_mode", "show='pca'"),
        ]:
            with pytest.raises(
                TypeError, match=rf"video\(\) has no option '{name}'\. Instead: {cure}"
            ):
                run.video("", tmp_path / "a.mp4", **{name: 1})  # type: ignore[arg-type] # a wrong call
        with pytest.raises(
            TypeError,
            match=r"embed\(\) has no option 'perplexity'\. Available: method, basis, rows",
        ):
            run.embed("", perplexity=30)
        with pytest.raises(
            AttributeError, match=r"'Run' has no attribute 'enabled'\. Use pause\(\) and resume\(\)"
        ):
            run.enabled = False
    with pytest.raises(
        TypeError, match=r"has no option 'colorBGR'\. Instead: leave it out: the colours"
    ):
        tl.monitor(nn.Linear(2, 2), tmp_path / "other", colorBGR=(255, 0, 255))
    assert not (tmp_path / "a.mp4").exists()
