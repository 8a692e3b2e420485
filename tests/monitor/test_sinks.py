"""What a sink has written, read back with the package's own reader, is what the run's folder
says.
"""

import importlib
import json
import struct
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._monitor.sinks.sink import STATISTICS, gapless
from torchlens._monitor.store.bins import MINUS_INF, NAN, PLUS_INF, ZERO, bins_of


class Recorder(tl.sinks.Sink):
    """Keeps what it is given."""

    def __init__(self, fails_at: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.records: list[tl.sinks.StepRecord] = []
        self.info: dict[str, Any] = {}
        self.is_closed = False
        self._fails_at = fails_at

    def open(self, info: Any) -> None:
        self.info = dict(info)

    def write(self, record: tl.sinks.StepRecord) -> None:
        if record.series and record.step == self._fails_at:
            raise OSError("the server is away")
        self.records.append(record)

    def close(self) -> None:
        self.is_closed = True


class Unreachable(tl.sinks.Sink):
    def open(self, info: Any) -> None:
        raise ConnectionError("no route to host")


def train(
    folder: Path, num_steps: int = 6, with_nan_at: int | None = None, **options: Any
) -> tuple[Any, list[float]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with tl.monitor(model, folder, graph="modules", **options) as run:
            for step in range(num_steps):
                x = torch.randn(50, 6)
                if step == with_nan_at:
                    x[0, 0], x[1, 1] = float("nan"), float("inf")
                    with torch.no_grad():
                        model(x)
                    x = torch.nan_to_num(x, posinf=0.0)
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                run.log(loss=loss)
    return run, losses


def series_of(reader: tl.RunReader) -> dict[tuple[str, str, str], Any]:
    return {series.key[:3]: series for series in reader.series()}


def test_a_sink_is_given_what_the_folder_says(tmp_path: Path) -> None:
    sink = Recorder()
    run, losses = train(tmp_path / "a", with_nan_at=3, sinks=[sink])
    assert not run.problems
    assert sink.is_closed
    assert sink.info["name"] == "a"
    assert sink.info["model"] == "Sequential"
    reader = tl.open_run(tmp_path / "a")
    known = series_of(reader)
    steps = [record for record in sink.records if record.series]
    assert [record.step for record in steps] == reader.steps == list(range(6))
    assert [value for record in sink.records for _, _, value in record.scalars] == pytest.approx(
        losses
    )
    for record in steps:
        assert {(each.module, each.kind, each.name) for each in record.series} == set(known)
        for each in record.series:
            series = known[each.module, each.kind, each.name]
            place = list(series.steps).index(record.step)
            for name in STATISTICS:
                expected = getattr(series, name)[place]
                if np.isnan(expected):
                    assert name not in each.statistics
                else:
                    assert each.statistics[name] == expected
            assert list(each.quantiles.values()) == series.quantiles[place].tolist()
            histogram = series.histogram(record.step)
            assert each.bins is not None
            assert each.bins.counts.sum() == histogram.counts.sum()
            assert each.bins.counts[each.bins.counts > 0].tolist() == histogram.counts.tolist()


def test_bins_without_gaps_hold_what_was_counted() -> None:
    generator = np.random.default_rng(0)
    values = np.concatenate(
        [
            generator.normal(size=500),
            np.zeros(20),
            1e-6 * generator.normal(size=9),
            [np.nan, np.inf],
        ]
    )
    codes, counts = np.unique(bins_of(values.astype(np.float32)), return_counts=True)
    assert {ZERO, NAN, PLUS_INF} <= set(codes.tolist())
    assert MINUS_INF not in codes
    bins = gapless(codes, counts)
    assert bins is not None
    assert (np.diff(bins.edges) > 0).all()
    finite = values[np.isfinite(values)].astype(np.float32).astype(np.float64)
    assert bins.counts.tolist() == np.histogram(finite, bins.edges)[0].tolist()
    assert gapless(np.array([NAN, PLUS_INF]), np.array([1, 2])) is None
    everything = np.setdiff1d(np.arange(1024), (NAN, PLUS_INF, MINUS_INF))
    coarse = gapless(everything, np.arange(len(everything)))
    assert coarse is not None
    assert len(coarse.counts) <= 512
    assert coarse.counts.sum() == np.arange(len(everything)).sum()


def test_a_sink_that_fails_ends_alone(tmp_path: Path) -> None:
    bad, good = Recorder(fails_at=2), Recorder()
    run, losses = train(tmp_path / "a", sinks=[bad, good])
    plain_run, plain = train(tmp_path / "b")
    assert losses == plain
    assert not plain_run.problems
    assert ["the server is away" in each for each in run.problems] == [True]
    assert [record.step for record in bad.records if record.series] == [0, 1]
    assert bad.is_closed
    assert [record.step for record in good.records if record.series] == list(range(6))
    reader = tl.open_run(tmp_path / "a")
    assert reader.steps == list(range(6))
    assert "the server is away" in reader.problems[0]


class Stuck(Recorder):
    """A server that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def write(self, record: tl.sinks.StepRecord) -> None:
        self.answers.wait()
        super().write(record)


def test_a_sink_that_is_stuck_holds_up_nothing_and_misses_steps(tmp_path: Path) -> None:
    sink = Stuck()
    model = nn.Linear(2, 2)
    with tl.monitor(model, tmp_path, graph="modules", log="outputs", sinks=sink) as run:
        for _ in range(80):
            model(torch.randn(3, 2))
            run.step()
            while (
                run.last_step != run.current_step - 1
            ):  # it is in the folder, though the sink has not taken any
                time.sleep(0.001)
        sink.answers.set()
    missed = 80 - len(sink.records)
    assert missed in (
        15,
        16,
    )  # 64 waited, and one was being written unless its thread had not come so far
    assert run.problems == [
        f"Stuck was too slow: {missed} recorded steps were not sent to it (every=)"
    ]
    assert tl.open_run(tmp_path).steps == list(range(80))


def test_a_sink_that_cannot_be_opened_does_not_stop_the_training(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Unreachable could not be opened.*no route to host"):
        run, losses = train(tmp_path / "a", sinks=[Unreachable()])
    assert len(losses) == 6
    assert "no route to host" in run.problems[0]


def test_a_sink_takes_every_so_many_steps_and_the_statistics_it_asks_for(tmp_path: Path) -> None:
    sink = Recorder(every=4, statistics=["rms", "quantiles"])
    train(tmp_path / "a", sinks=sink)
    assert [record.step for record in sink.records if record.series] == [0, 4]
    assert sum(len(record.scalars) for record in sink.records) == 6
    first = sink.records[0].series[0]
    assert [tag.partition("/")[0].partition(".")[2] for tag, _ in sink.numbers(first)][:2] == [
        "rms",
        "q0.01",
    ]


def test_a_finished_run_is_sent_as_it_would_have_been_live(tmp_path: Path) -> None:
    live, later = Recorder(), Recorder()
    train(tmp_path / "a", sinks=[live])
    tl.open_run(tmp_path / "a").send_to(later)

    def told(sink: Recorder) -> Any:
        series = [
            (record.step, sink.tag(each), each.statistics, each.bins.counts.tolist())
            for record in sink.records
            for each in sorted(record.series, key=sink.tag)
        ]
        return series, sorted(each for record in sink.records for each in record.scalars)

    assert told(live) == told(later)
    assert later.is_closed


def test_wrong_sinks_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(
        TypeError, match=r"sinks must be made of torchlens.sinks.TensorBoard.*got 'tensorboard'"
    ):
        tl.monitor(model, tmp_path / "a", sinks="tensorboard")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"statistics must be made of .*got 'median'"):
        Recorder(statistics="median")
    with pytest.raises(TypeError, match="histograms must be True or False, got 3"):
        Recorder(histograms=3)
    with pytest.raises(ValueError, match="every must be at least 1"):
        Recorder(every=0)
    assert not (tmp_path / "a").exists()


def test_a_missing_package_says_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, extra, make in (
        ("torch.utils.tensorboard", "tensorboard", lambda: tl.sinks.TensorBoard("tb")),
        ("wandb", "wandb", tl.sinks.Wandb),
        ("trackio", "trackio", lambda: tl.sinks.Trackio("p")),
        ("mlflow", "mlflow", tl.sinks.MLflow),
        ("lightning.pytorch", "lightning", lambda: tl.callbacks.Lightning("a")),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            patch.delitem(sys.modules, "pytorch_lightning", raising=False)
            with pytest.raises(ImportError, match=rf"pip install 'torchlens\[{extra}\]'"):
                make()


# -- the packages
# --------------------------------------------------------------------------------------------------


def quiet_import(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@pytest.mark.slow
@pytest.mark.parametrize("is_live", [True, False])
def test_tensorboard_reads_what_was_recorded(tmp_path: Path, is_live: bool) -> None:
    quiet_import("torch.utils.tensorboard")
    accumulator = quiet_import("tensorboard.backend.event_processing.event_accumulator")
    run, losses = train(
        tmp_path / "a", sinks=[tl.sinks.TensorBoard(tmp_path / "tb")] if is_live else ()
    )
    reader = tl.open_run(tmp_path / "a")
    if not is_live:
        reader.to_tensorboard(tmp_path / "tb")
    assert not run.problems
    events = accumulator.EventAccumulator(
        str(tmp_path / "tb"), {"histograms": 0, "scalars": 0}
    ).Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses)
    assert [event.step for event in events.Scalars("loss")] == list(range(6))
    rms = [event.value for event in events.Scalars("outputs.rms/0")]
    assert rms == pytest.approx(reader["0"].outputs.rms.tolist())
    found, series = (
        events.Histograms("parameter_gradients/0.weight"),
        reader["0"].parameter_gradients["weight"],
    )
    assert [event.step for event in found] == reader.steps
    for event in found:
        own = event.histogram_value
        expected = series.histogram(event.step)
        limits, counts = np.array(own.bucket_limit), np.array(own.bucket)
        assert counts[counts > 0].tolist() == expected.counts.tolist()
        assert own.num == expected.num_sampled
        place = reader.steps.index(event.step)
        assert (own.min, own.max) == (series.low[place], series.high[place])
        for low, high, count in zip(expected.low, expected.high, expected.counts, strict=True):
            place = int(np.searchsorted(limits, high))
            if high > low:
                assert (limits[place - 1], limits[place], counts[place]) == (low, high, count)
    assert events.Histograms("outputs/Sequential")


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of an offline run: a log in the format of LevelDB, after seven bytes of its
    own.
    """
    place, parts = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.slow
@pytest.mark.parametrize("has_own_run", [True, False])
def test_wandb_keeps_what_was_recorded_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_own_run: bool
) -> None:
    wandb = quiet_import("wandb")
    messages = quiet_import("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = {"mode": "offline", "dir": str(tmp_path), "project": "p"}
    own = wandb.init(**settings) if has_own_run else None
    sink = tl.sinks.Wandb(**{} if has_own_run else settings)
    run, losses = train(tmp_path / "a", sinks=[sink])
    if own is not None:
        own.log({"mine": 1.0})  # still open
        own.finish()
    wandb.teardown()  # its own process may still be writing
    assert not run.problems
    rows: list[dict[str, Any]] = []
    for data in wandb_records(next(tmp_path.glob("wandb/offline-run*/*.wandb")).read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({})
            for item in record.history.item:
                key, *within = item.nested_key or [item.key]
                value = json.loads(item.value_json)
                if within:
                    rows[-1].setdefault(key, {})[within[0]] = value
                else:
                    rows[-1][key] = value
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(losses)
    assert ("mine" in rows[-1]) == has_own_run
    reader = tl.open_run(tmp_path / "a")
    recorded = [row for row in rows if "outputs/0" in row]
    assert [row["torchlens_step"] for row in recorded] == reader.steps
    for row in recorded:
        expected = reader["0"].outputs.histogram(row["torchlens_step"])
        counts = np.array(row["outputs/0"]["values"])
        assert row["outputs/0"]["_type"] == "histogram"
        assert counts[counts > 0].tolist() == expected.counts.tolist()
        assert len(row["outputs/0"]["bins"]) == len(counts) + 1
    assert [row["updates.rms/2.bias"] for row in recorded] == pytest.approx(
        reader["2"].updates["bias"].rms.tolist()
    )


@pytest.mark.slow
def test_mlflow_keeps_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # instead of a server or a database
    mlflow = quiet_import("mlflow")
    uri = f"file://{tmp_path / 'mlruns'}"
    sink = tl.sinks.MLflow("cnn", tracking_uri=uri)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run, losses = train(tmp_path / "a", sinks=[sink])
        assert not run.problems
        client = mlflow.MlflowClient(tracking_uri=uri)
        kept = client.get_run(sink.run_id)
        assert kept.info.status == "FINISHED"
        assert kept.data.tags["torchlens.model"] == "Sequential"
        assert [
            each.value for each in client.get_metric_history(sink.run_id, "loss")
        ] == pytest.approx(losses)
        reader = tl.open_run(tmp_path / "a")
        history = client.get_metric_history(sink.run_id, "parameters.rms/0.weight")
        assert [each.step for each in history] == reader.steps
        assert [each.value for each in history] == pytest.approx(
            reader["0"].parameters["weight"].rms.tolist()
        )
        path = client.download_artifacts(
            sink.run_id, "torchlens/histograms/step-00000005.json", str(tmp_path)
        )
    counts = np.array(json.loads(Path(path).read_text())["outputs/1"]["counts"])
    assert counts[counts > 0].tolist() == reader["1"].outputs.histogram(5).counts.tolist()


@pytest.mark.slow
def test_trackio_keeps_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = quiet_import("trackio")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run, losses = train(tmp_path / "a", sinks=[tl.sinks.Trackio("cnn")])
        rows = trackio.SQLiteStorage.get_logs("cnn", "a")
    assert not run.problems
    assert (
        trackio.context_vars.current_run.get() is None
    )  # nothing is left that Trackio would finish at exit
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(losses)
    reader = tl.open_run(tmp_path / "a")
    recorded = [row for row in rows if "outputs/0" in row]
    assert [row["step"] for row in recorded] == reader.steps
    assert [row["outputs.std/0"] for row in recorded] == pytest.approx(
        reader["0"].outputs.std.tolist()
    )
    for row in recorded:
        counts = np.array(row["outputs/0"]["values"])
        expected = reader["0"].outputs.histogram(row["step"])
        assert counts[counts > 0].tolist() == expected.counts.tolist()
        assert row["outputs/0"]["bins"][-1] == expected.high[-1]
