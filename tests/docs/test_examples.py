"""The examples run, and do what they say."""

import doctest
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]


def example(name: str) -> ModuleType:
    """An example, imported from its file."""
    spec = importlib.util.spec_from_file_location(
        f"example_{name}", ROOT / "examples" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in which an example runs, with torch's generator put back afterwards."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        yield tmp_path


def test_alexnet_prints_what_the_tour_shows(folder: Path, capsys: pytest.CaptureFixture[str]):
    example("alexnet").main()
    printed = capsys.readouterr().out.expandtabs(4)
    assert (folder / "output" / "alexnet.csv").read_text().count("\n") == 25
    shown = re.search(
        r"<!-- alexnet:start -->\s*```text\n(.*?)```\s*<!-- alexnet:end -->", tour(), re.DOTALL
    )
    assert shown is not None
    assert doctest.OutputChecker().check_output(shown[1], f"{printed}\n", doctest.ELLIPSIS), printed


def tour() -> str:
    return (ROOT / "docs" / "tour.md").read_text()


def test_feature_extraction_writes_the_features_of_every_image(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    module = example("feature_extraction")
    module.main()
    features = torch.load(folder / "output" / "features.pt")
    arrays = np.load(folder / "output" / "features.npz")
    assert {layer: tuple(values.shape) for layer, values in features.items()} == {
        "layer1": (100, 16),
        "layer2.0.conv1": (100, 32),
        "iadd_6": (100, 64),
        "fc": (100, 10),
    }
    assert all(np.array_equal(arrays[layer], features[layer].numpy()) for layer in features)
    assert "100 images, 4 layers" in capsys.readouterr().out


def test_feature_extraction_finds_what_a_forward_hook_finds():
    module = example("feature_extraction")
    torch.manual_seed(1)
    model, images = module.SmallResNet().eval(), torch.rand(6, 3, 32, 32)
    features = module.extract(model, list(images.split(4)), ["layer2.0.conv1"])
    heard = []
    model.layer2[0].conv1.register_forward_hook(
        lambda _module, _args, output: heard.append(module.pooled(output))
    )
    with torch.no_grad():
        for batch in images.split(4):
            model(batch)
    assert torch.equal(features["layer2.0.conv1"], torch.cat(heard))


def test_find_shape_bug_names_the_place_and_the_cause(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    example("find_shape_bug").main()
    printed = capsys.readouterr().out
    assert (
        "raised in module 'up2' (Up), by the operation cat([1x32x16x16 float32, 1x16x17x17 "
        "float32], dim=1)" in printed
    )
    assert re.search(r"called at \S*find_shape_bug\.py:\d+ in Up\.forward", printed)
    assert "The cause: maxpool2d_2_6 halves 17 to 8" in printed
    assert "it runs: (1, 1, 34, 34)" in printed


def test_profile_training_names_the_origin_of_the_nan(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    example("profile_training").main()
    printed = capsys.readouterr().out
    assert "error: non-finite gradients at sqrt_1_14 in module 'distance'" in printed
    assert re.search(r"called at \S*profile_training\.py:\d+ in Distance\.forward", printed)
    assert "With the root kept away from zero: 0 findings." in printed
    assert {path.name for path in (folder / "output").iterdir()} == {
        "profile.json",
        "profile.csv",
        "profile.html",
    }


@pytest.mark.slow
def test_film_training_leaves_films_and_events(folder: Path, capsys: pytest.CaptureFixture[str]):
    example("film_training").main(steps=12)
    assert "6 of 12 steps recorded" in capsys.readouterr().out
    for name in ("conv.mp4", "embedding.mp4"):
        assert (folder / "output" / name).stat().st_size > 1000
    assert list((folder / "output" / "tensorboard").glob("events.*"))


def test_the_dying_layer_is_found(folder: Path, capsys: pytest.CaptureFixture[str]):
    module = example("dying_layer")
    found = module.main(folder)
    assert found[0].module == "3.1"
    assert found[0].number > 0.5
    first = int(re.findall(r"step (\d+)", capsys.readouterr().out)[0])
    assert module.ACCIDENT <= first < module.ACCIDENT + 20
    assert (folder / "dying.html").stat().st_size > 100_000
