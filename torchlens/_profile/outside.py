"""What a training loop does outside the model's modules: backward passes, optimizer steps, waiting
for data, checkpoints.

While a profile runs, `torch.autograd.backward`, the iterators of data loaders and checkpoints are
patched to report when they run, and torch's global hooks report optimizer steps. The first watch
sets up the patches, the last one removes them. Each watch sees its own thread.
"""

import threading
from collections.abc import Callable
from functools import partial, wraps
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import optimizer as optimizers
from torch.utils import checkpoint
from torch.utils.data import dataloader


class OutsideSpan(NamedTuple):
    """Something that ran outside the model: 'backward', 'optimizer' or 'data'; 'skip' is an
    optimizer's step left out.
    """

    kind: str
    start: float
    end: float


_lock = threading.RLock()
_watches: "list[OutsideWatch]" = []
_undo: list[Callable[[], None]] = []


class OutsideWatch:
    """Records what the thread that started it does outside the model.

    `on_checkpoint` is called with the arguments that a checkpoint (`use_reentrant=False`) keeps in
    order to run its part of the model again.
    """

    def __init__(self, on_checkpoint: Callable[[Any], None]) -> None:
        self.spans: list[OutsideSpan] = []
        self.on_checkpoint = on_checkpoint
        self._thread = 0
        self._optimizer_start = 0.0

    def start(self) -> None:
        """Begins to watch this thread."""
        self._thread = threading.get_ident()
        with _lock:
            if not _watches:
                _set_up()
            _watches.append(self)

    def stop(self) -> None:
        """Ends watching. May be called again."""
        with _lock:
            if self in _watches:
                _watches.remove(self)
            if not _watches:
                _take_away()

    def take(self) -> list[OutsideSpan]:
        """The spans recorded since the last call."""
        spans, self.spans = self.spans, []
        return spans


def _current() -> list[OutsideWatch]:
    thread = threading.get_ident()
    return [watch for watch in list(_watches) if watch._thread == thread]


def _report(kind: str, start: float) -> None:
    span = OutsideSpan(kind, start, perf_counter())
    for watch in _current():
        watch.spans.append(span)


def _before_optimizer(*_: Any) -> None:
    for watch in _current():
        watch._optimizer_start = perf_counter()


def _after_optimizer(*_: Any) -> None:
    for watch in _current():
        watch.spans.append(OutsideSpan("optimizer", watch._optimizer_start, perf_counter()))


def _set_up() -> None:
    _take_away()  # what an interrupt may have left
    owner: Any
    for owner, name, wrapped in (
        (torch.autograd, "backward", partial(_reporting, "backward")),
        (dataloader._BaseDataLoaderIter, "__next__", partial(_reporting, "data")),
        (checkpoint, "_checkpoint_without_reentrant_generator", _noting_checkpoints),
        (GradScaler, "_maybe_opt_step", _reporting_skips),
    ):
        original = getattr(owner, name, None)
        if original is not None:
            _undo.append(partial(setattr, owner, name, original))
            setattr(owner, name, wrapped(original))
    for register, hook in (
        (optimizers.register_optimizer_step_pre_hook, _before_optimizer),
        (optimizers.register_optimizer_step_post_hook, _after_optimizer),
    ):
        _undo.append(register(hook).remove)


def _take_away() -> None:
    while _undo:
        _undo[-1]()
        _undo.pop()


def _reporting(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def reporting(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            _report(kind, start)

    return reporting


def _reporting_skips(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        numbers = [_num_steps(watch) for watch in _current()]
        result = original(*args, **kwargs)
        if numbers == [_num_steps(watch) for watch in _current()]:
            _report("skip", start)
        return result

    return reporting


def _num_steps(watch: OutsideWatch) -> int:
    return sum(span.kind == "optimizer" for span in watch.spans)


def _noting_checkpoints(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def noting(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            bound = (function.args, function.keywords) if isinstance(function, partial) else ()
            for watch in _current():
                watch.on_checkpoint((bound, args, kwargs))
        return original(function, *args, **kwargs)

    return noting
