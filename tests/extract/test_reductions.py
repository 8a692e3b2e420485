"""Reductions of a stream against scikit-learn, or a direct computation on all features."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens.features import CKA, PCA, RSA, IdleUnits, Moments, SparseProjection, TopInputs

LAYERS = ["0", "relu_1", "2"]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(inplace=True), nn.Linear(20, 12))


@pytest.fixture
def data() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2000, 6, generator=generator) * torch.arange(1, 7)


def values(model: nn.Module, data: torch.Tensor) -> dict[str, np.ndarray]:
    with torch.no_grad():
        first = model[0](data)
        second = first.clone().relu()
        made = {"0": first, "relu_1": second, "2": model[2](second)}
    return {name: value.double().numpy() for name, value in made.items()}


def unbiased_cka(a: np.ndarray, b: np.ndarray) -> float:
    """Linear CKA with the unbiased estimator of HSIC (Song et al. 2012), term by term."""

    def hsic(k: np.ndarray, m: np.ndarray) -> float:
        n, one = len(k), np.ones(len(k))
        first = np.trace(k @ m)
        second = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
        third = 2 / (n - 2) * (one @ k @ m @ one)
        return float((first + second - third) / (n * (n - 3)))

    grams = [rows @ rows.T for rows in (a, b)]
    for gram in grams:
        np.fill_diagonal(gram, 0)
    k, m = grams
    return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))


def test_cka_of_minibatches_is_within_a_hundredth_of_that_of_all_inputs(
    model: nn.Module, data: torch.Tensor
) -> None:
    data = data[:800]
    (cka,) = tl.extract(model, data, LAYERS, None, into=[CKA()], batch_size=100)
    found, direct = cka.result(), values(model, data)
    for a in LAYERS:
        for b in LAYERS:
            assert found.loc[a, b] == pytest.approx(unbiased_cka(direct[a], direct[b]), abs=0.01)
    one_batch = CKA()
    one_batch.update(direct)
    exact = unbiased_cka(direct["0"], direct["2"])
    assert one_batch.result().loc["0", "2"] == pytest.approx(exact, abs=1e-9)


def test_cka_between_two_models(model: nn.Module, data: torch.Tensor) -> None:
    models = {"a": model, "b": nn.Sequential(nn.Identity(), nn.Linear(6, 3))}
    (cka,) = tl.extract(models, data, {"a": ["2"], "b": ["1"]}, None, into=[CKA()])
    with torch.no_grad():
        direct = unbiased_cka(model(data).double().numpy(), models["b"](data).double().numpy())
    assert cka.result().loc["a/2", "b/1"] == pytest.approx(direct, abs=0.01)


def test_pca_is_that_of_scikit_learn(model: nn.Module, data: torch.Tensor) -> None:
    from sklearn.decomposition import PCA as SklearnPCA  # noqa: N811

    (pca,) = tl.extract(model, data, LAYERS, None, into=[PCA(6)])
    direct = values(model, data)
    for name in LAYERS:
        found, reference = pca.result()[name], SklearnPCA(6).fit(direct[name])
        size = 4 if name != "0" else 6
        assert np.allclose(found.variance[:size], reference.explained_variance_[:size], rtol=0.01)
        assert np.allclose(
            found.ratio[:size], reference.explained_variance_ratio_[:size], rtol=0.01
        )
        overlap = np.abs(np.sum(found.components * reference.components_, 1))
        assert (overlap[:3] > 0.99).all()
        assert np.allclose(found.mean, direct[name].mean(0), atol=1e-5)


@pytest.mark.parametrize(
    "make", [CKA, lambda: PCA(5), Moments, lambda: TopInputs(3), IdleUnits, RSA]
)
def test_two_halves_merged_are_the_whole(make: Any, model: nn.Module, data: torch.Tensor) -> None:
    data = data[:256]

    def reduced(part: torch.Tensor, start: int) -> Any:
        ids = range(start, start + len(part))
        return tl.extract(model, part, LAYERS, None, into=[make()], ids=ids)[0]

    merged, whole = reduced(data[:128], 0), reduced(data, 0)
    merged.merge(reduced(data[128:], 128))
    assert_same(merged.result(), whole.result())


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif hasattr(a, "ratio"):  # the components themselves have no sign, and the last are noise
        assert_same(a.variance[:3], b.variance[:3])
        assert_same(a.mean, b.mean)
    elif isinstance(a, tuple) or hasattr(a, "__slots__"):
        for one, other in zip(astuple(a), astuple(b), strict=True):
            assert_same(one, other)
    elif isinstance(a, np.ndarray) and a.dtype == object:
        assert a.tolist() == b.tolist()
    elif isinstance(a, list):
        assert a == b
    else:
        a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
        assert np.allclose(a, b, rtol=1e-3, atol=0.03)


def astuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value.mean, value.var, value.min, value.max)


def test_moments_top_inputs_and_idle_units_against_a_direct_computation(
    data: torch.Tensor,
) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0.0, -1.0  # dead
        model[0].weight[2], model[0].bias[2] = 0.0, 1.0  # constant
        model[0].weight[5], model[0].bias[5] = model[0].weight[4], model[0].bias[4]
    names = [f"input {number}" for number in range(len(data))]
    made = [Moments(), TopInputs(5), IdleUnits()]
    moments, top, idle = tl.extract(model, data, "1", None, into=made, ids=names)
    with torch.no_grad():
        direct = model(data).numpy()
    found = moments.result()["1"]
    assert np.allclose(found.mean, direct.mean(0), rtol=1e-5)
    assert np.allclose(found.std, direct.std(0), rtol=1e-5)
    assert np.array_equal(found.max, direct.max(0))
    largest, ids = top.result()["1"]
    assert np.array_equal(largest[:, 3], np.sort(direct[:, 3])[::-1][:5])
    assert ids[0, 3] == names[direct[:, 3].argmax()]
    check = idle.result()["1"]
    assert (check.dead.tolist(), check.constant.tolist()) == ([1], [1, 2])
    assert check.duplicates == [[4, 5]]


@pytest.mark.parametrize("metric", ["correlation", "euclidean"])
def test_rsa_against_scipy_and_projected_rdms_are_close(metric: str, data: torch.Tensor) -> None:
    from scipy.spatial.distance import pdist, squareform
    from scipy.stats import spearmanr

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5000), nn.ReLU(), nn.Linear(5000, 7))
    data = data[:100]
    whole, projected = tl.extract(
        model, data, ["0", "1", "2"], None, into=[RSA(None, metric), RSA(1000, metric)]
    )
    with torch.no_grad():
        direct = {"1": model[:2](data), "2": model(data)}
    distances = {name: pdist(value.double().numpy(), metric) for name, value in direct.items()}
    for name in direct:
        assert np.allclose(whole.rdm(name), squareform(distances[name]), atol=1e-4)
    expected = spearmanr(distances["1"], distances["2"]).statistic
    assert whole.result().loc["1", "2"] == pytest.approx(expected, abs=1e-4)
    assert projected.result().loc["1", "2"] == pytest.approx(expected, abs=0.03)


def test_a_sparse_projection_is_the_same_in_every_process_and_keeps_distances(
    model: nn.Module, tmp_path: Path
) -> None:
    data = torch.randn(60, 3000)
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    features = tl.extract(model, data, "1", tmp_path / "f", reduce=SparseProjection(800, seed=3))
    again = tl.extract(model, data, "1", tmp_path / "g", reduce=SparseProjection(800, seed=3))
    assert features["1"].shape == (60, 800)
    assert np.array_equal(features["1"][:], again["1"][:])
    assert features.manifest["reduce"] == {
        "kind": "sparse random projection", "size": 800, "seed": 3,
    }  # fmt: skip
    before = np.linalg.norm(data.relu()[0] - data.relu()[1:], axis=1)
    after = np.linalg.norm(features["1"][0] - features["1"][1:], axis=1)
    assert np.abs(after / before - 1).mean() < 0.05


def test_features_may_be_stored_as_principal_components_fitted_to_all_data(
    model: nn.Module, data: torch.Tensor, tmp_path: Path
) -> None:
    features = tl.extract(
        model, data, ["0", "2"], tmp_path / "f", reduce=PCA(4), shard_size=500, batch_size=100
    )
    direct = values(model, data)["2"]
    _, _, vectors = np.linalg.svd(direct - direct.mean(0), full_matrices=False)
    expected = (direct - direct.mean(0)) @ vectors[:4].T
    found = features["2"][:]
    for unit in range(3):
        assert abs(np.corrcoef(found[:, unit], expected[:, unit])[0, 1]) > 0.99
    (tmp_path / "f" / "shards" / "00002.json").unlink()
    before = (tmp_path / "f" / "2" / "00002.npy").read_bytes()
    (tmp_path / "f" / "2" / "00002.npy").unlink()
    tl.extract(
        model, data, ["0", "2"], tmp_path / "f", reduce=PCA(4), shard_size=500, batch_size=100
    )
    assert (tmp_path / "f" / "2" / "00002.npy").read_bytes() == before
    with pytest.raises(ValueError, match="must be fitted to all data first"):
        tl.extract(model, iter([data]), "0", tmp_path / "g", reduce=PCA(4))
