"""The model again, with edits on the way: a new history."""

from collections.abc import Callable
from typing import Any

import torch

from torchlens._edit.editing import Editing
from torchlens._edit.plan import history_of, pairs_of, targets_of
from torchlens._history.log import Log
from torchlens._history.lookup import Lookup
from torchlens._history.model_history import ModelHistory
from torchlens._history.sites import Sites
from torchlens._recording.frameworks import OtherModel


def check_torch(log: Log, what: str) -> None:
    """Raises for a history of another framework."""
    if log.recording.framework != "torch":
        raise NotImplementedError(
            f"{what} is for PyTorch: this history is of {log.recording.framework}, whose functions "
            "have no hooks. Change the function, and log it again."
        )


def rerun(
    history: ModelHistory, model: Any, edits: Any, log_again: Callable[[], ModelHistory]
) -> ModelHistory:
    """The history that `log_again` makes of the model while the edits are in force."""
    check_torch(history._log, "rerun")
    return editing_of(model, edits, history).during(log_again)


def editing_of(model: Any, edits: Any, history: ModelHistory | None) -> Editing[Any]:
    """The edits of a model, at places in a history or at modules."""
    if isinstance(model, OtherModel) or not isinstance(model, torch.nn.Module):
        raise TypeError("Edits are for a torch.nn.Module, the model that was logged.")
    pairs_of(edits)
    log = history._log if history is not None else history_of(edits)
    if log is None:
        return Editing(model, [], edits)
    check_torch(log, "torchlens.edit")
    return Editing(model, targets_of(log, Sites(log, Lookup(log)), edits))
