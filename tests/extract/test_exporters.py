"""Other formats, analyses, figures and forecasts."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import torchlens as tl
from torchlens import features as tlf

TEXTS = ["a b c", "d", "e f", "g h i j"]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.embedding(input_ids)


def tokenizer(texts: list[str], **options: Any) -> dict[str, torch.Tensor]:
    rows = [[ord(char) - 96 for char in text.split()] for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tlf.Features:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    data = torch.randn(30, 6)
    ids = [f"image {number}" for number in range(30)]
    folder = tmp_path_factory.mktemp("stored") / "f"
    return tl.extract(model, data, ["0", "1", "2"], folder, ids=ids, shard_size=7)


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> tlf.Features:
    folder = tmp_path_factory.mktemp("ragged") / "f"
    return tl.extract(Tokens(), TEXTS, "embedding", folder, tokenizer=tokenizer)


def test_hdf5(stored: tlf.Features, ragged: tlf.Features, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(stored.to_hdf5(tmp_path / "a.h5", ["0", "2"])) as file:
        assert set(file) == {"ids", "0", "2"}
        assert np.array_equal(file["2"][:], stored["2"][:])
        assert file["ids"].asstr()[3] == "image 3"
    with h5py.File(ragged.to_hdf5(tmp_path / "b.h5")) as file:
        assert file["embedding.lengths"][:].tolist() == [3, 1, 2, 4]
        assert file["embedding"].shape == (10, 3)


def test_mat(stored: tlf.Features, ragged: tlf.Features, tmp_path: Path) -> None:
    from scipy.io import loadmat

    content = loadmat(stored.to_mat(tmp_path / "a.mat"))
    assert np.array_equal(content["x_1"], stored["1"][:])
    assert content["ids"][2].strip() == "image 2"
    cells = loadmat(ragged.to_mat(tmp_path / "b.mat"))["x_embedding"]
    assert [cell.shape for cell in cells.flat] == [(3, 3), (1, 3), (2, 3), (4, 3)]


def test_arrow(stored: tlf.Features, ragged: tlf.Features) -> None:
    pytest.importorskip("pyarrow")
    table = stored.to_arrow()
    assert table.column_names == ["id", "0", "1", "2"]
    assert np.allclose(table["2"][4].as_py(), stored["2"][4])
    assert [len(row) for row in ragged.to_arrow()["embedding"].to_pylist()] == [9, 3, 6, 12]


def test_safetensors(stored: tlf.Features, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    found = load_file(stored.to_safetensors(tmp_path / "a.safetensors", "2"))
    assert np.array_equal(found["2"], stored["2"][:])


@pytest.mark.parametrize("package", ["xarray", "zarr", "rsatoolbox", "datasets"])
def test_packages_that_are_not_everywhere(
    package: str, stored: tlf.Features, ragged: tlf.Features, tmp_path: Path
) -> None:
    module = pytest.importorskip(package)
    if package == "xarray":
        found = stored.to_xarray()
        assert np.array_equal(found["2"].sel(input="image 3"), stored["2"][3])
        with pytest.raises(ValueError, match="Extract it with a pool"):
            ragged.to_xarray()
    elif package == "zarr":
        group = module.open_group(str(stored.to_zarr(tmp_path / "a.zarr")), mode="r")
        assert np.array_equal(group["2"][:], stored["2"][:])
    elif package == "rsatoolbox":
        assert np.allclose(stored.to_rsatoolbox("2").measurements, stored["2"][:])
    else:
        assert np.allclose(stored.to_dataset()[3]["2"], stored["2"][3])


def test_a_missing_package_says_how_to_get_it(
    stored: tlf.Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ImportError, match=r"pip install zarr, or pip install 'torchlens\[features"):
        stored.to_zarr("a.zarr")


def test_a_torch_dataset_reads_rows_in_order_or_shuffled(
    stored: tlf.Features, ragged: tlf.Features
) -> None:
    rows = torch.cat(list(DataLoader(stored.torch_dataset("2"), batch_size=8)))
    assert np.array_equal(rows.numpy(), stored["2"][:])
    both = next(iter(DataLoader(stored.torch_dataset(["0", "2"]), batch_size=4)))
    assert {name: value.shape for name, value in both.items()} == {"0": (4, 8), "2": (4, 5)}
    shuffled = stored.torch_dataset("2", shuffle=True)
    shuffled.block, shuffled.num_mixed = 4, 3
    first, second = torch.stack(list(shuffled)), torch.stack(list(shuffled))
    assert not torch.equal(first, second)
    for found in (first, second):
        assert not torch.equal(found, rows)
        assert torch.equal(found[found[:, 0].argsort()], rows[rows[:, 0].argsort()])
    assert len(list(ragged.torch_dataset("embedding", shuffle=True))) == 10, "tokens are rows"


# -- analyses --------------------------------------------------------------------------------------


def test_cka_and_rsa_of_stored_features(stored: tlf.Features) -> None:
    cka, rsa = tlf.cka(stored), tlf.rsa(stored, stored)
    for found in (cka, rsa):
        assert list(found.index) == list(found.columns) == ["0", "1", "2"]
        assert np.allclose(np.diag(found), 1)
        assert np.allclose(found, found.T)
        assert found.loc["0", "1"] < 0.999
    other = tlf.Features(stored.path)
    other.__dict__["ids"] = other.ids[::-1]
    with pytest.raises(ValueError, match="of the same inputs"):
        tlf.cka(stored, other)


def test_a_probe_reads_what_is_linear_in_a_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = torch.randn(200, 5)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1))
    with torch.no_grad():
        model[1].weight[:] = 0
    features = tl.extract(model, data, ["0", "1"], tmp_path / "f")
    scores = tlf.probe(features, (data[:, 0] > 0).numpy())
    assert scores["0"] > 0.9 > 0.65 > scores["1"]
    assert tlf.probe(features, data[:, 1].numpy())["0"] == pytest.approx(1, abs=0.01)
    with pytest.raises(ValueError, match="one item for each of the 200 rows, got 3"):
        tlf.probe(features, [1, 2, 3])


def test_the_nearest_inputs_of_a_unit(stored: tlf.Features) -> None:
    values = stored["2"][:, 3]
    found = tlf.nearest(stored, "2", 3, k=4)
    assert found.index.tolist() == [stored.ids[row] for row in np.argsort(-values)[:4]]
    assert np.allclose(found, np.sort(values)[::-1][:4])


def test_figures(stored: tlf.Features, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scores = tlf.probe(stored, [number % 2 for number in range(30)])
    figures = {
        "similarity": tlf.plot_similarity(tlf.cka(stored)),
        "rdm": tlf.plot_rdm(stored, "2"),
        "mds": tlf.plot_mds(stored, "2", colors=["a", "b"] * 15, metric="euclidean"),
        "probe": tlf.plot_probe(scores),
        "nearest": tlf.plot_nearest(stored, "2", 1, lambda one: np.zeros((4, 4)), k=5),
    }
    for name, figure in figures.items():
        figure.savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 2000
    titles = [axes.get_title() for axes in figures["nearest"].axes[:5]]
    assert titles[0].startswith(str(tlf.nearest(stored, "2", 1).index[0]))


def test_points_in_the_plane_are_placed_as_far_apart_as_they_are() -> None:
    from torchlens._extract.plots import mds

    points = np.random.default_rng(0).random((12, 2))
    distances = np.linalg.norm(points[:, None] - points, axis=2)
    placed = mds(distances)
    assert np.allclose(np.linalg.norm(placed[:, None] - placed, axis=2), distances)


# -- forecast --------------------------------------------------------------------------------------


def test_a_forecast_says_how_many_bytes_an_extraction_writes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    data = torch.randn(100, 6)
    options: dict[str, Any] = {"dtype": "float16", "shard_size": 30}
    ahead = tlf.forecast(model, data[:32], ["0", "2"], num_inputs=100, **options)
    features = tl.extract(model, data, ["0", "2"], tmp_path / "f", **options)
    assert ahead.num_bytes == features.nbytes
    assert ahead.num_shards == features.num_shards == 4
    assert ahead.row_bytes == {"0": 16, "2": 10}
    assert ahead.seconds > 0
    assert str(ahead).startswith("100 inputs: 3.5 KB in 4 shards of 2 files, ")
