"""Records training whose loop is not yours: callbacks for the Trainers of Lightning and Hugging
Face.

>>> trainer = lightning.Trainer(callbacks=[torchlens.callbacks.Lightning('runs/a', every=10)])
>>> callback = torchlens.callbacks.HuggingFace('runs/a', every=10)
>>> trainer = transformers.Trainer(..., callbacks=[callback])

A recorded step is a step of the optimizer, even if gradients accumulate over several batches. The
run includes what the trainer logs, by step. The options are those of `torchlens.monitor`, including
`sinks=`.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from torchlens._monitor.record.run import Run
from torchlens._monitor.sinks.sink import needed
from torchlens.api import monitor

__all__ = ["HuggingFace", "Lightning"]

_STEP_KEY = "torchlens_step"  # in a checkpoint: how many steps were made


class _Callback:
    """What both share: a run while the training lasts. `run` is the last one, or None before the
    first.
    """

    run: Run | None = None

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        self._folder = folder
        self._options = options
        self._offset = 0

    def __reduce__(self) -> Any:
        # The class is made when the trainer's package is there, so it has no name that pickle could
        # find.
        return _made_again, (type(self).__mro__[1], self._folder, self._options)

    def _begin(self, model: torch.nn.Module, step: int) -> None:
        """A training starts at a step: 0, or where its checkpoint was."""
        self._end()
        options = {"step": step, **self._options} if step else self._options
        self.run = monitor(model, self._folder, **options)
        self._offset = self.run.current_step - step

    def _end(self) -> None:
        if self.run is not None:
            self.run.finish()

    def _log(self, numbers: Mapping[str, Any], step: int) -> None:
        if self.run is None or self.run.is_finished:
            return
        found = {
            name: value
            for name, value in numbers.items()
            if _is_number(value) and name not in ("step", "self")
        }
        self.run.log(step=max(step, 0), **found)


def _made_again(kind: type[_Callback], folder: Any, options: dict[str, Any]) -> _Callback:
    return kind(folder, **options)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same(value: Any, last: Any) -> bool:
    """Whether a metric was not logged again: a new one has memory of its own, even if the number is
    the same.
    """
    if isinstance(value, torch.Tensor) and isinstance(last, torch.Tensor):
        return value.device == last.device and value.data_ptr() == last.data_ptr()
    return value is last


class Lightning(_Callback):
    """Records while `trainer.fit` trains, but not during the sanity check, validation and test.

    >>> trainer = lightning.Trainer(callbacks=[torchlens.callbacks.Lightning('runs/a', every=10)])

    Lightning calls `training_step`, not the module itself. So the run has the modules called there,
    by their addresses in the LightningModule, and the graph is made from their calls.
    """

    def __new__(cls, *args: Any, **options: Any) -> "Lightning":
        """An instance of Lightning's Callback, too: of the package that is in use, which goes by
        two names.
        """
        package = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
        base = needed(package, "lightning", "Lightning").Callback
        found: Lightning = object.__new__(
            type(cls.__name__, (cls, base), {"__module__": cls.__module__})
        )
        return found

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(folder, **options)
        self._num_logged = 0  # steps whose metrics were logged
        self._num_loaded: int | None = None  # steps made before the checkpoint that was loaded
        self._metrics: dict[str, torch.Tensor] = {}  # as they were logged last

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint tells how many steps were made: Lightning counts those of each optimizer."""
        if self.run is not None:
            checkpoint[_STEP_KEY] = self.run.num_steps_made

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Where the training goes on."""
        self._num_loaded = checkpoint.get(_STEP_KEY)

    def on_train_start(self, trainer: Any, pl_module: torch.nn.Module) -> None:
        """After the sanity check, and after a checkpoint was loaded."""
        self._begin(pl_module, self._first_step(trainer, pl_module))
        assert self.run is not None
        self._num_logged = self.run.num_steps_made
        self._metrics = dict(trainer.callback_metrics)

    def _first_step(self, trainer: Any, pl_module: Any) -> int:
        loaded, self._num_loaded = self._num_loaded, None
        if not trainer.global_step:
            return 0
        if loaded is not None:
            return loaded
        if self.run is not None:  # `fit` was called again
            return self.run.num_steps_made
        num_turns = 1 if pl_module.automatic_optimization else len(trainer.optimizers)
        return int(trainer.global_step) // max(num_turns, 1)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """What was logged belongs to the step that the optimizer has just made; there is none while
        gradients add up.
        """
        if self.run is None or self.run.num_steps_made == self._num_logged:
            return
        self._num_logged = self.run.num_steps_made
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and pl_module.automatic_optimization:
            loss = (
                loss.detach() * trainer.accumulate_grad_batches
            )  # by which Lightning has divided it
        self._log({"loss": loss}, self._num_logged - 1)
        self._log_metrics(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """What was logged for the epoch before belongs to its last step."""
        self._log_metrics(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """What was logged in a validation belongs to the last step before it."""
        if not trainer.sanity_checking:
            self._log_metrics(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """What was logged for the last epoch."""
        self._log_metrics(trainer)

    def _log_metrics(self, trainer: Any) -> None:
        """Those that are new: Lightning keeps the others as they were."""
        if self.run is None or self.run.is_finished:
            return
        last, self._metrics = self._metrics, dict(trainer.callback_metrics)
        new = {
            name: value
            for name, value in self._metrics.items()
            if not _is_same(value, last.get(name))
        }
        self._log(new, self.run.num_steps_made - 1)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The training is over."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The training failed, or was interrupted."""
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lightning calls this last, after any failure too."""
        self._end()


class HuggingFace(_Callback):
    """Records while `trainer.train()` trains.

    >>> callback = torchlens.callbacks.HuggingFace('runs/a', every=10)
    >>> trainer = transformers.Trainer(..., callbacks=[callback])
    """

    def __new__(cls, *args: Any, **options: Any) -> "HuggingFace":
        """An instance of TrainerCallback, too."""
        base = needed("transformers", "transformers", "transformers").TrainerCallback
        found: HuggingFace = object.__new__(
            type(cls.__name__, (cls, base), {"__module__": cls.__module__})
        )
        return found

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a checkpoint was loaded."""
        self._begin(kwargs["model"], int(state.global_step))

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """The trainer counts steps that are over; ours count from 0."""
        self._log(logs or {}, self._offset + int(state.global_step) - 1)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The training is over. After an exception there is no call: the run ends with the model,
        or with the process.
        """
        self._end()
