"""Extraction: the rows are those of the log, the same call resumes, and errors name the input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchlens as tl
from tests.networks import MLP, Model


class ConvNet(nn.Module):
    """As ResNet begins: a batch norm whose result the ReLU overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 5)
        self.bn.running_mean.copy_(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.relu(self.bn(self.conv(x))).mean((2, 3)))


LAYERS = ["bn", "relu_1", "fc", "input.x", "output"]


@pytest.fixture
def model() -> ConvNet:
    torch.manual_seed(0)
    return ConvNet()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(50, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def logged(model: nn.Module, batch: torch.Tensor, key: str) -> np.ndarray:
    model.eval()
    with torch.no_grad():
        return tl.log_forward_pass(model, batch)[key].tensor_contents.numpy()


def test_the_rows_are_the_values_of_the_log_also_where_they_are_overwritten_later(
    model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    features = tl.extract(model, images, LAYERS, tmp_path / "f", batch_size=8, shard_size=20)
    assert features.layers == LAYERS
    assert features.ids == list(range(50))
    assert model.training, "the mode is put back"
    batches = [(0, 8), (8, 16), (16, 20), (20, 28), (28, 36), (36, 40), (40, 48), (48, 50)]
    for key in LAYERS:
        whole = [logged(model, images[a:b], key) for a, b in batches]  # no batch crosses a shard
        assert np.array_equal(features[key][:], np.concatenate(whole)), key
    assert (features["bn"][:] < 0).any(), "the batch norm is stored as it was before the ReLU"


def test_keys_mean_what_they_mean_in_a_history(
    model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    several = tl.extract(model, images, ["conv2d_1", "linear", -1], tmp_path / "a")
    assert several.layers == ["conv2d_1", "linear", "output_1_6"]
    chosen = tl.extract(model, images, lambda entry: entry.layer_type == "relu", tmp_path / "b")
    assert chosen.layers == ["relu_1_3"]
    with pytest.raises(ValueError, match=r"layers names 'conv9'.*Closest: 'conv'"):
        tl.extract(model, images, "conv9", tmp_path / "c")


@pytest.mark.parametrize("kind", ["tensor", "array", "dataset", "loader", "batches", "list"])
def test_each_kind_of_data_gives_the_same_rows(
    kind: str, model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    labels = torch.arange(len(images))
    data: Any = {
        "tensor": images,
        "array": images.numpy(),
        "dataset": TensorDataset(images, labels),
        "loader": DataLoader(TensorDataset(images, labels), batch_size=10),
        "batches": ((images[i : i + 10], labels[i : i + 10]) for i in range(0, 50, 10)),
        "list": list(images),
    }[kind]
    features = tl.extract(
        model, data, ["bn", "output"], tmp_path / "f", batch_size=10, shard_size=20
    )
    expected = tl.extract(
        model, images, ["bn", "output"], tmp_path / "g", batch_size=10, shard_size=20
    )
    assert features.ids == expected.ids
    assert np.array_equal(features["bn"][:], expected["bn"][:])
    assert features.is_complete


def test_a_dict_gives_keyword_arguments_and_labels_are_ignored(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor, labels: Any = None) -> torch.Tensor:
            assert labels is None
            return a + b

    data = {"a": torch.ones(5, 2), "b": torch.arange(10.0).view(5, 2), "labels": torch.ones(5)}
    features = tl.extract(Sum(), data, "output", tmp_path / "f")
    assert np.array_equal(features["output"][:], (data["a"] + data["b"]).numpy())


def test_a_folder_of_images_is_read_in_order_with_its_names_as_ids(tmp_path: Path) -> None:
    from PIL import Image

    def to_tensor(image: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()

    (tmp_path / "images" / "cats").mkdir(parents=True)
    for number, name in enumerate(["dog.png", "cats/a.png", "cats/b.jpg"]):
        Image.new("L", (8, 8), 10 * number).save(tmp_path / "images" / name)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    features = tl.extract(
        nn.Flatten(), tmp_path / "images", "output", tmp_path / "f", transform=to_tensor
    )
    assert features.ids == ["cats/a.png", "cats/b.jpg", "dog.png"]
    assert features["output"][:, 0].round(-1).tolist() == [10, 20, 0]
    assert "to_tensor" in features.manifest["transform"]


def test_ids_are_checked_and_stored(model: ConvNet, images: torch.Tensor, tmp_path: Path) -> None:
    names = [f"image {number}" for number in range(50)]
    features = tl.extract(model, images, "fc", tmp_path / "f", ids=names, shard_size=20)
    assert tl.open_features(tmp_path / "f").ids == names
    assert features.row_of("image 33") == 33
    with pytest.raises(ValueError, match="one id for each of the 50 inputs, got 49 ids"):
        tl.extract(model, images, "fc", tmp_path / "g", ids=names[:-1])
    with pytest.raises(ValueError, match="ids must differ"):
        tl.extract(model, images, "fc", tmp_path / "g", ids=["same"] * 50)


def test_a_shuffled_loader_is_refused_because_rows_would_not_match_inputs(
    model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    loader = DataLoader(TensorDataset(images), batch_size=5, shuffle=True)
    with pytest.raises(ValueError, match=r"RandomSampler.*shuffle=False"):
        tl.extract(model, loader, "fc", tmp_path / "f")


# -- inputs that go another way --------------------------------------------------------------------


class Looped(nn.Module):
    """As many steps as the first number says, and a branch by its sign."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(3, 3)
        self.rare = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(int(x[0, 0].abs())):
            y = self.step(y).relu_()
        return (self.rare(y) if x[0, 0] < 0 else y) * 2


def test_each_input_may_take_its_own_way_through_the_model(tmp_path: Path) -> None:
    model = Looped()
    data = torch.randn(40, 3)
    data[:, 0] = torch.arange(40) % 4 + 1
    features = tl.extract(model, data, "output", tmp_path / "f", batch_size=1)
    expected = torch.cat([model(data[i : i + 1]) for i in range(40)])
    assert np.array_equal(features["output"][:], expected.detach().numpy())


def test_a_layer_that_an_input_does_not_reach_is_an_error_that_names_the_input(
    tmp_path: Path,
) -> None:
    data = torch.full((6, 3), -1.0)
    data[4, 0] = 1.0
    with pytest.raises(ValueError, match=r"input 'e' does not reach.*'rare'"):
        tl.extract(Looped(), data, "rare", tmp_path / "f", batch_size=1, ids=list("abcdef"))


@pytest.mark.filterwarnings("ignore:torchlens. what runs inside torch.func.vmap:UserWarning")
def test_models_that_a_light_run_cannot_follow_are_logged_for_every_batch(tmp_path: Path) -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.count += 1  # its own state
        return torch.vmap(lambda row: row.sin())(x).cos() + self.count

    model = Model(function, count=nn.Buffer(torch.zeros(())))
    data = torch.randn(6, 3)
    features = tl.extract(model, data, ["cos", "output"], tmp_path / "f", batch_size=2)
    assert np.allclose(features["cos"][:], data.sin().cos())
    first = features["output"][:] - features["cos"][:]
    assert first.mean(1).round().tolist() == [2, 2, 3, 3, 4, 4], "the first batch runs once more"


# -- rows ------------------------------------------------------------------------------------------


def test_a_first_axis_of_inputs_times_tokens_becomes_two(tmp_path: Path) -> None:
    model = Model(lambda self, x: self.fc(x.view(-1, 4)).view(len(x), -1), fc=nn.Linear(4, 2))
    data = torch.randn(10, 3, 4)
    features = tl.extract(model, data, "fc", tmp_path / "f")
    assert features["fc"].shape == (10, 3, 2)
    assert np.allclose(features["fc"][:], model.fc(data).detach().numpy(), atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: x.transpose(0, 1).contiguous() * 2,  # as many tokens as inputs
        lambda self, x: x - x.mean(0),  # mixes the inputs
        lambda self, x: x.transpose(0, 1).reshape(-1, 2) * 2,  # the inputs inside
    ],
)
def test_rows_that_are_not_those_of_the_inputs_are_refused(function: Any, tmp_path: Path) -> None:
    data = torch.randn(4, 4, 2)
    with pytest.raises(ValueError, match=r"not the same if the batch holds other inputs"):
        tl.extract(Model(function), data, lambda e: e.is_output_parent, tmp_path / "f")


def test_a_value_without_an_axis_of_inputs_is_refused(tmp_path: Path) -> None:
    model = Model(lambda self, x: x + (x * 0).mean())
    with pytest.raises(ValueError, match=r"'mean' has the shape \(\) for inputs 0 to 4"):
        tl.extract(model, torch.randn(5, 2), "mean", tmp_path / "f")


# -- resuming --------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".lock")
    }


class StopsError(Exception):
    pass


def test_the_same_call_resumes_and_the_files_are_the_same(
    model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    whole = tl.extract(model, images, LAYERS, tmp_path / "whole", batch_size=8, shard_size=20)
    read = []

    class Counting(torch.utils.data.Dataset):
        def __init__(self, stop: int) -> None:
            self.stop = stop

        def __len__(self) -> int:
            return 50

        def __getitem__(self, number: int) -> torch.Tensor:
            read.append(number)
            if number == self.stop:
                raise StopsError
            return images[number]

    with pytest.raises(StopsError) as caught:
        tl.extract(model, Counting(45), LAYERS, tmp_path / "f", batch_size=8, shard_size=20)
    assert "input 45" in "".join(caught.value.__notes__)
    partial = tl.open_features(tmp_path / "f")
    assert not partial.is_complete
    assert "2 of 3 shards, incomplete" in repr(partial)
    assert np.array_equal(partial["bn"][:], whole["bn"][:40])
    read.clear()
    tl.extract(model, Counting(-1), LAYERS, tmp_path / "f", batch_size=8, shard_size=20)
    assert sorted(set(read)) == [*range(8), *range(40, 50)], "what is done is not read again"
    assert files(tmp_path / "f") == files(tmp_path / "whole")
    read.clear()
    tl.extract(model, Counting(-1), LAYERS, tmp_path / "f", batch_size=8, shard_size=20)
    assert read == [], "nothing is left to do"


def test_an_iterable_of_batches_is_resumed_too(
    model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    def batches(until: int = 50) -> Any:
        for start in range(0, 50, 7):
            if start > until:
                raise StopsError
            yield images[start : start + 7]

    whole = tl.extract(model, batches(), "bn", tmp_path / "whole", shard_size=20)
    with pytest.raises(StopsError):
        tl.extract(model, batches(30), "bn", tmp_path / "f", shard_size=20)
    assert len(tl.open_features(tmp_path / "f")) == 28
    features = tl.extract(model, batches(), "bn", tmp_path / "f", shard_size=20)
    assert features.is_complete
    assert np.array_equal(features["bn"][:], whole["bn"][:])
    assert files(tmp_path / "f") == files(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers": ["fc"]}, "layers"),
        ({"pool": "max"}, "pool"),
        ({"dtype": "float16"}, "dtype"),
        ({"batch_size": 7}, "batch_size"),
        ({"shard_size": 21}, "shard_size"),
        ({"ids": list("abcdefghij" * 5)}, "ids"),
        ({"transform": lambda x: x * 2}, "the transform of the data"),
        ({"data": torch.zeros(51, 3, 8, 8)}, "the number of inputs"),
        ({"model": nn.Flatten()}, "the class of the model"),
        ({"model": ConvNet()}, "the weights of the model"),
    ],
)
def test_a_run_is_not_resumed_with_something_else(
    change: dict[str, Any], field: str, model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    call: dict[str, Any] = {"model": model, "data": images, "layers": ["bn", "fc"]}
    options: dict[str, Any] = {"batch_size": 8, "shard_size": 20}
    tl.extract(**call, path=tmp_path / "f", **options)
    before = files(tmp_path / "f")
    if field == "ids":
        change = {"ids": [f"{one}{n}" for n, one in enumerate(change["ids"])]}
    with pytest.raises(tl.FeaturesError, match=f"Different is {field}: "):
        tl.extract(**{**call, **options, **change}, path=tmp_path / "f")
    assert files(tmp_path / "f") == before


def test_another_structure_with_the_same_weights_is_not_resumed(
    images: torch.Tensor, tmp_path: Path
) -> None:
    model = Model(lambda self, x: x.flatten(1).sin())
    other = Model(lambda self, x: x.flatten(1).cos())
    data = TensorDataset(images)
    tl.extract(model, data, "output", tmp_path / "f", shard_size=20)
    (tmp_path / "f" / "shards" / "00001.json").unlink()
    with pytest.raises(tl.FeaturesError, match="the operations of the model"):
        tl.extract(other, data, "output", tmp_path / "f", shard_size=20)


def test_two_runs_on_one_folder_at_once_are_refused(
    model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    def batches() -> Any:
        yield images[:10]
        with pytest.raises(tl.FeaturesError, match="Another process is extracting"):
            tl.extract(model, images, "fc", tmp_path / "f")
        yield images[10:]

    features = tl.extract(model, batches(), "fc", tmp_path / "f")
    assert len(features) == 50


def test_leftovers_of_a_killed_run_are_removed(
    model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    (tmp_path / "f" / "fc").mkdir(parents=True)
    for tag in ("r0of1", "r3of4"):
        (tmp_path / "f" / "fc" / f"00000.npy.{tag}-12345678.tmp").write_bytes(b"half")
    tl.extract(model, images, "fc", tmp_path / "f")
    assert [path.name for path in (tmp_path / "f" / "fc").iterdir()] == ["00000.npy"]


# -- what fails ------------------------------------------------------------------------------------


class Faulty(torch.utils.data.Dataset):
    """Number 3 cannot be read; number 12 makes the model raise."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> torch.Tensor:
        if number == 3:
            raise OSError("cannot identify image file")
        return torch.full((3,), -1.0 if number == 12 else float(number))


def picky(self: Any, x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        raise ValueError("negative")
    return x * 2


def test_an_input_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot identify") as unreadable:
        tl.extract(Model(picky), Faulty(), "output", tmp_path / "f", batch_size=5)
    assert unreadable.value.__notes__[-1] == "torchlens: raised when reading input 3."
    data = torch.stack([Faulty()[number] for number in range(5, 20)])
    with pytest.raises(ValueError, match="negative") as raised:
        tl.extract(Model(picky), data, "output", tmp_path / "g", batch_size=5)
    assert "torchlens: raised for inputs 5 to 9." in raised.value.__notes__


def test_on_error_skip_leaves_out_inputs_and_lists_them(tmp_path: Path) -> None:
    features = tl.extract(
        Model(picky), Faulty(), "output", tmp_path / "f",
        batch_size=5, shard_size=10, on_error="skip",
    )  # fmt: skip
    assert features.skipped == {
        3: "OSError: cannot identify image file",
        12: "ValueError: negative",
    }
    assert features.ids == [n for n in range(20) if n not in (3, 12)]
    assert features["output"][:, 0].tolist() == [2.0 * n for n in features.ids]
    assert features.is_complete
    assert "2 inputs skipped" in repr(features)
    assert features.verify(18)


def test_a_wrong_call_is_no_reason_to_skip_every_input(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"mat1 and mat2|Every input"):
        tl.extract(MLP(), torch.randn(9, 3), "output", tmp_path / "f", on_error="skip")


# -- verify ----------------------------------------------------------------------------------------


def test_verify_recomputes_rows_and_finds_what_was_changed(
    model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    features = tl.extract(model, images, ["bn", "fc"], tmp_path / "f", batch_size=8, shard_size=20)
    receipt = features.verify(k=10)
    assert receipt
    assert (receipt.num_identical, len(receipt.ids)) == (20, 10)
    array = np.load(tmp_path / "f" / "fc" / "00001.npy", mmap_mode="r+")
    array[3] += 1
    array.flush()
    opened = tl.open_features(tmp_path / "f")
    found = opened.verify(k=50, model=model, data=images)
    assert not found
    assert found.different == [(23, "fc")]
    assert found.damaged == ["fc/00001.npy"]
    assert "different: 'fc' of input 23" in str(found)
    with pytest.raises(ValueError, match="needs the model and the data"):
        opened.verify()
    with pytest.raises(tl.FeaturesError, match="the weights of the model"):
        opened.verify(model=ConvNet(), data=images)


def test_the_manifest_says_how_the_features_were_made(
    model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    tl.extract(model, images, ["bn", "fc"], tmp_path / "f", dtype="float16", pool={"bn": "mean"})
    manifest = json.loads((tmp_path / "f" / "manifest.json").read_text())
    assert manifest["models"] == ["ConvNet"]
    assert manifest["arrays"]["bn"] == {"shape": [4], "dtype": "float16", "ragged": False}
    assert manifest["pool"] == {"bn": "mean"}
    assert set(manifest["versions"]) == {"torchlens", "torch", "python"}
    assert str(tmp_path) not in (tmp_path / "f" / "manifest.json").read_text()


def test_two_models_are_given_the_same_inputs(
    model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    models = {"a": model, "b": nn.Flatten()}
    features = tl.extract(models, images, {"a": "fc", "b": "output"}, tmp_path / "f")
    assert features.layers == ["a/fc", "b/output"]
    assert np.array_equal(features["b/output"][:], images.flatten(1).numpy())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": None}, "path=None stores nothing"),
        ({"path": 3}, r"path must name a folder, such as 'features/', or be None, got 3"),
        ({"layers": []}, "layers must name at least one layer"),
        ({"data": 5}, "data must be a DataLoader"),
        ({"data": ["a text"]}, "give tokenizer="),
        ({"data": "no/such/folder"}, "there is no such folder"),
        ({"pool": "meen"}, "Did you mean 'mean'?"),
        ({"dtype": "int8"}, "dtype must be 'float16', 'bfloat16' or 'float32'"),
        ({"on_error": "ignore"}, "on_error must be 'raise' or 'skip'"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"model": 3}, "model must be a torch.nn.Module, got 3"),
        ({"reduce": 100}, "reduce must be made of reductions"),
    ],
)
def test_wrong_arguments_are_explained(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    call: dict[str, Any] = {
        "model": MLP(), "data": torch.randn(3, 4), "layers": "fc1", "path": tmp_path / "f",
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=message):
        tl.extract(**{**call, **change})


def test_a_folder_that_holds_no_features_is_said(tmp_path: Path) -> None:
    with pytest.raises(tl.FeaturesError, match="there is no such folder"):
        tl.open_features(tmp_path / "none")
    with pytest.raises(tl.FeaturesError, match=r"no manifest.json in it"):
        tl.open_features(tmp_path)
    features = tl.extract(MLP(), torch.randn(3, 4), ["fc1", "fc2"], tmp_path / "f")
    with pytest.raises(KeyError, match=r"No layer 'fc3'. Did you mean 'fc2'?"):
        features["fc3"]


def test_a_site_such_as_a_channel_or_a_direction_is_a_layer_too(
    model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    direction = torch.randn(5)
    sites = [
        tl.edits.site("bn", channel=[0, 2]),
        tl.edits.site("fc", part="before"),
        tl.edits.site("fc", directions=direction),
    ]
    features = tl.extract(model, images, [*sites, "bn", "fc"], tmp_path / "f", batch_size=8)
    assert features.layers[:3] == ["bn[channel [0, 2]]", "fc.before", "fc[1 direction]"]
    assert np.array_equal(features["bn[channel [0, 2]]"][:], features["bn"][:, [0, 2]])
    expected = features["fc"][:] @ direction.numpy() / direction.square().sum().item()
    assert np.allclose(features["fc[1 direction]"][:, 0], expected, atol=1e-5)
    assert features.verify(5)


def test_reductions_beside_stored_features_see_also_what_an_earlier_run_stored(
    model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"batch_size": 8, "shard_size": 20}
    tl.extract(model, images, ["bn", "fc"], tmp_path / "f", **options)
    (tmp_path / "f" / "shards" / "00001.json").unlink()
    moments, whole = tl.features.Moments(), tl.features.Moments()
    for _ in range(2):  # some shards are done; all are done
        moments = tl.features.Moments()
        tl.extract(model, images, ["bn", "fc"], tmp_path / "f", into=[moments], **options)
        tl.extract(model, images, ["bn", "fc"], None, into=[whole := tl.features.Moments()])
        assert moments.result()["fc"].count == 50
        assert np.allclose(moments.result()["bn"].mean, whole.result()["bn"].mean, atol=1e-6)


def test_another_fit_of_a_reduction_is_not_resumed(
    model: ConvNet, images: torch.Tensor, tmp_path: Path
) -> None:
    def fitted(data: torch.Tensor) -> Any:
        return tl.extract(model, data, "fc", None, into=[tl.features.PCA(2)])[0]

    tl.extract(model, images, "fc", tmp_path / "f", reduce=fitted(images), shard_size=20)
    (tmp_path / "f" / "shards" / "00001.json").unlink()
    tl.extract(model, images, "fc", tmp_path / "f", reduce=tl.features.PCA(2), shard_size=20)
    (tmp_path / "f" / "shards" / "00001.json").unlink()
    with pytest.raises(tl.FeaturesError, match="Different is what reduce was fitted to"):
        tl.extract(model, images, "fc", tmp_path / "f", reduce=fitted(images[:20]), shard_size=20)


def test_a_full_disk_is_said_with_the_shard_and_leaves_no_files(
    model: ConvNet, images: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchlens._extract.shard_files as shard_files

    def full(self: Any, rows: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_files._ArrayFile, "append", full)
    with pytest.raises(OSError, match="No space left") as caught:
        tl.extract(model, images, "fc", tmp_path / "f")
    assert "raised when writing shard 00000" in caught.value.__notes__[-1]
    assert not list((tmp_path / "f").rglob("*.tmp"))
