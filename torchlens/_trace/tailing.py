"""Recording every call of a model while a block runs."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from torchlens._capture.current import CURRENT
from torchlens._capture.model_parts import named_modules
from torchlens._capture.options import CaptureOptions
from torchlens._capture.session import Session
from torchlens._capture.threads import is_over
from torchlens._recording.collector import pause_collector, resume_collector
from torchlens._recording.frameworks import OtherModel
from torchlens._recording.stored import StoredValue
from torchlens._recording.user_code import warn_caller
from torchlens._trace.call_counts import RECORDED_ELSEWHERE, CallCounts
from torchlens._trace.layer_keys import (
    NamedLayers,
    checked_keys,
    modules_named,
    names_operations,
    unmet_warning,
)
from torchlens._trace.scribe import Scribe

_Model = TypeVar("_Model")
# Bytes set aside for the header of a file that grows.
ROOM = 1 << 20
# A path as the seed has it, ['features', '0'], and the module there.
ModuleFilter = Callable[[list[str], torch.nn.Module], bool]
_LIMIT = 64 * 2**20  # bytes that a running call holds before they are written
_SAVES_ALL = CaptureOptions()


class Tail(Generic[_Model]):
    """While it is entered, every call of the model is recorded. Entering gives the model itself.

    Afterwards `num_calls` says how many calls were written, `num_dropped` how many were not,
    `problem` what went wrong.
    """

    def __init__(
        self,
        model: _Model,
        path: Path,
        layers: "frozenset[str] | NamedLayers | None",
        every: int,
        params: bool,
        max_bytes: int | None,
        shard_bytes: int,
        room: int,
    ) -> None:
        self.model = model
        self._module: Any = model
        self.path = path
        self.num_calls = 0
        self.problem: str | None = None
        self._layers = layers
        self._called: dict[str, None] | None = (
            None  # the modules of the last call, as long as no chosen one was called
        )
        self._params = params
        self._sizes = (shard_bytes, max_bytes, room)
        self._scribe: Scribe | None = None
        self._counts = CallCounts(every)
        self._local = threading.local()
        self._is_over = False
        self._before: Any = None

    def __repr__(self) -> str:
        return (
            f"<Tail of {type(self.model).__name__} into {self.path}: {self.num_calls} calls, "
            f"{self.num_dropped} dropped>"
        )

    @property
    def num_dropped(self) -> int:
        return self._counts.num_dropped

    def __enter__(self) -> _Model:
        if self._scribe is not None:
            raise ValueError(
                "A tail can be entered once; make another with torchlens.tail(model, path)."
            )
        shard_bytes, max_bytes, room = self._sizes
        is_kept = self._layers if isinstance(self._layers, NamedLayers) else None
        self._scribe = Scribe(self.path, shard_bytes, max_bytes, is_kept, room)
        self._patch()
        return self.model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._scribe is not None
        self._unpatch()
        if self._scribe.is_in_a_child:
            return
        self._scribe.close(self._counts.facts())
        self.num_calls, self.problem = self._scribe.num_written, self._scribe.problem
        if self.problem is not None:
            self._counts.drop_rest(f"writing failed ({self.problem})", self.num_calls)
        warning = self._counts.warning(self.path.name)
        if warning is not None:
            warn_caller(
                f"{warning} What was written before can be loaded."
                if self.problem is not None
                else warning
            )
        self._tell_unmet_layers()

    def _tell_unmet_layers(self) -> None:
        name = type(self.model).__name__
        if isinstance(self._layers, NamedLayers):
            warning = unmet_warning(self._layers.unmet, self._layers.names, name)
            if warning is not None:
                warn_caller(warning)
        elif self._called:
            called = ", ".join(map(repr, list(self._called)[:12]))
            warn_caller(
                f"torchlens: layers chose no module that {name} called. Modules that it called: "
                f"{called}."
            )

    # -- seeing the calls
    # ------------------------------------------------------------------------------------------

    def _patch(self) -> None:
        """Lets calls of the model come by here. Python looks for `__call__` in the class, so that
        is where it stands.
        """
        kind, model, tail = type(self.model), self.model, self
        self._before = kind.__dict__.get("__call__")
        original = kind.__call__

        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            return (
                tail._call(original, args, kwargs)
                if self is model
                else original(self, *args, **kwargs)
            )

        called.tail = self  # type: ignore[attr-defined]
        kind.__call__ = called  # type: ignore[method-assign]

    def _unpatch(self) -> None:
        """Takes away what this put into the class, and what tails that ended before it had to leave
        there.

        If somebody else replaced it since, it stays, and hands on.
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
            tail._before = (
                None  # it may hold another tail; the model is to go when the caller drops it
            )

    def _call(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        scribe, model = self._scribe, self.model
        if (
            scribe is None
            or self._is_over
            or getattr(self._local, "is_inside", False)
            or scribe.is_in_a_child
        ):
            return original(model, *args, **kwargs)
        if torch.compiler.is_compiling() or torch._C._get_tracing_state():
            return original(model, *args, **kwargs)
        number = self._counts.next_number()
        if number is None:
            return original(model, *args, **kwargs)
        if CURRENT.tracker is not None and not is_over(CURRENT.tracker):
            self._counts.drop(RECORDED_ELSEWHERE)
            return original(model, *args, **kwargs)
        if not scribe.is_open:
            if scribe.problem is None:
                self._counts.drop("max_bytes was reached")
            return original(model, *args, **kwargs)
        session = self._begin(scribe, number)
        if session is None:
            return original(model, *args, **kwargs)
        user = object()
        self._local.is_inside = True
        try:
            pause_collector(user)
            return session.run(list(args), kwargs)
        finally:
            self._local.is_inside = False
            resume_collector(user)
            self._hand(scribe, number, session)

    def _begin(self, scribe: Scribe, number: int) -> Session | None:
        options = _SAVES_ALL
        if isinstance(self._layers, frozenset):
            options = CaptureOptions(saves=bool(self._layers), saved_modules=self._layers)
        outflow = _Outflow(scribe, number)
        try:
            session = Session(self._module, options, outflow=outflow)
        except Exception as error:  # ours to bear, not the caller's
            scribe.fail(error)
            return None
        outflow.session = weakref.ref(session)
        return session

    def _hand(self, scribe: Scribe, number: int, session: Session) -> None:
        try:
            recording = session.recording
            if isinstance(self._layers, frozenset) and self._called != {}:
                calls = dict.fromkeys(
                    call.address for call in recording.module_calls if call.address
                )
                self._called = {} if self._layers & calls.keys() else calls
            params, self._params = self._params, False  # with the first call that is written
            scribe.hand(number, recording, params)
        except Exception as error:  # as above
            scribe.fail(error)


class _Outflow:
    """Hands values of a running call to the scribe."""

    limit = _LIMIT

    def __init__(self, scribe: Scribe, call: int) -> None:
        self._scribe = scribe
        self._call = call
        self.session: Callable[[], Session | None] = lambda: None  # which holds this

    def take(self, numbers: Sequence[int]) -> Mapping[int, StoredValue]:
        session = self.session()
        return {} if session is None else self._scribe.take(self._call, session.recording, numbers)


# -- which values
# --------------------------------------------------------------------------------------------------


def chosen_layers(
    model: torch.nn.Module, layers: "str | Sequence[str] | ModuleFilter"
) -> "frozenset[str] | NamedLayers | None":
    """What `layers` means: None for all, the addresses of modules, or names in the file."""
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


def start_tail(
    model: Any,
    own: Any,
    target: Path,
    layers: Any,
    every: int,
    params: bool,
    max_bytes: int | None,
    max_shard_bytes: int,
) -> Any:
    """A tail of a PyTorch model or of a JAX callable; see `torchlens.tail`."""
    if isinstance(own, OtherModel):
        from torchlens._trace.jax_tailing import JaxTail

        return JaxTail(own, target, layers, every, params, max_bytes, max_shard_bytes, ROOM)
    chosen = chosen_layers(model, layers)
    return Tail(model, target, chosen, every, params, max_bytes, max_shard_bytes, ROOM)
