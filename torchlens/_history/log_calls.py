"""Logs every call of a model while a block runs, wherever it is called from."""

from threading import Lock, local
from types import TracebackType
from typing import Any

import torch

from torchlens._capture.current import CURRENT, add_watcher, remove_watcher
from torchlens._capture.options import LogOptions
from torchlens._capture.patches.patching import apply_module_patches, undo_patches
from torchlens._capture.threads import is_over
from torchlens._history.log_model import log_call
from torchlens._history.model_history import ModelHistory


class LoggedCalls:
    """A context manager that gives the list of histories, one for each call of the model so far.

    A call that raises adds the history up to there. Calls inside another log are part of that one.
    """

    def __init__(self, model: torch.nn.Module, options: LogOptions) -> None:
        self.histories: list[ModelHistory] = []
        self._model = model
        self._options = options
        self._local = local()
        self._lock = Lock()

    def __enter__(self) -> list[ModelHistory]:
        try:
            apply_module_patches(self)
            add_watcher(self, is_everywhere=True)
        except BaseException:  # an interrupt
            self._end()
            raise
        return self.histories

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._end()
        finally:  # again, because an interrupt may cut the first call short
            self._end()

    def _end(self) -> None:
        remove_watcher(self)
        undo_patches(self)

    # -- as a watcher of modules -------------------------------------------------------------------

    def begins_with(self, module: Any) -> bool:
        """True for a call of the model that no log is recording yet."""
        return (
            module is self._model
            and not getattr(self._local, "is_inside", False)
            and (CURRENT.tracker is None or is_over(CURRENT.tracker))
            and torch._C._get_tracing_state() is None
        )

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the model with a log, and returns what it returns."""
        self._local.is_inside = True
        history: ModelHistory | None = None
        try:
            history, output = log_call(module, None, list(args), dict(kwargs), self._options)
        except BaseException as error:
            history = getattr(error, "partial_history", None)
            raise
        finally:
            self._local.is_inside = False
            with self._lock:
                if history is not None:
                    self.histories.append(history)
        return output

    def enter(self, module: Any, args: Any, kwargs: Any, time: float) -> None:
        """Calls of other modules are left alone."""

    def end(self, watched: Any) -> None:
        """As enter."""

    def leave(self, watched: Any, result: Any, args: Any, kwargs: Any) -> None:
        """As enter."""

    def fail(self, watched: Any, error: BaseException, args: Any, kwargs: Any) -> None:
        """As enter."""
