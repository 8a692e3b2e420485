"""The rules for NaN and Inf: which operation made them, what was intended, and what is a
consequence.

- NaN is always a finding. Infinity is often intended: a constant among the arguments
  (`masked_fill(mask, -inf)`), a mask that is an input, a buffer or an attribute. Intended infinity
  is no finding, nor is an operation that only passes it on.
- A result is a consequence if something that it was computed from is a finding. Only the first
  operation is reported.
- If an operation makes NaN from an intended infinity, that operation is the finding.
- Infinity in the data (an input that is no mask) is a finding of the data: +Inf at once, -Inf as
  soon as NaN results from it.
- A number that the model's code reads from a tensor (`.item()`) comes back as a constant: NaN or
  +Inf among the arguments is a consequence if a tensor of one element had that value before.
- A parameter or a tensor from outside the pass that was not finite before is reported at the first
  operation that reads it. Further parameters belong to the same finding, because as a rule one
  optimizer step changed them all.
- A gradient is a finding of the operation whose backward made it from finite ones, unless the
  operation had read a value that is a finding, or infinity in the data. A gradient that arrived
  so came from outside: from the loss, or from a hook.

Values are identified by their numbers in the recording, never by their memory, which is reused.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from torchlens._health.tensor_statistics import (
    ValueRange,
    has_nonfinite,
    has_numbers,
    has_plus_infinity,
    value_range,
)
from torchlens._recording.operation_kinds import SAME_NUMBERS, UNINITIALISED

FROM_OUTSIDE = "It was made outside the model's operations: by the loss, or by a hook on a tensor."
_BROKEN_BEFORE = "Not finite before: {names}. {hint}"
HINT = "A likely cause is an optimizer step with gradients that were not finite."
_MINUS_INFINITY = (
    "Minus infinity may be a mask or the logarithm of 0: level='operation' shows which."
)
_CONSTANT = "A constant among its arguments is NaN."
_MASKED = (
    "It made NaN from an intended Inf. A row that is masked entirely has no value left: skip such "
    "rows."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """An operation whose result has a NaN or Inf that its inputs do not explain.

    >>> print(history.first_nonfinite())
    """

    phase: str  # 'forward' or 'backward'
    label: str | None  # the layer; None where there is no log
    operation: str  # the layer type, or in backward the name of autograd's node
    module: str  # the address of the module it ran in, '' for the model itself
    source: str | None  # the user's line
    result: ValueRange
    inputs: tuple[ValueRange, ...]
    step: int | None = None  # of a profile
    note: str = ""  # further explanation
    num_unchecked: int = 0  # entries that could not be checked: not saved, or without values
    is_certain: bool = (
        True  # False: minus infinity, of which only the operations could tell whether it is meant
    )
    is_from_outside: bool = (
        False  # a gradient that was not finite when it arrived: the loss made it, or a hook
    )

    @property
    def num_nan(self) -> int:
        return self.result.num_nan

    @property
    def num_inf(self) -> int:
        return self.result.num_inf

    def __str__(self) -> str:
        what = "NaN" if self.num_nan else "Inf"
        step = "" if self.step is None else f" of step {self.step}"
        lines = [f"{what} in the {self.phase} pass{step}: {self._origin_text()}"]
        if self.source:
            lines.append(f"    called at {self.source}")
        lines.append(f"    {self.result}")
        lines += [f"    {each}" for each in self.inputs]
        if self.note:
            lines.append(f"    {self.note}")
        if self.num_unchecked:
            lines.append(
                f"    ({self.num_unchecked} entries are not saved, or have no values, and were not "
                "checked)"
            )
        return "\n".join(lines)

    def _origin_text(self) -> str:
        """`made by log_1_20 (log), in module 'entropy'`."""
        if self.operation in ("input", "buffer"):
            name = self.label or self.operation
            return name + (f" of {self.module!r}" if self.module else "")
        made = "it arrived at" if self.is_from_outside else "made by"
        name = f"{self.label} ({self.operation})" if self.label else self.operation
        place = f"in module {self.module!r}" if self.module else "in the model itself"
        return f"{made} {name}, {place}"


class Given(NamedTuple):
    """A tensor that an operation was given."""

    node: (
        int | None
    )  # its number: that of an entry, or -1 - k outside the log; None if it is not known
    name: str
    tensor: (
        torch.Tensor | None
    )  # None if it does not exist any more; without a number either, it is from elsewhere
    is_parameter: bool = False
    is_buffer: bool = False


class NonFiniteOrigin(NamedTuple):
    """A value in which NaN or Inf first occurred. `number` counts the origins of a pass."""

    number: int
    node: int
    result: ValueRange
    inputs: tuple[ValueRange, ...]
    note: str


class _Why(Enum):
    ASKED = "intended"
    SUSPECT = "minus infinity that may be intended, from which no NaN has resulted yet"
    FOUND = "a finding, or a consequence of one"


class _Cause(NamedTuple):
    why: _Why
    origins: frozenset[int] = frozenset()


class _Source(NamedTuple):
    """An input, or the result of a module, that holds minus infinity."""

    node: int
    result: ValueRange
    note: str


@dataclass(slots=True)
class _Evidence:
    """What is known about the arguments of an operation that are not finite."""

    whys: set[_Why] = field(default_factory=set)
    origins: set[int] = field(default_factory=set)
    suspects: list[_Source] = field(default_factory=list)
    broken: list[Given] = field(default_factory=list)  # from outside the pass, broken before
    is_any_bad: bool = False

    @property
    def is_consequence(self) -> bool:
        return bool(self.origins) or _Why.FOUND in self.whys

    def add(self, cause: _Cause, suspect: _Source | None) -> None:
        """Adds an argument with a known cause."""
        self.whys.add(cause.why)
        if cause.why is _Why.FOUND:
            self.origins |= cause.origins
        if suspect is not None:
            self.suspects.append(suspect)


def _is_from_outside(given: Given) -> bool:
    """Whether it is no result of the pass: a parameter, or a tensor from elsewhere."""
    return given.node is None or given.node < 0


def _is_learnable(given: Given) -> bool:
    return given.is_parameter and given.tensor is not None and given.tensor.requires_grad


class Origins:
    """Finds the values of one pass in which NaN and Inf first occur, in order.

    `is_state_known`: broken parameters and buffers are a consequence of an earlier finding. `hint`
    is the advice for parameters that were broken before, `hint_of_fixed` for buffers and parameters
    that do not learn. With `sees_modules_alone`, the operations here are whole modules: minus
    infinity that a module returns may be a mask or the logarithm of 0, and is a finding only if NaN
    results from it.
    """

    def __init__(
        self,
        include_constants: bool = False,
        is_state_known: bool = False,
        sees_modules_alone: bool = False,
        hint: str = HINT,
        hint_of_fixed: str = HINT,
    ) -> None:
        self.found: list[NonFiniteOrigin] = []
        self._include_constants = include_constants
        self._is_state_known = is_state_known
        self._sees_modules_alone = sees_modules_alone
        self._hint = hint
        self._hint_of_fixed = hint_of_fixed
        self._causes: dict[int, _Cause] = {}
        self._suspects: dict[int, _Source] = {}
        self._outputs: set[int] = set()
        self._numbers: dict[
            str, _Cause
        ] = {}  # 'nan', 'inf' → why the last tensor of one element was so
        self._broken_parameters: int | None = None  # the origin that reports them
        self._is_state_broken = False  # whether known broken state has had consequences
        self._in_gradients: set[int] = set()  # origins that made gradients that are not finite

    @property
    def is_clean(self) -> bool:
        """Whether everything was finite so far."""
        return not self._causes

    def add_source(
        self, node: int, name: str, tensor: torch.Tensor, is_input: bool
    ) -> NonFiniteOrigin | None:
        """An input or a buffer."""
        if not has_nonfinite(tensor):
            return None
        origin = self._judge_source(node, name, tensor, is_input)
        self._note_number(node, tensor)
        return origin

    def _judge_source(
        self, node: int, name: str, tensor: torch.Tensor, is_input: bool
    ) -> NonFiniteOrigin | None:
        if self._is_state_known and not is_input and _is_no_mask(tensor):
            self._causes[node] = _Cause(_Why.FOUND)
            self._is_state_broken = True
            return None
        result = value_range(name, tensor)
        note = f"It was given to the model: {name}."
        if result.num_nan or self._include_constants:
            return self._add(node, result, (), note)
        if not is_input or _looks_like_mask(tensor, result):
            self._causes[node] = _Cause(_Why.ASKED)
        elif has_plus_infinity(tensor):
            return self._add(node, result, (), note)
        else:
            self._causes[node] = _Cause(_Why.SUSPECT)
            self._suspects[node] = _Source(node, result, note)
        return None

    def add_result(
        self,
        node: int,
        operation: str,
        tensor: torch.Tensor,
        given: Callable[[], Sequence[Given]],
        constants: Callable[[], Iterable[float]],
        first: int | None = None,
    ) -> NonFiniteOrigin | None:
        """An operation made `tensor`. `given` and `constants` are called only if needed.

        If the operation makes several tensors, `first` is the first of them: it is reported once.
        """
        if operation in SAME_NUMBERS and self.is_clean and not any(map(_is_from_outside, given())):
            return None
        if operation in UNINITIALISED or not has_nonfinite(tensor):
            return None
        origin = self._judge(node, tensor, given, constants, first)
        self._note_number(node, tensor)
        return origin

    def _judge(
        self,
        node: int,
        tensor: torch.Tensor,
        given: Callable[[], Sequence[Given]],
        constants: Callable[[], Iterable[float]],
        first: int | None,
    ) -> NonFiniteOrigin | None:
        """Decides whether a result that is not finite is new, a consequence, or asked for."""
        sibling = None if first is None else self._found_between(first, node)
        if sibling is not None:
            self.hand_on(sibling, node)
            return None
        everything, numbers = given(), list(constants())
        evidence = self._evidence(each for each in everything if self._is_bad(each))
        result = value_range("result", tensor)
        if evidence.broken:
            return self._blame_broken(node, result, everything, evidence)
        cause = self._known_cause(evidence, numbers)
        if cause is not None:
            self._causes[node] = cause
            return None
        if self._is_asked_for(tensor, result, everything, numbers):
            evidence.whys.add(_Why.ASKED)
        if result.num_nan:
            return self._judge_nan(node, result, everything, evidence, numbers)
        return self._judge_infinity(node, tensor, result, everything, evidence)

    def _found_between(self, first: int, node: int) -> int | None:
        """An origin among the results that the same operation made before `node`."""
        return next((each.node for each in self.found if first <= each.node < node), None)

    def _known_cause(self, evidence: _Evidence, numbers: Iterable[float]) -> _Cause | None:
        """The cause of a result that follows from something found before; None if it is new."""
        if evidence.is_consequence:
            return _Cause(_Why.FOUND, frozenset(evidence.origins))
        return next((self._numbers[key] for key in map(str, numbers) if key in self._numbers), None)

    def _is_asked_for(
        self,
        tensor: torch.Tensor,
        result: ValueRange,
        given: Iterable[Given],
        numbers: Iterable[float],
    ) -> bool:
        """Whether infinity is among the constants, or a tensor that is not known may be a mask."""
        if self._include_constants:
            return False
        is_unknown = any(each.node is None and each.tensor is None for each in given)
        is_mask = is_unknown and _is_minus_infinity(tensor, result)
        return is_mask or any(map(math.isinf, numbers))

    def _judge_nan(
        self,
        node: int,
        result: ValueRange,
        given: Sequence[Given],
        evidence: _Evidence,
        numbers: Iterable[float],
    ) -> NonFiniteOrigin:
        """NaN is always a finding."""
        if any(map(math.isnan, numbers)):
            return self._add(node, result, given, _CONSTANT)
        if evidence.suspects:
            return self._blame_source(node, evidence.suspects[0])
        return self._add(node, result, given, _MASKED if evidence.whys else "")

    def _judge_infinity(
        self,
        node: int,
        tensor: torch.Tensor,
        result: ValueRange,
        given: Sequence[Given],
        evidence: _Evidence,
    ) -> NonFiniteOrigin | None:
        """Infinity is a finding if no argument explains it; of a module, only if NaN comes of it or
        it reaches an output.
        """
        if evidence.whys:
            self._hand_on_infinity(node, evidence)
            return None
        is_minus_infinity = _is_minus_infinity(tensor, result)
        if self._sees_modules_alone and is_minus_infinity and not evidence.is_any_bad:
            self._causes[node] = _Cause(_Why.SUSPECT)
            self._suspects[node] = _Source(node, result, _MINUS_INFINITY)
            return None
        return self._add(node, result, given, "")

    def _evidence(self, bad: Iterable[Given]) -> _Evidence:
        """What is known of the arguments that are not finite."""
        evidence, unknown = _Evidence(), []
        for each in bad:
            evidence.is_any_bad = True
            if each.node is None or each.node not in self._causes:
                unknown.append(each)
            else:
                evidence.add(self._causes[each.node], self._suspects.get(each.node))
        is_explained = _Why.FOUND in evidence.whys
        for each in unknown:
            if self._is_known_state(each):
                evidence.whys.add(_Why.FOUND)
                self._is_state_broken = True
            elif each.is_parameter:
                self._add_parameter(evidence, each)
            elif not is_explained or self.found or self._is_state_broken:
                # If the result is explained, this tensor may have changed together with it, like
                # the running mean of a normalisation.
                self._add_from_elsewhere(evidence, each)
        return evidence

    def _is_known_state(self, given: Given) -> bool:
        """Whether it is a broken parameter or buffer that was reported before this pass."""
        is_state = given.is_parameter or given.is_buffer
        return self._is_state_known and is_state and self._is_broken(given)

    def _add_parameter(self, evidence: _Evidence, given: Given) -> None:
        if self._broken_parameters is None:
            evidence.broken.append(given)
        else:
            evidence.origins.add(self._broken_parameters)

    def _add_from_elsewhere(self, evidence: _Evidence, given: Given) -> None:
        """Adds a tensor that no known operation of the pass made. If there is a finding, the tensor
        was, as a rule, written through another one.
        """
        if self.found:
            evidence.origins.add(self.found[-1].number)
        elif self._is_state_broken:
            evidence.whys.add(_Why.FOUND)
        elif self._suspects:
            evidence.whys.add(_Why.SUSPECT)
            evidence.suspects.append(next(reversed(self._suspects.values())))
        elif self._is_broken(given):
            evidence.broken.append(given)
        else:
            evidence.whys.add(_Why.ASKED)

    def _blame_broken(
        self, node: int, result: ValueRange, given: Sequence[Given], evidence: _Evidence
    ) -> NonFiniteOrigin:
        """Reports parameters, or tensors from elsewhere, that were broken before."""
        broken = evidence.broken
        names = ", ".join(each.name for each in broken)
        hint = self._hint if any(map(_is_learnable, broken)) else self._hint_of_fixed
        note = _BROKEN_BEFORE.format(names=names, hint=hint)
        origin = self._add(node, result, given, note, frozenset(evidence.origins))
        if any(each.is_parameter for each in broken):
            self._broken_parameters = origin.number
        return origin

    def _hand_on_infinity(self, node: int, evidence: _Evidence) -> None:
        """The result is infinite because an argument is, which is or may be intended."""
        why = _Why.SUSPECT if _Why.SUSPECT in evidence.whys else _Why.ASKED
        self._causes[node] = _Cause(why)
        if evidence.suspects:
            self._suspects[node] = evidence.suspects[0]

    def add_gradient(self, read: Iterable[int]) -> tuple[bool, NonFiniteOrigin | None]:
        """The backward of an operation that read these values made a gradient that is not finite,
        from finite ones.

        Returns whether one of the values is the cause, and its origin if it was not reported yet.
        """
        causes = [(node, self._causes[node]) for node in read if node in self._causes]
        found = [cause for _, cause in causes if cause.why is _Why.FOUND]
        if found:
            self._in_gradients.update(*(cause.origins for cause in found))
            return True, None
        suspect = next((self._suspects[node] for node, _ in causes if node in self._suspects), None)
        if suspect is None:
            return False, None
        origin = self._blame_source(suspect.node, suspect)
        self._in_gradients.add(origin.number)
        return True, origin

    def hand_on(self, node: int, to: int) -> None:
        """Value `to` has the cause of `node`."""
        if node in self._causes:
            self._causes[to] = self._causes[node]
        if node in self._suspects:
            self._suspects[to] = self._suspects[node]

    def add_unseen(self, node: int, parents: Iterable[int]) -> None:
        """A result without values to check: it may pass on a finding."""
        causes = [self._causes[parent] for parent in parents if parent in self._causes]
        origins = frozenset().union(*(cause.origins for cause in causes))
        if origins:
            self._causes[node] = _Cause(_Why.FOUND, origins)

    def add_suspected_outputs(self) -> list[NonFiniteOrigin]:
        """The pass is over: reports modules whose minus infinity reached an output."""
        suspects = [self._suspects[node] for node in self._outputs if node in self._suspects]
        found = []
        for source in dict.fromkeys(suspects):
            cause = self._causes[source.node]
            if source.note == _MINUS_INFINITY and cause.why is _Why.SUSPECT:
                found.append(self._add(source.node, source.result, (), source.note))
                self._causes[source.node] = cause
        return found

    def is_unheard_of(self, tensor: torch.Tensor) -> bool:
        """Whether a value of unknown origin has NaN or +Inf that no finding can have caused."""
        return (
            not (self.found or self._is_state_broken or self._suspects)
            and has_nonfinite(tensor)
            and _is_no_mask(tensor)
        )

    def add_output(self, node: int | None) -> None:
        """The model returned this value."""
        if node is not None:
            self._outputs.add(node)

    def lasting(self) -> set[int]:
        """The numbers of the origins that reached an output or a gradient; all if there is no
        output.
        """
        if not self._outputs:
            return {origin.number for origin in self.found}
        causes = [self._causes[node] for node in self._outputs if node in self._causes]
        return self._in_gradients.union(*(cause.origins for cause in causes))

    @property
    def is_output_broken(self) -> bool:
        """Whether an output is not finite and not intended to be so; without an output, whether
        there is any finding.
        """
        if not self._outputs:
            return bool(self.found)
        return any(
            self._causes[node].why is _Why.FOUND for node in self._outputs if node in self._causes
        )

    def _note_number(self, node: int, tensor: torch.Tensor) -> None:
        """Notes a tensor of one element: the model's code may read it and compute with the number,
        and in Python infinity easily becomes NaN.
        """
        cause = self._causes.get(node)
        if cause is not None and cause.why is _Why.FOUND and tensor.numel() == 1:
            self._numbers["nan"] = cause
            if has_plus_infinity(tensor):
                self._numbers["inf"] = cause

    def _is_bad(self, given: Given) -> bool:
        if given.tensor is None:
            return given.node is not None and given.node in self._causes
        return has_nonfinite(given.tensor)

    @staticmethod
    def _is_broken(given: Given) -> bool:
        """Whether a tensor that is no result of the pass is broken: a mask may be infinite."""
        assert given.tensor is not None
        return given.is_parameter or _is_no_mask(given.tensor)

    def _blame_source(self, node: int, source: _Source) -> NonFiniteOrigin:
        """NaN, in a value or a gradient, resulted from infinity in a source."""
        origin = self._add(source.node, source.result, (), f"{source.note} NaN resulted from it.")
        self._causes[node] = self._causes[source.node]
        return origin

    def _add(
        self,
        node: int,
        result: ValueRange,
        given: Sequence[Given],
        note: str,
        also: frozenset[int] = frozenset(),
    ) -> NonFiniteOrigin:
        """A new origin; `also` are others that its result is a consequence of."""
        ranges = [
            value_range(name, tensor)
            for _, name, tensor, is_parameter, is_buffer in given
            if tensor is not None
            and has_numbers(tensor)
            and (not (is_parameter or is_buffer) or has_nonfinite(tensor))
        ]
        origin = NonFiniteOrigin(len(self.found), node, result, tuple(ranges), note)
        self.found.append(origin)
        self._causes[node] = _Cause(_Why.FOUND, also | {origin.number})
        return origin


def numbers_in(value: Any) -> Iterator[float]:
    """The real numbers among arguments, also inside lists and dicts."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, dict):
        yield from numbers_in(list(value.values()))


def _is_minus_infinity(tensor: torch.Tensor, result: ValueRange) -> bool:
    """Whether all that is not finite is minus infinity."""
    return not (result.num_nan or has_plus_infinity(tensor))


def _is_no_mask(tensor: torch.Tensor) -> bool:
    """Whether it has NaN or +Inf, which a mask does not have."""
    return bool(value_range("", tensor).num_nan) or has_plus_infinity(tensor)


def _looks_like_mask(tensor: torch.Tensor, result: ValueRange) -> bool:
    """Whether an input is an additive mask: -Inf at the masked places, 0 elsewhere."""
    is_zero_elsewhere = result.low in (None, 0) and result.high in (None, 0)
    return is_zero_elsewhere and not has_plus_infinity(tensor)
