"""Trainers of other libraries: what is recorded are steps of the optimizer, and the training is the
same.
"""

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from benchmarks.zoo.libraries import import_torchvision

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # those trainers warn of much


@pytest.fixture(autouse=True)
def _fixed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def data(num: int = 24) -> torch.utils.data.TensorDataset:
    x = torch.randn(num, 5, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


# -- Lightning
# --------------------------------------------------------------------------------------------------


def lightning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_torchvision()  # torchmetrics imports it
        import lightning.pytorch
    return lightning.pytorch


def module(kind: Any, seen: list[torch.Tensor], fails_at: int | None = None) -> Any:
    class Regression(kind):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(5, 8), nn.Tanh()), nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == fails_at:
                raise ValueError("a bad batch")
            loss = (self.head(self.body(batch[0])) - batch[1]).square().mean()
            self.log("train/loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", (self.head(self.body(batch[0])) - batch[1]).square().mean())

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(self.head.weight.grad.clone())

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.05)

    torch.manual_seed(2)
    return Regression()


def fit(folder: Path, callbacks: list[Any], **options: Any) -> tuple[Any, list[torch.Tensor]]:
    package = lightning()
    seen: list[torch.Tensor] = []
    own = module(package.LightningModule, seen, options.pop("fails_at", None))
    ckpt = options.pop("ckpt_path", None)
    trainer = package.Trainer(
        max_epochs=options.pop("max_epochs", 2), accelerator="cpu", logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=callbacks, **options,
    )  # fmt: skip
    loaders = [torch.utils.data.DataLoader(data(), batch_size=4) for _ in range(2)]
    try:
        trainer.fit(own, *loaders, ckpt_path=ckpt)
    finally:
        trainer.save_checkpoint(folder / "last.ckpt")
    return own, seen


def test_lightning_records_steps_of_the_optimizer(tmp_path: Path) -> None:
    lightning()
    callback = tl.callbacks.Lightning(tmp_path / "a")
    own, gradients = fit(tmp_path, [callback], accumulate_grad_batches=2)
    assert not callback.run.problems
    assert callback.run.is_finished
    reader = tl.open_run(tmp_path / "a")
    assert reader.steps == list(range(6))  # 12 batches
    assert reader["head"].outputs.num_calls.tolist() == [2] * 6  # validation is not counted
    # Lightning computes gradients within the step of the optimizer.
    recorded = reader["head"].parameter_gradients["weight"]
    assert recorded.rms == pytest.approx(
        [float(each.square().mean().sqrt()) for each in gradients], rel=1e-5
    )
    assert (reader["head"].updates["weight"].rms > 0).all()
    assert reader.scalars["train/loss"].steps.tolist() == list(range(6))
    assert set(reader.scalars) >= {"loss", "val_loss"}
    calls = reader.graph["log"]["graph"]["module_calls"]
    assert [address for address, *_ in calls] == ["", "body", "body.0", "body.1", "head"]
    assert [parent for _, _, parent, _ in calls] == [-1, 0, 1, 1, 0]
    plain, _ = fit(tmp_path, [], accumulate_grad_batches=2)
    for mine, theirs in zip(own.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_lightning_logs_the_loss_of_the_training_step_and_each_metric_when_it_is_new(
    tmp_path: Path,
) -> None:
    lightning()
    fit(tmp_path, [tl.callbacks.Lightning(tmp_path / "a")], accumulate_grad_batches=3)
    scalars = tl.open_run(tmp_path / "a").scalars
    assert (
        scalars["loss"].steps.tolist() == scalars["train/loss"].steps.tolist() == [0, 1, 2, 3]
    )  # 12 batches
    assert scalars["loss"].values == pytest.approx(scalars["train/loss"].values, rel=1e-6)
    assert scalars["val_loss"].steps.tolist() == [1, 3]  # at the end of each epoch


def test_lightning_with_optimizers_of_your_own_goes_on_at_the_next_step(tmp_path: Path) -> None:
    package = lightning()
    base: Any = package.LightningModule

    class Adversaries(base):
        def __init__(self, rare: int) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.a, self.b, self.rare = nn.Linear(5, 1), nn.Linear(5, 1), rare

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for number, (part, optimizer) in enumerate(
                zip((self.a, self.b), self.optimizers(), strict=True)
            ):
                if number and batch_idx % self.rare:
                    continue
                loss = part(batch[0]).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            self.log("batch", float(batch_idx))

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.a, self.b)]

    for rare in (1, 2):
        folder = tmp_path / str(rare)
        for epochs in (1, 2):
            trainer = package.Trainer(
                max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False, default_root_dir=folder,
                callbacks=[tl.callbacks.Lightning(folder, every=2)],
            )  # fmt: skip
            loader = torch.utils.data.DataLoader(data(), batch_size=4)
            trainer.fit(
                Adversaries(rare), loader, ckpt_path=None if epochs == 1 else folder / "last.ckpt"
            )
            trainer.save_checkpoint(folder / "last.ckpt")
        r = tl.open_run(folder)
        assert [session["first_step"] for session in r.sessions] == [0, 6]
        assert r.steps == list(range(0, 12, 2))
        assert r.scalars["batch"].steps.tolist() == list(range(12))
        assert r.scalars["batch"].values.tolist() == [*range(6), *range(6)]


