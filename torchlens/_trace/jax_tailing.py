"""Recording every call of a JAX function while a block runs.

A jitted function stays one compiled program, which also returns what is recorded. What nobody
jitted is logged as `log_forward_pass` does it.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from torchlens._capture.options import CaptureOptions
from torchlens._jax.callables import is_jitted
from torchlens._jax.compiled import CompiledRun
from torchlens._jax.internals import is_traced
from torchlens._jax.recorder import CURRENT
from torchlens._recording.recording import Recording
from torchlens._recording.user_code import warn_caller
from torchlens._trace.call_counts import RECORDED_ELSEWHERE, CallCounts
from torchlens._trace.layer_keys import (
    NamedLayers,
    checked_keys,
    modules_fitting,
    names_operations,
    rows_labelled,
    unmet_warning,
)
from torchlens._trace.names import names_of_rows
from torchlens._trace.scribe import Scribe


class JaxTail:
    """While it is entered, every call of what entering gives is recorded.

    Afterwards `num_calls` says how many calls were written, `num_dropped` how many were not,
    `problem` what went wrong.
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
        self.problem: str | None = None
        self._model = model
        self._layers = _checked(layers)
        self._named = NamedLayers(self._layers if isinstance(self._layers, list) else ())
        self._params = params
        self._sizes = (shard_bytes, max_bytes, room)
        self._scribe: Scribe | None = None
        self._is_over = False
        self._counts = CallCounts(every)
        self._num_traced = 0
        self._compiled = (
            CompiledRun(model.forward, model.name, self._choose, params)
            if is_jitted(model.forward)
            else None
        )

    def __repr__(self) -> str:
        return (
            f"<JaxTail of {self._model.name} into {self.path}: {self.num_calls} calls, "
            f"{self.num_dropped} dropped>"
        )

    @property
    def num_dropped(self) -> int:
        return self._counts.num_dropped

    def __enter__(self) -> Callable[..., Any]:
        if self._scribe is not None:
            raise ValueError(
                "A tail can be entered once; make another with torchlens.tail(function, path)."
            )
        shard_bytes, max_bytes, room = self._sizes
        self._scribe = Scribe(self.path, shard_bytes, max_bytes, None, room)
        return self._call

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._scribe is not None
        self._is_over = True
        if self._scribe.is_in_a_child:
            return
        self._scribe.close(self._counts.facts())
        self.num_calls, self.problem = self._scribe.num_written, self._scribe.problem
        if self.problem is not None:
            self._counts.drop_rest(f"recording failed ({self.problem})", self.num_calls)
        unmet = unmet_warning(self._named.unmet, self._named.names, self._model.name)
        for warning in (self._counts.warning(self.path.name), unmet):
            if warning is not None:
                warn_caller(warning)
        if self._num_traced:
            warn_caller(
                f"torchlens: {self._num_traced} calls of {self._model.name} are not in "
                f"{self.path.name}, because they were made inside another function that JAX "
                "traces, where there are no values. Tail the outermost function."
            )

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, and records it where it is its turn."""
        scribe, forward = self._scribe, self._model.forward
        if scribe is None or self._is_over or scribe.is_in_a_child:
            return forward(*args, **kwargs)
        if is_traced((args, kwargs)):
            self._num_traced += 1
            return forward(*args, **kwargs)
        number = self._counts.next_number()
        if number is None:
            return forward(*args, **kwargs)
        if CURRENT.recorder is not None:
            self._counts.drop(RECORDED_ELSEWHERE)
            return forward(*args, **kwargs)
        if not scribe.is_open:
            if scribe.problem is None:
                self._counts.drop("max_bytes was reached")
            return forward(*args, **kwargs)
        call = self._call_logged if self._compiled is None else self._call_compiled
        return call(scribe, number, args, kwargs)

    def _call_compiled(
        self, scribe: Scribe, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        assert self._compiled is not None
        try:
            result, made = self._compiled.run(list(args), kwargs)
        except Exception as error:  # ours to bear, or the function's own
            try:
                result = self._model.forward(*args, **kwargs)
            except Exception:
                self._counts.drop(
                    "the function raised an error, and a compiled program has no values then"
                )
                raise
            scribe.fail(error)
            return result
        scribe.hand(number, made, self._takes_params())
        return result

    def _call_logged(
        self, scribe: Scribe, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            session = self._model.session(CaptureOptions())
        except Exception as error:  # ours to bear, not the caller's
            scribe.fail(error)
            return self._model.forward(*args, **kwargs)
        try:
            return session.run(list(args), kwargs)
        finally:
            self._hand(scribe, number, session.recording)

    def _hand(self, scribe: Scribe, number: int, recording: Recording) -> None:
        try:
            chosen = frozenset(self._choose(recording))
            for row in range(len(recording.rows)):
                if row not in chosen:
                    recording.values[row], recording.versions[row] = None, -1
            scribe.hand(number, recording, self._takes_params())
        except Exception as error:  # as above
            scribe.fail(error)

    def _takes_params(self) -> bool:
        """Whether the parameters are written now: with the first call that is."""
        params, self._params = self._params, False
        return params

    def _choose(self, recording: Recording) -> Iterable[int]:
        """The rows whose values are recorded."""
        layers = self._layers
        if layers == "all":
            return range(len(recording.rows))
        addresses = dict.fromkeys(call.address for call in recording.module_calls[1:])
        if callable(layers):
            modules = {address: recording.module_classes.get(address) for address in addresses}
            return _outputs_of(
                recording,
                {address for address in modules if layers(address.split("."), modules[address])},
            )
        by_name = [row for row, name in enumerate(names_of_rows(recording, 1)) if self._named(name)]
        if names_operations(layers):
            return by_name
        return [row for key in layers for row in self._rows_of(key, recording, addresses)]

    def _rows_of(self, key: str, recording: Recording, addresses: Iterable[str]) -> list[int]:
        """What a module returns; where no module is called so, an operation."""
        modules = modules_fitting(key, addresses)
        found = _outputs_of(recording, modules) if modules else rows_labelled(key, recording)
        if found:
            self._named.unmet.pop(key, None)
        return found


def _outputs_of(recording: Recording, addresses: set[str]) -> list[int]:
    calls = recording.module_calls
    return [
        row
        for call, rows in recording.module_exits
        if calls[call].address in addresses
        for row in rows
    ]


def _checked(layers: Any) -> Any:
    return (
        layers
        if callable(layers) or layers == "all"
        else checked_keys(layers, "layers", "max", "class name")
    )
