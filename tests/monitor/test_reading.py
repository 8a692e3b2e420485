"""What is read of a run is what the training computed, told from hand-made hooks and plain
torch.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._monitor.store.columns import QUANTILES


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = (
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
        )
        self.out = nn.Linear(8 * 36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.act(self.norm(self.conv(x))).flatten(1))


def train(
    model: nn.Module, folder: Path, num_steps: int = 6, **options: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """Trains under a monitor, and writes down by hand what it should see: whole tensors, by
    step.
    """
    truth: list[dict[str, Any]] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def look(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, output: torch.Tensor) -> None:
            truth[-1][name, "outputs"] = output.detach().clone()
            output.register_hook(
                lambda gradient: truth[-1].__setitem__((name, "gradients"), gradient.clone())
            )

        return hook

    for name, module in model.named_modules():
        if name:
            module.register_forward_pre_hook(
                lambda _module, args, name=name: truth[-1].__setitem__(
                    (name, "inputs"), args[0].detach().clone()
                )
            )
            module.register_forward_hook(look(name))
    run = tl.monitor(model, folder, **options)
    for _ in range(num_steps):
        truth.append({})
        loss = nn.functional.cross_entropy(
            model(torch.randn(16, 3, 8, 8)), torch.randint(0, 5, (16,))
        )
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            truth[-1][name, "parameters"] = parameter.detach().clone()
            truth[-1][name, "parameter_gradients"] = parameter.grad.clone()
        optimizer.step()
        for name, parameter in model.named_parameters():
            truth[-1][name, "updates"] = parameter.detach() - truth[-1][name, "parameters"]
        truth[-1]["loss"] = loss.item()
        run.log(loss=loss)
    run.finish()
    return run, truth


def test_every_series_is_what_hooks_by_hand_see(tmp_path: Path) -> None:
    _, truth = train(Net(), tmp_path, every=2)
    r = tl.open_run(tmp_path)
    assert r.steps == [0, 2, 4]
    assert r.modules == ["", "conv", "norm", "act", "out"]
    seen = 0
    for series in r.series():
        key = series.key
        if key.kind in ("inputs", "outputs", "gradients"):
            if not key.module:
                continue
            name = key.module
        else:
            name = f"{key.module}.{key.name}"
        assert series.steps.tolist() == [0, 2, 4]
        for place, step in enumerate(series.steps):
            whole = truth[step][name, key.kind]
            assert series.num_elements[place] == whole.numel()
            assert series.num_sampled[place] == min(whole.numel(), 1024)
            if key.kind != "updates" or whole.numel() <= 1024:
                assert series.is_range_exact[place]
                assert series.low[place] == pytest.approx(whole.min().item(), rel=1e-6)
                assert series.high[place] == pytest.approx(whole.max().item(), rel=1e-6)
            # A sample of 1,024: within some standard errors of the whole.
            assert (
                abs(series.mean[place] - whole.mean().item())
                <= 6 * whole.std().item() / min(whole.numel(), 1024) ** 0.5 + 1e-9
            )
            if whole.numel() <= 1024:
                assert series.rms[place] == pytest.approx(
                    whole.square().mean().sqrt().item(), rel=1e-5
                )
                expected = np.quantile(
                    whole.double().numpy().ravel(),
                    [0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99],
                )
                assert series.quantiles[place] == pytest.approx(expected, rel=1e-4, abs=1e-9)
                histogram = series.histogram(int(step))
                assert histogram.is_exact
                values = whole.double().numpy().ravel()
                for low, high, count in zip(
                    histogram.low, histogram.high, histogram.counts, strict=True
                ):
                    inside = (
                        (values == 0)
                        if low == high == 0
                        else (values > low) & (values <= high)
                        if high <= 0
                        else (values >= low) & (values < high)
                    )
                    assert inside.sum() == count
                assert histogram.counts.sum() == whole.numel()
            seen += 1
    assert seen == 3 * (4 * 3 + 6 * 3)
    assert r.scalars["loss"].steps.tolist() == list(range(6))
    assert r.scalars["loss"].values.tolist() == [pytest.approx(step["loss"]) for step in truth]


@pytest.mark.parametrize("where", ["before", "after"])
def test_scalars_belong_to_the_step_whose_loss_they_are(where: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.monitor(model, tmp_path, every=3) as run:
        for number in range(7):
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            if where == "before":
                run.log(number=number)
            optimizer.step()
            if where == "after":
                run.log(number=number)
    scalars = tl.open_run(tmp_path).scalars["number"]
    assert scalars.steps.tolist() == scalars.values.tolist() == list(range(7))


def test_a_watched_tensor_and_its_gradient(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.monitor(model, tmp_path) as run:
        z = run.watch("latent", model(torch.ones(2, 3)) * 2)
        (z * 3).sum().backward()
        optimizer.step()
    r = tl.open_run(tmp_path)
    assert r["latent"].watched.rms[0] == pytest.approx(z.square().mean().sqrt().item())
    assert r["latent"].gradients.low[0] == r["latent"].gradients.high[0] == 3
    assert r.graph["log"]["graph"]["module_classes"] == {"": "Linear"}


def test_a_watched_tensor_cannot_have_the_name_of_a_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with (
        tl.monitor(model, tmp_path) as run,
        pytest.raises(ValueError, match=r"Say another, such as '0 watched'"),
    ):
        run.watch("0", model(torch.ones(2, 3)))


def test_a_sparse_gradient_is_read_as_the_dense_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(5_000, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.monitor(model, tmp_path, graph="modules"):
        model(
            torch.randint(0, 5_000, (8,)).repeat(16)
        ).square().mean().backward()  # each token many times
        gradient = model[0].weight.grad.to_dense()
        optimizer.step()
    found = tl.open_run(tmp_path)["0"].parameter_gradients["weight"]
    assert found.num_elements[0] == 20_000
    assert (found.low[0], found.high[0]) == (gradient.min().item(), gradient.max().item())
    assert found.norm[0] == pytest.approx(gradient.norm().item(), rel=1e-5)
    assert found.zero[0] == pytest.approx((gradient == 0).double().mean().item())
    assert found.quantiles[0] == pytest.approx(
        gradient.flatten().quantile(torch.tensor(QUANTILES).float()).tolist()
    )


def test_the_range_of_a_slice_is_that_of_all_its_elements(tmp_path: Path) -> None:
    class Slices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.same = nn.Linear(16, 256), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.same(self.linear(x)[:, ::2])
            return found

    model = Slices()
    with tl.monitor(model, tmp_path, graph="modules") as run:
        y = model(torch.randn(512, 16))
        run.step()
    found = tl.open_run(tmp_path)["same"].outputs
    assert found.is_range_exact.all()
    assert (found.low[0], found.high[0]) == (y.min().item(), y.max().item())


def test_a_run_is_read_while_it_is_written(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tl.monitor(model, tmp_path)
    r = tl.open_run(tmp_path)
    assert r.steps == []
    assert not r.is_finished
    for number in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        while run.last_step != number:
            pass
        assert r.refresh()
        assert not r.refresh()
        assert r.steps == list(range(number + 1))
    run.finish()
    assert r.refresh()
    assert r.is_finished


def test_what_is_not_there_is_told_with_the_closest(tmp_path: Path) -> None:
    train(Net(), tmp_path, num_steps=1, log="outputs")
    r = tl.open_run(tmp_path)
    with pytest.raises(KeyError, match=r"Nothing was recorded of 'konv'. Closest: 'conv'."):
        r["konv"]
    with pytest.raises(
        AttributeError, match=r"No gradients were recorded of 'conv'. Available: outputs."
    ):
        _ = r["conv"].gradients
    with pytest.raises(FileNotFoundError, match=r"There are runs inside"):
        tl.open_run(tmp_path.parent)
    table = r.to_pandas()
    assert set(table.module) == {"", "conv", "norm", "act", "out"}


@pytest.mark.parametrize("graph", ["operations", "modules"])
def test_a_table_of_a_run_says_what_made_it(graph: Any, tmp_path: Path) -> None:
    model, x = Net(), torch.randn(2, 3, 8, 8)
    with tl.monitor(model, tmp_path, log="outputs", graph=graph):
        model(x).sum().backward()
    logged = tl.get_model_metadata(Net(), x).receipt
    structure = logged.structure if graph == "operations" else None
    assert tl.open_run(tmp_path).to_pandas().attrs["receipt"] == {
        "model": "Net", "structure": structure, "weights": None, "inputs": None,
        "versions": logged.versions,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every must be at least 1"),
        ({"log": "output"}, "Did you mean 'outputs'"),
        ({"log": 3}, "log must be a list of"),
        ({"modules": [3]}, "modules must be addresses"),
        ({"seconds": -1}, "seconds must be a number above 0"),
        ({"graph": "all"}, "graph must be 'operations' or 'modules'"),
        ({"budget": 10}, "budget must be at least"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        tl.monitor(nn.Linear(2, 2), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_several_models_are_told_what_to_do(tmp_path: Path) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(
        TypeError, match=r"got a list of 2. For several models, use one run for each"
    ):
        tl.monitor([one, two], tmp_path)  # type: ignore[arg-type]
    both = nn.ModuleList([one, two])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    with tl.monitor(both, tmp_path):
        two(one(torch.ones(1, 2))).sum().backward()
        optimizer.step()
    assert tl.open_run(tmp_path).modules == ["0", "1"]