def test_lightning_goes_on_from_a_checkpoint_and_ends_with_an_exception(tmp_path: Path) -> None:
    lightning()
    fit(tmp_path, [tl.callbacks.Lightning(tmp_path / "a", every=2)], max_epochs=1)
    callback = tl.callbacks.Lightning(tmp_path / "a", every=2)
    with pytest.raises(ValueError, match="a bad batch"):
        fit(tmp_path, [callback], ckpt_path=tmp_path / "last.ckpt", fails_at=3)
    assert callback.run.is_finished
    reader = tl.open_run(tmp_path / "a")
    assert [each["first_step"] for each in reader.sessions] == [0, 6]
    assert reader.steps[:5] == [0, 2, 4, 6, 8]
    assert reader.is_finished


def test_callbacks_are_those_of_the_trainers_and_can_be_pickled(tmp_path: Path) -> None:
    package = lightning()
    import transformers

    for kind, base in (
        (tl.callbacks.Lightning, package.Callback),
        (tl.callbacks.HuggingFace, transformers.TrainerCallback),
    ):
        callback = kind(tmp_path / "a", every=3)
        again = pickle.loads(pickle.dumps(callback))
        for each in (callback, again):
            assert isinstance(each, kind)
            assert isinstance(each, base)
            assert each._options == {"every": 3}


# -- Hugging Face
# --------------------------------------------------------------------------------------------------


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(5, 8), nn.Tanh()), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.head(self.body(x))
        return {"loss": (out - labels).square().mean(), "logits": out}


def train(folder: Path, callbacks: list[Any]) -> tuple[nn.Module, Any]:
    import transformers

    torch.manual_seed(2)
    model = Regressor()
    rows = [{"x": x, "labels": y} for x, y in map(data().__getitem__, range(24))]
    args = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        eval_strategy="epoch",
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, args, train_dataset=rows, eval_dataset=rows[:8], callbacks=callbacks
    )
    trainer.train()
    return model, trainer


def test_hugging_face_records_steps_of_the_optimizer(tmp_path: Path) -> None:
    callback = tl.callbacks.HuggingFace(tmp_path / "a")
    model, trainer = train(tmp_path, [callback])
    assert callback.run is not None
    assert not callback.run.problems
    assert callback.run.is_finished
    reader = tl.open_run(tmp_path / "a")
    assert reader.steps == list(range(6))
    assert reader["head"].outputs.num_calls.tolist() == [2] * 6
    logged = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    assert reader.scalars["loss"].steps.tolist() == [step - 1 for step in logged]
    assert reader.scalars["loss"].values == pytest.approx(list(logged.values()))
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    parts = [
        series.norm
        for module in reader
        for series in module.kinds.get("parameter_gradients", {}).values()
    ]
    # The trainer tells the norm before it is clipped to 1.
    assert np.sqrt(np.square(parts).sum(0)) == pytest.approx(
        [min(float(norm), 1.0) for norm in norms], rel=1e-3
    )
    assert "eval_loss" in reader.scalars
    assert reader.graph["log"]
    plain, _ = train(tmp_path, [])
    for mine, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
