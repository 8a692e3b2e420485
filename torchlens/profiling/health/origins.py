"""Which operation made the first NaN or Inf: one whose result has some, and what it was given does not account for it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from torchlens.errors import NonFiniteError
from torchlens.graph.operation_kinds import SAME_NUMBERS, UNINITIALISED
from torchlens.history.nonfinite import NonFinite, ValueRange, value_range
from torchlens.profiling.health.finite import has_nonfinite
from torchlens.profiling.records import Place

__all__ = ["Origins"]

# They hand on what they are given: whatever is not finite in their results was so before. Uninitialised memory means
# nothing yet.
_PASSING = (
    SAME_NUMBERS
    | UNINITIALISED
    | {"relu", "maxpool1d", "maxpool2d", "maxpool3d", "adaptivemaxpool1d", "adaptivemaxpool2d", "adaptivemaxpool3d"}
)
_MOST = 20
_PARAMETER = " (a parameter)"
_CONVERSIONS = frozenset({"to", "type", "long", "int", "short", "round"})


class _Taint(Enum):
    """Why values in memory are not finite."""

    ASKED = "asked for"
    FOUND = "found"  # told already, or a consequence of what was told


_OUTSIDE = "Look for what made it so: the data, or an optimizer step with gradients that were not finite."
_MASKED = "Its infinite input was asked for. A row that is masked altogether leaves nothing to choose from: skip such rows."
_OVERWRITTEN = "What it was given is gone: it wrote its result there."


class Origins:
    """Finds the places where NaN and Inf come up, in the order in which they do; consequences are not told.

    Infinity that was asked for, by a constant among the arguments (`masked_fill(mask, -inf)`) or by an infinite tensor from
    outside (a mask that is a buffer), is no such place; a NaN that comes of it is.
    """

    def __init__(self, stop: bool) -> None:
        self.found: list[tuple[Place, NonFinite]] = []
        # Which of them came through to what their step computed last: the outputs of the model.
        self.lasting: set[int] = set()
        self._stop = stop
        self._step = -1
        # In this step: the memory that holds values that are not finite and why; which of `found` they come from; those
        # that no operation has read yet; and at module level the modules that made some.
        self._tainted: dict[int, _Taint] = {}
        self._sources: dict[int, set[int]] = {}
        self._unread: set[int] = set()
        self._addresses: set[str] = set()

    def on_value(self, place: Place, tensor: torch.Tensor, inputs: Any) -> None:
        is_passing = place.operation in _PASSING
        is_clean = not self._tainted or place.step != self._step
        if is_passing and is_clean:
            return
        if not has_nonfinite(tensor):
            if self._unread and not is_clean and not is_passing and place.entry is not None:
                self._note_reading(place, tensor, inputs)
            return
        self._begin(place)
        if place.entry is None and self._is_told_already(place, _pointer(tensor)):
            return
        self._look_into(place, tensor, inputs, is_passing)

    def _note_reading(self, place: Place, tensor: torch.Tensor, inputs: Any) -> None:
        """A finite result may have been made of values that are not, which then ended there.

        Not if it merely looks at them, as `argmax` does, and they go on elsewhere.
        """
        if tensor.is_floating_point() or tensor.is_complex() or place.operation in _CONVERSIONS:
            read = [argument for _, argument in _named_tensors(inputs) if has_nonfinite(argument)]
            self._unread.difference_update(map(_pointer, read))
            if not tensor._is_view():
                self._unread.discard(_pointer(tensor))

    def _look_into(self, place: Place, tensor: torch.Tensor, inputs: Any, is_passing: bool) -> None:
        """A result is not finite: asked for, a consequence, or the origin."""
        memory = _pointer(tensor)
        before = self._tainted.get(memory)
        result = value_range("result", tensor)
        given = [(_pointer(argument), value_range(name, argument)) for name, argument in _named_tensors(inputs)]
        # What was written in place is its own argument by now; what it was before is known if it was not finite then.
        ranges = [each for own, each in given if own != memory]
        is_overwritten = len(ranges) < len(given)
        reasons = {before} if is_overwritten and before is not None else set()
        sources = self._sources.get(memory, set()) if is_overwritten else set()
        strange: list[str] = []
        for own, each in given:
            if own != memory and not each.is_finite:
                # A mask may be infinite, a parameter is not meant to be. One that was updated with what was told of an
                # earlier step is a consequence of that.
                is_parameter = each.name.endswith(_PARAMETER)
                is_broken = bool(each.num_nan or is_parameter)
                if own not in self._tainted and is_broken and not (self.lasting and is_parameter):
                    strange.append(each.name)
                reasons.add(self._tainted.setdefault(own, _Taint.FOUND if is_broken else _Taint.ASKED))
                sources = sources | self._sources.get(own, set())
        if any(map(_is_infinite, _constants(inputs))):
            reasons.add(_Taint.ASKED)
        is_consequence = is_passing or (_Taint.FOUND in reasons and not strange)
        is_asked_for = _Taint.ASKED in reasons and not result.num_nan
        if not is_consequence and not is_asked_for:
            note = _OVERWRITTEN if is_overwritten else ""
            if strange:
                note = f"It came in from outside the model's operations: {', '.join(strange)}. {_OUTSIDE}"
            elif reasons:
                note = _MASKED
            sources = {self._add(place, result, ranges, note)}
        self._tainted[memory] = _Taint.ASKED if is_asked_for and _Taint.FOUND not in reasons else _Taint.FOUND
        self._sources[memory] = sources
        self._unread.difference_update(own for own, _ in given)
        if self._tainted[memory] is _Taint.FOUND:
            self._unread.add(memory)

    def _is_told_already(self, place: Place, memory: int) -> bool:
        """At module level: whether a module inside, or this very tensor, was looked at before its container."""
        inside = f"{place.address}." if place.address else ""
        is_told = memory in self._tainted or any(address.startswith(inside) for address in self._addresses)
        self._addresses.add(place.address)
        return is_told

    @property
    def _is_forward_broken(self) -> bool:
        """Whether the outputs of this step are not finite; those of modules are not followed further than to the model."""
        return "" in self._addresses if self._addresses else bool(self._unread)

    def on_gradient(self, place: Place, gradient: torch.Tensor, inputs: Any) -> None:
        # Where the outputs were not finite, the gradients' not being so is no news.
        if not has_nonfinite(gradient) or (self._is_forward_broken and place.step == self._step):
            return
        self._begin(place)
        received = [value_range(name, tensor) for name, tensor in _named_tensors((inputs, None))]
        if all(each.is_finite for each in received):
            given = [each._replace(name=each.name.replace("argument", "gradient received")) for each in received]
            self.lasting.add(self._add(place, value_range("gradient", gradient), given, ""))

    def _begin(self, place: Place) -> None:
        if place.step != self._step:
            self._end()
            self._step = place.step

    def _end(self) -> None:
        """A step is over: what nobody read is what it gave out."""
        if self._is_forward_broken:
            places = self._sources if self._addresses else self._unread
            self.lasting.update(*(self._sources.get(memory, ()) for memory in places))
        for known in (self._tainted, self._sources, self._unread, self._addresses):
            known.clear()

    def _add(self, place: Place, result: ValueRange, given: list[ValueRange], note: str) -> int:
        """The number of the finding, which may be known from an earlier step."""
        for number, (known, _) in enumerate(self.found):
            if (known.phase, *known[3:7]) == (place.phase, *place[3:7]):  # address, pass, operation, entry
                return number
        if len(self.found) >= _MOST:
            return _MOST
        record = NonFinite(
            phase=place.phase,
            label=None,
            operation=place.operation,
            module=place.address,
            source=place.source,
            result=result,
            inputs=tuple(given),
            step=place.step,
            note=note,
        )
        self.found.append((place, record))
        if self._stop:
            raise NonFiniteError(str(record))
        return len(self.found) - 1

    def finish(self, label_of: Callable[[int, int], str | None]) -> None:
        """Ends the last step, and gives the records their labels."""
        self._end()
        self.found = [
            (place, record if place.entry is None else replace(record, label=label_of(place.step, place.entry)))
            for place, record in self.found
        ]


def _pointer(tensor: torch.Tensor) -> int:
    if tensor.is_sparse or tensor.is_nested or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _named_tensors(inputs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of numbers among (args, kwargs), with what to call them."""
    args, kwargs = inputs
    for name, value in [*((f"argument {number}", arg) for number, arg in enumerate(args)), *(kwargs or {}).items()]:
        for path, tensor in _leaves(name, value):
            if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                yield (f"{path}{_PARAMETER}" if isinstance(tensor, torch.nn.Parameter) else path), tensor


def _constants(inputs: Any) -> Iterator[Any]:
    args, kwargs = inputs
    for value in (*args, *(kwargs or {}).values()):
        for _, leaf in _leaves("", value):
            yield leaf


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(f"{name}[{number}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}[{key!r}]", item)
    else:
        yield name, value


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
