"""Records training whose loop is not yours: callbacks for the Trainers of Lightning and Hugging Face.

>>> trainer = lightning.Trainer(callbacks=[torchlens.callbacks.Lightning('runs/a', every=10)])
>>> trainer = transformers.Trainer(..., callbacks=[torchlens.callbacks.HuggingFace('runs/a', every=10)])

A recorded step is a step of the optimizer, even if gradients accumulate over several batches. The run includes what the
trainer logs, by step. The options are those of `torchlens.monitor`, including `sinks=`.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from torchlens.monitoring import Run
from torchlens.monitoring.sinks.sink import needed
from torchlens.runs import monitor

__all__ = ["HuggingFace", "Lightning"]


class _Callback:
    """What both share: a run while the training lasts. `run` is the last one, or None before the first."""

    run: Run | None = None

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        self._folder = folder
        self._options = options
        self._logged = self._offset = 0

    def __reduce__(self) -> Any:
        # The class is made when the trainer's package is there, so it has no name that pickle could find.
        return _made_again, (type(self).__mro__[1], self._folder, self._options)

    def _begin(self, model: torch.nn.Module, step: int) -> None:
        """A training starts at a step: 0, or where its checkpoint was."""
        self._end()
        options = {"step": step, **self._options} if step else self._options
        self.run = monitor(model, self._folder, **options)
        self._logged = self.run.current_step
        self._offset = self.run.current_step - step

    def _end(self) -> None:
        if self.run is not None:
            self.run.finish()

    def _log(self, numbers: Mapping[str, Any], step: int) -> None:
        if self.run is None or self.run.is_finished:
            return
        found = {name: value for name, value in numbers.items() if _is_number(value) and name not in ("step", "self")}
        self.run.log(step=max(step, 0), **found)


def _made_again(kind: type[_Callback], folder: Any, options: dict[str, Any]) -> _Callback:
    return kind(folder, **options)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


class Lightning(_Callback):
    """Records while `trainer.fit` trains, but not during the sanity check, validation and test.

    >>> trainer = lightning.Trainer(callbacks=[torchlens.callbacks.Lightning('runs/a', every=10)])

    Lightning calls `training_step`, not the module itself. So the run has the modules called there, by their addresses in
    the LightningModule, and the graph is made from their calls.
    """

    def __new__(cls, *args: Any, **options: Any) -> "Lightning":
        """An instance of Lightning's Callback, too: of the package that is in use, which goes by two names."""
        package = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
        base = needed(package, "lightning", "Lightning").Callback
        found: Lightning = object.__new__(type(cls.__name__, (cls, base), {"__module__": cls.__module__}))
        return found

    def on_train_start(self, trainer: Any, pl_module: torch.nn.Module) -> None:
        """After the sanity check, and after a checkpoint was loaded."""
        self._begin(pl_module, int(trainer.global_step))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What was logged belongs to the step that the optimizer has just made; there is none while gradients add up."""
        if self.run is None or self.run.current_step == self._logged:
            return
        self._logged = self.run.current_step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._log({"loss": loss, **trainer.callback_metrics}, self._logged - 1)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """What was logged in a validation belongs to the last step before it."""
        if self.run is not None and not trainer.sanity_checking:
            self._log(trainer.callback_metrics, self.run.current_step - 1)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The training is over."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The training failed, or was interrupted."""
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Whatever happened."""
        self._end()


class HuggingFace(_Callback):
    """Records while `trainer.train()` trains.

    >>> trainer = transformers.Trainer(..., callbacks=[torchlens.callbacks.HuggingFace('runs/a', every=10)])
    """

    def __new__(cls, *args: Any, **options: Any) -> "HuggingFace":
        """An instance of TrainerCallback, too."""
        base = needed("transformers", "transformers", "transformers").TrainerCallback
        found: HuggingFace = object.__new__(type(cls.__name__, (cls, base), {"__module__": cls.__module__}))
        return found

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a checkpoint was loaded."""
        self._begin(kwargs["model"], int(state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """The trainer counts steps that are over; ours count from 0."""
        self._log(logs or {}, self._offset + int(state.global_step) - 1)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The training is over. After an exception nobody is called: the run ends with the model, or with the process."""
        self._end()
