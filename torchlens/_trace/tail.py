"""Records every call of a model while a block runs."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from torchlens._capture.current import CURRENT
from torchlens._capture.model_parts import named_modules
from torchlens._capture.options import CaptureOptions
from torchlens._capture.session import Session
from torchlens._capture.threads import is_over
from torchlens._recording.frameworks import OtherModel
from torchlens._recording.garbage_collector import without_collector
from torchlens._recording.recording import Recording
from torchlens._recording.stored import StoredValue
from torchlens._recording.user_code import warn_caller
from torchlens._trace.call_writer import CallWriter, RepeatedCall
from torchlens._trace.names import (
    NamedLayers,
    UnmetFilter,
    checked_keys,
    modules_named,
    names_operations,
    unmet_warning,
)

_Model = TypeVar("_Model")
# The path of a module, ['features', '0'], and the module.
ModuleFilter = Callable[[list[str], torch.nn.Module], bool]
_LIMIT = 64 * 2**20  # bytes that a running call holds before they are written
_SAVES_ALL = CaptureOptions()
_RECORDED_ELSEWHERE = "they were made inside a call that another log or tail was recording"


class TailOptions(NamedTuple):
    """How a tail writes; see `torchlens.tail`."""

    path: Path
    every: int
    params: bool
    max_bytes: int | None
    shard_bytes: int


class CallCounts:
    """Counts the calls of one tail, and those that are not written, by reason. Thread-safe."""

    def __init__(self, every: int) -> None:
        self.num_seen = 0
        self._every = every
        self._reasons: dict[str, int] = {}  # reason → number of dropped calls
        self._lock = threading.Lock()

    def next_number(self) -> int | None:
        """Counts a new call and returns its number; None if `every` skips it."""
        with self._lock:
            self.num_seen += 1
            return None if (self.num_seen - 1) % self._every else self.num_seen

    def drop(self, reason: str, count: int = 1) -> None:
        """Counts calls that are missing from the file because of `reason`."""
        if count > 0:
            with self._lock:
                self._reasons[reason] = self._reasons.get(reason, 0) + count

    def drop_rest(self, reason: str, num_written: int) -> None:
        """Counts the remaining calls as dropped, after the recording was aborted."""
        self.drop(reason, -(-self.num_seen // self._every) - num_written - self.num_dropped)

    @property
    def num_dropped(self) -> int:
        return sum(self._reasons.values())

    def warning(self, file_name: str) -> str | None:
        """The warning at the end, if calls are missing."""
        if not self._reasons:
            return None
        reasons = self._reasons.items()
        why = "; ".join(f"{count} because {why}" for why, count in reasons)
        if len(reasons) == 1:
            why = next(iter(self._reasons))
        return (
            f"torchlens: {self.num_dropped} of {self.num_seen} calls are not in {file_name}: {why}."
        )

    def facts(self) -> dict[str, int]:
        """The counts stored in the file."""
        return {"calls": self.num_seen, "dropped": self.num_dropped, "every": self._every}


class BaseTail:
    """Begins and ends a recording, and counts its calls.

    After the block, `num_calls` is the number of written calls, `num_dropped` that of missing ones,
    and `problem` the error while writing, or None.
    """

    is_kept: Callable[[str], bool] | None = None

    def __init__(self, name: str, options: TailOptions) -> None:
        self.path = options.path
        self.num_calls = 0
        self.problem: str | None = None
        self._name = name
        self._options = options
        self._takes_params = options.params
        self._writer: CallWriter | None = None
        self._counts = CallCounts(options.every)
        self._is_over = False

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {self._name} into {self.path}: {self.num_calls} calls, "
            f"{self.num_dropped} dropped>"
        )

    @property
    def num_dropped(self) -> int:
        return self._counts.num_dropped

    def _begin(self) -> None:
        if self._writer is not None:
            raise ValueError(
                "A tail can be entered once; make another with torchlens.tail(model, path)."
            )
        options = self._options
        self._writer = CallWriter(
            options.path, options.shard_bytes, options.max_bytes, self.is_kept
        )

    def _end(self, *warnings: str | None) -> None:
        """Closes the trace, and warns about missing calls."""
        writer = self._writer
        assert writer is not None
        self._is_over = True
        if writer.is_in_a_child:
            return
        writer.close(self._counts.facts())
        self.num_calls, self.problem = writer.num_written, writer.problem
        if self.problem is not None:
            self._counts.drop_rest(f"writing failed ({self.problem})", self.num_calls)
        counted = self._counts.warning(self.path.name)
        if counted is not None and self.problem is not None:
            counted += " What was written before can be loaded."
        for warning in (counted, *warnings):
            if warning is not None:
                warn_caller(warning)

    def _number_of_call(self, is_inside_other: bool) -> int | None:
        """The number of a new call; None if it is not recorded."""
        writer = self._writer
        if writer is None or self._is_over or writer.is_in_a_child:
            return None
        number = self._counts.next_number()
        if number is None:
            return None
        if is_inside_other:
            self._counts.drop(_RECORDED_ELSEWHERE)
            return None
        if not writer.is_open:
            if writer.problem is None:
                self._counts.drop("max_bytes was reached")
            return None
        return number

    def _hand(self, number: int, made: Recording | RepeatedCall) -> None:
        """Passes a call to the writer, the first one with the parameters."""
        assert self._writer is not None
        params, self._takes_params = self._takes_params, False
        self._writer.hand(number, made, params)


class Tail(BaseTail, Generic[_Model]):
    """Records every call of a PyTorch model. As a context manager it returns the model."""

    def __init__(
        self, model: _Model, layers: "frozenset[str] | NamedLayers | None", options: TailOptions
    ) -> None:
        super().__init__(type(model).__name__, options)
        self.model = model
        self.is_kept = layers if isinstance(layers, NamedLayers) else None
        self._module: Any = model
        self._layers = layers
        self._unmet_filter = UnmetFilter()
        self._local = threading.local()
        self._before: Any = None

    def __enter__(self) -> _Model:
        try:
            self._begin()
            self._patch()
        except BaseException:  # an interrupt
            self._unpatch()
            raise
        return self.model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._unpatch()
        finally:  # again, because an interrupt may cut the first call short
            self._unpatch()
        self._end(self._warning_about_layers())

    def _warning_about_layers(self) -> str | None:
        if isinstance(self._layers, NamedLayers):
            return unmet_warning(self._layers.unmet, self._layers.names, self._name)
        return self._unmet_filter.warning(self._name)

    # -- intercepting calls ------------------------------------------------------------------------

    def _patch(self) -> None:
        """Replaces `__call__` in the model's class, where Python looks up special methods."""
        kind, model, tail = type(self.model), self.model, self
        self._before = kind.__dict__.get("__call__")
        original = kind.__call__

        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is model:
                return tail._call(original, args, kwargs)
            return original(self, *args, **kwargs)

        called.tail = self  # type: ignore[attr-defined]
        kind.__call__ = called  # type: ignore[method-assign]

    def _unpatch(self) -> None:
        """Restores the class, unless `__call__` was replaced by other code since. Also removes the
        patches of tails that ended while this one was patched over them.
        """
        self._is_over = True
        kind = type(self.model)
        while (
            isinstance(tail := getattr(kind.__dict__.get("__call__"), "tail", None), Tail)
            and tail._is_over
        ):
            if tail._before is None:
                del kind.__call__
            else:
                kind.__call__ = tail._before  # type: ignore[method-assign]
            tail._before = None  # it may hold another tail, and with it a model

    def _call(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        session = number = None
        is_traced = torch.compiler.is_compiling() or torch._C._get_tracing_state()
        if not is_traced and not getattr(self._local, "is_inside", False):
            is_inside_other = CURRENT.tracker is not None and not is_over(CURRENT.tracker)
            number = self._number_of_call(is_inside_other)
        if number is not None:
            session = self._session(number)
        if number is None or session is None:
            return original(self.model, *args, **kwargs)
        self._local.is_inside = True
        try:
            run = partial(session.run, list(args), kwargs)
            return without_collector(run, may_have_garbage=True)
        finally:
            self._local.is_inside = False
            self._hand_over(number, session)

    def _session(self, number: int) -> Session | None:
        assert self._writer is not None
        options = _SAVES_ALL
        if isinstance(self._layers, frozenset):
            options = CaptureOptions(saves=bool(self._layers), keys=self._layers)
        outflow = _Outflow(self._writer, number)
        try:
            session = Session(self._module, options, outflow=outflow)
        except Exception as error:  # ends the recording, not the caller's loop
            self._writer.fail(error)
            return None
        outflow.session = weakref.ref(session)
        return session

    def _hand_over(self, number: int, session: Session) -> None:
        assert self._writer is not None
        try:
            recording = session.recording
            if isinstance(self._layers, frozenset):
                called = (call.address for call in recording.module_calls if call.address)
                self._unmet_filter.note(self._layers, called)
            self._hand(number, recording)
        except Exception as error:  # as above
            self._writer.fail(error)


class _Outflow:
    """Passes values of a running call to the writer."""

    limit = _LIMIT

    def __init__(self, writer: CallWriter, call: int) -> None:
        self._writer = writer
        self._call = call
        self.session: Callable[[], Session | None] = lambda: None  # a weak reference

    def take(self, numbers: Sequence[int]) -> Mapping[int, StoredValue]:
        session = self.session()
        return {} if session is None else self._writer.take(self._call, session.recording, numbers)


def chosen_layers(
    model: torch.nn.Module, layers: "str | Sequence[str] | ModuleFilter"
) -> "frozenset[str] | NamedLayers | None":
    """`layers` resolved: None for all, the addresses of modules, or names in the file."""
    if isinstance(layers, str) and layers == "all":
        return None
    modules = {address: module for address, module in named_modules(model) if address}
    if callable(layers):
        return frozenset(
            address for address, module in modules.items() if layers(address.split("."), module)
        )
    keys = checked_keys(layers, "features", "relu", "module")
    if names_operations(keys):
        return NamedLayers(keys)
    return frozenset(modules_named(keys, modules, f"{type(model).__name__} has"))


def start_tail(model: Any, own: Any, layers: Any, options: TailOptions) -> Any:
    """A tail of a PyTorch model or of a JAX callable; see `torchlens.tail`."""
    if isinstance(own, OtherModel):
        from torchlens._trace.jax_tail import JaxTail

        return JaxTail(own, layers, options)
    return Tail(model, chosen_layers(model, layers), options)
