"""Recording every call of a JAX function while a block runs.

A jitted function stays one compiled program, which also returns what is recorded. What nobody jitted is logged as
`log_forward_pass` does it.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from torchlens.capture.recording import Recording
from torchlens.capture.session import CaptureOptions
from torchlens.capture.user_code import warn_caller
from torchlens.jax.callables import is_jitted
from torchlens.jax.compiled import CompiledRun
from torchlens.jax.internals import is_traced
from torchlens.trace.layer_keys import checked_keys, is_named, modules_named, names_operations, rows_labelled
from torchlens.trace.names import names_of_rows
from torchlens.trace.scribe import Scribe

__all__ = ["JaxTail"]


class JaxTail:
    """While it is entered, every call of what entering gives is recorded.

    Afterwards `num_calls` says how many calls were written, `num_dropped` how many were not, `problem` what went wrong.
    """

    def __init__(
        self,
        model: Any,
        path: Path,
        layers: Any,
        every: int,
        params: bool,
        max_bytes: int | None,
        shard_bytes: int,
        room: int,
    ) -> None:
        self.model = model.model
        self.path = path
        self.num_calls = 0
        self.num_dropped = 0
        self.problem: str | None = None
        self._model = model
        self._layers = _checked(layers)
        self._every = every
        self._params = params
        self._sizes = (shard_bytes, max_bytes, room)
        self._scribe: Scribe | None = None
        self._num_seen = 0
        self._num_traced = 0
        self._compiled = CompiledRun(model.forward, model.name, self._choose, params) if is_jitted(model.forward) else None

    def __repr__(self) -> str:
        return f"<JaxTail of {self._model.name} into {self.path}: {self.num_calls} calls, {self.num_dropped} dropped>"

    def __enter__(self) -> Callable[..., Any]:
        if self._scribe is not None:
            raise ValueError("A tail can be entered once; make another with torchlens.tail(function, path).")
        shard_bytes, max_bytes, room = self._sizes
        self._scribe = Scribe(self.path, shard_bytes, max_bytes, None, room)
        return self._call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._scribe is not None
        self._scribe.close({"calls": self._num_seen, "dropped": self.num_dropped, "every": self._every})
        self.num_calls, self.problem = self._scribe.num_written, self._scribe.problem
        if self.problem is not None:
            self.num_dropped = -(-self._num_seen // self._every) - self.num_calls
        if self.num_dropped:
            why = f"recording failed ({self.problem})" if self.problem is not None else "max_bytes was reached"
            warn_caller(f"torchlens: {self.num_dropped} of {self._num_seen} calls are not in {self.path.name}: {why}.")
        if self._num_traced:
            warn_caller(
                f"torchlens: {self._num_traced} calls of {self._model.name} are not in {self.path.name}, because they were "
                "made inside another function that JAX traces, where there are no values. Tail the outermost function."
            )

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, and records it where it is its turn."""
        scribe, forward = self._scribe, self._model.forward
        if is_traced((args, kwargs)):
            self._num_traced += 1
            return forward(*args, **kwargs)
        self._num_seen += 1
        number = self._num_seen
        if scribe is None or self.num_calls or (number - 1) % self._every:
            return forward(*args, **kwargs)
        if not scribe.is_open:
            self.num_dropped += scribe.problem is None
            return forward(*args, **kwargs)
        if self._compiled is None:
            return self._call_logged(scribe, number, args, kwargs)
        try:
            result, made = self._compiled.run(list(args), kwargs)
        except Exception as error:  # ours to bear, or the function's own, which raises it again
            scribe.fail(error)
            return forward(*args, **kwargs)
        scribe.hand(number, made, self._params and number == 1)
        return result

    def _call_logged(self, scribe: Scribe, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._model.session(CaptureOptions())
        try:
            return session.run(list(args), kwargs)
        finally:
            recording = session.recording
            chosen = frozenset(self._choose(recording))
            for row in range(len(recording.rows)):
                if row not in chosen:
                    recording.values[row], recording.versions[row] = None, -1
            scribe.hand(number, recording, self._params and number == 1)

    def _choose(self, recording: Recording) -> Iterable[int]:
        """The rows whose values are recorded."""
        layers = self._layers
        if layers == "all":
            return range(len(recording.rows))
        addresses = dict.fromkeys(call.address for call in recording.module_calls[1:])
        if callable(layers):
            modules = {address: recording.module_classes.get(address) for address in addresses}
            return _outputs_of(recording, {address for address in modules if layers(address.split("."), modules[address])})
        if names_operations(layers):
            return [row for row, name in enumerate(names_of_rows(recording, 1)) if is_named(name, layers)]
        return [row for key in layers for row in self._rows_of(key, recording, addresses)]

    def _rows_of(self, key: str, recording: Recording, addresses: Iterable[str]) -> list[int]:
        """What a module returns; where no module is called so, an operation."""
        try:
            says = f"{self._model.name} calls"
            return _outputs_of(recording, modules_named([key], addresses, says, "module or operation"))
        except ValueError:
            found = rows_labelled(key, recording)
            if not found:
                raise
            return found


def _outputs_of(recording: Recording, addresses: set[str]) -> list[int]:
    calls = recording.module_calls
    return [row for call, rows in recording.module_exits if calls[call].address in addresses for row in rows]


def _checked(layers: Any) -> Any:
    return layers if callable(layers) or layers == "all" else checked_keys(layers, "layers", "max", "class name")
