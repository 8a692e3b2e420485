"""Recording every call of a model while a block runs."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from torchlens.capture.collector import pause_collector, resume_collector
from torchlens.capture.current import CURRENT
from torchlens.capture.parts import named_modules
from torchlens.capture.session import CaptureOptions, Session
from torchlens.capture.stored import StoredValue
from torchlens.capture.user_code import warn_caller
from torchlens.trace.layer_keys import checked_keys, is_named, modules_named, names_operations
from torchlens.trace.scribe import Scribe

__all__ = ["ModuleFilter", "Tail", "chosen_layers"]

_Model = TypeVar("_Model")
# A path as the seed has it, ['features', '0'], and the module there.
ModuleFilter = Callable[[list[str], torch.nn.Module], bool]
_LIMIT = 64 * 2**20  # bytes that a running call holds before they are written
_SAVES_ALL = CaptureOptions()


class Tail(Generic[_Model]):
    """While it is entered, every call of the model is recorded. Entering gives the model itself.

    Afterwards `num_calls` says how many calls were written, `num_dropped` how many were not, `problem` what went wrong.
    """

    def __init__(
        self,
        model: _Model,
        path: Path,
        layers: "frozenset[str] | Callable[[str], bool] | None",
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
        self.num_dropped = 0
        self.problem: str | None = None
        self._layers = layers
        self._every = every
        self._params = params
        self._sizes = (shard_bytes, max_bytes, room)
        self._scribe: Scribe | None = None
        self._lock = threading.Lock()
        self._local = threading.local()
        self._num_seen = 0
        self._before: Any = None
        self._patched: Any = None

    def __repr__(self) -> str:
        return f"<Tail of {type(self.model).__name__} into {self.path}: {self.num_calls} calls, {self.num_dropped} dropped>"

    def __enter__(self) -> _Model:
        if self._scribe is not None:
            raise ValueError("A tail can be entered once; make another with torchlens.tail(model, path).")
        shard_bytes, max_bytes, room = self._sizes
        is_kept = self._layers if callable(self._layers) else None
        self._scribe = Scribe(self.path, shard_bytes, max_bytes, is_kept, room)
        self._patch()
        return self.model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._scribe is not None
        self._unpatch()
        self._scribe.close({"calls": self._num_seen, "dropped": self.num_dropped, "every": self._every})
        self.num_calls, self.problem = self._scribe.num_written, self._scribe.problem
        if self.problem is not None:
            self.num_dropped = -(-self._num_seen // self._every) - self.num_calls
        if self.num_dropped:
            why = f"writing failed ({self.problem})" if self.problem is not None else "max_bytes was reached"
            rest = " What was written before can be loaded." if self.problem is not None else ""
            warn_caller(
                f"torchlens: {self.num_dropped} of {self._num_seen} calls are not in {self.path.name}: {why}.{rest}"
            )

    # -- seeing the calls ------------------------------------------------------------------------------------------

    def _patch(self) -> None:
        """Lets calls of the model come by here. Python looks for `__call__` in the class, so that is where it stands."""
        kind, model, tail = type(self.model), self.model, self
        self._before = kind.__dict__.get("__call__")
        original = kind.__call__

        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            return tail._call(original, args, kwargs) if self is model else original(self, *args, **kwargs)

        self._patched = called
        kind.__call__ = called  # type: ignore[method-assign]

    def _unpatch(self) -> None:
        kind = type(self.model)
        if kind.__dict__.get("__call__") is not self._patched:
            return  # somebody else replaced it since; ours hands on once the tail is over
        if self._before is None:
            del kind.__call__
        else:
            kind.__call__ = self._before  # type: ignore[method-assign]
        self._patched = self._before = None  # it holds this; the model is to go when the caller drops it

    def _call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scribe, model = self._scribe, self.model
        is_inside = getattr(self._local, "is_inside", False) or CURRENT.tracker is not None
        if is_inside or scribe is None or torch.compiler.is_compiling() or torch._C._get_tracing_state():
            return original(model, *args, **kwargs)
        with self._lock:
            self._num_seen += 1
            number = self._num_seen
        if (number - 1) % self._every:
            return original(model, *args, **kwargs)
        if not scribe.is_open:
            self.num_dropped += scribe.problem is None
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
            scribe.hand(number, session.recording, self._params and number == 1)
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


# -- which values ------------------------------------------------------------------------------------------------------


def chosen_layers(
    model: torch.nn.Module, layers: "str | Sequence[str] | ModuleFilter"
) -> "frozenset[str] | Callable[[str], bool] | None":
    """What `layers` means: None for all, the addresses of modules, or a function of a name in the file."""
    if isinstance(layers, str) and layers == "all":
        return None
    modules = {address: module for address, module in named_modules(model) if address}
    if callable(layers):
        return frozenset(address for address, module in modules.items() if layers(address.split("."), module))
    keys = checked_keys(layers, "features", "relu", "module")
    if names_operations(keys):
        return lambda name: is_named(name, keys)
    return frozenset(modules_named(keys, modules, f"{type(model).__name__} has"))
