"""Records every call of a JAX function while a block runs.

A jitted function stays one compiled program, which also returns what is recorded. A function that
is not jitted is logged at each call as `log_forward_pass` does it.
"""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from torchlens._capture.options import CaptureOptions
from torchlens._jax.callables import is_jitted
from torchlens._jax.compiled import CompiledRun
from torchlens._jax.internals import is_traced
from torchlens._jax.primitive_recorder import CURRENT
from torchlens._recording.recording import Recording
from torchlens._trace.names import (
    NamedLayers,
    UnmetFilter,
    checked_keys,
    modules_fitting,
    names_of_rows,
    names_operations,
    rows_labelled,
    unmet_warning,
)
from torchlens._trace.tail import BaseTail, TailOptions


class JaxTail(BaseTail):
    """Records every call of the function that entering it gives."""

    def __init__(self, model: Any, layers: Any, options: TailOptions) -> None:
        super().__init__(model.name, options)
        self.model = model.model
        self._forward = model.forward
        self._session = model.session
        self._layers = layers
        if not callable(layers) and layers != "all":
            self._layers = checked_keys(layers, "layers", "max", "class name")
        self._named = NamedLayers(self._layers if isinstance(self._layers, list) else ())
        self._unmet_filter = UnmetFilter()
        self._num_traced = 0
        self._compiled = (
            CompiledRun(model.forward, model.name, self._choose, options.params)
            if is_jitted(model.forward)
            else None
        )

    def __enter__(self) -> Callable[..., Any]:
        self._begin()
        return self._call

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        traced = (
            f"torchlens: {self._num_traced} calls of {self._name} are not in {self.path.name}, "
            "because they were made inside another function that JAX traces, where there are no "
            "values. Tail the outermost function."
        )
        self._end(
            unmet_warning(self._named.unmet, self._named.names, self._name),
            self._unmet_filter.warning(self._name),
            traced if self._num_traced else None,
        )

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, and records the call if it is the n-th (`every`)."""
        number = None
        if not is_traced((args, kwargs)):
            number = self._number_of_call(CURRENT.recorder is not None)
        elif not self._is_over:
            self._num_traced += 1
        if number is None:
            return self._forward(*args, **kwargs)
        call = self._call_logged if self._compiled is None else self._call_compiled
        return call(number, args, kwargs)

    def _call_compiled(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._compiled is not None
        assert self._writer is not None
        try:
            result, made = self._compiled.run(list(args), kwargs)
        except Exception as error:  # ours, or the function's own
            try:
                result = self._forward(*args, **kwargs)
            except Exception:
                self._counts.drop(
                    "the function raised an error, and a compiled program has no values then"
                )
                raise
            self._writer.fail(error)
            return result
        self._hand(number, made)
        return result

    def _call_logged(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._writer is not None
        try:
            session = self._session(CaptureOptions())
        except Exception as error:  # ends the recording, not the caller's loop
            self._writer.fail(error)
            return self._forward(*args, **kwargs)
        try:
            return session.run(list(args), kwargs)
        finally:
            self._hand_over(number, session.recording, session.tracker.modules)

    def _hand_over(self, number: int, recording: Recording, modules: dict[str, Any]) -> None:
        assert self._writer is not None
        try:
            chosen = frozenset(self._choose(recording, modules))
            for row in range(len(recording.rows)):
                if row not in chosen:
                    recording.values[row], recording.versions[row] = None, -1
            self._hand(number, recording)
        except Exception as error:  # as above
            self._writer.fail(error)

    def _choose(self, recording: Recording, modules: dict[str, Any]) -> Iterable[int]:
        """The rows whose values are recorded. `modules` are the objects that were called."""
        layers = self._layers
        if layers == "all":
            return range(len(recording.rows))
        addresses = dict.fromkeys(call.address for call in recording.module_calls[1:])
        if callable(layers):
            chosen = {own for own in addresses if layers(own.split("."), modules.get(own))}
            self._unmet_filter.note(chosen, addresses)
            return _outputs_of(recording, chosen)
        by_name = [row for row, name in enumerate(names_of_rows(recording, 1)) if self._named(name)]
        if names_operations(layers):
            return by_name
        return [row for key in layers for row in self._rows_of(key, recording, addresses)]

    def _rows_of(self, key: str, recording: Recording, addresses: Iterable[str]) -> list[int]:
        """The outputs of a module; if none has that address, an operation."""
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
