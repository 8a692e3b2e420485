"""The options of `profile`, and what they mean for each step."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from torchlens._health.checking import Checking
from torchlens._health.thresholds import checked_thresholds
from torchlens._profile.records import MOST_KINDS, Signature
from torchlens._text.error_wording import check_choice, check_count, got

Level: TypeAlias = Literal["module", "operation"]
Check: TypeAlias = Literal["nonfinite", "health"]
Role: TypeAlias = Literal["skip", "warmup", "measure"]

# How often to time a model that is given inputs, unless the caller asks for another number.
_REPEATS = 5
# Times of operations are means of these.
_MOST_DETAILED_RUNS = 3
_FLAGS = {
    "stop": "True or False",
    "memory": "True or False",
    "backward": "True, False, or None (if something requires a gradient)",
}
# The least number, and whether it may be None.
_COUNTS = {
    "warmup": (0, True),
    "repeats": (1, False),
    "max_steps": (1, False),
    "skip": (0, False),
    "measure": (1, True),
    "every": (1, True),
}
# Numbers of the steps of one kind, from 0: detailed and light ones alternate at first.
_FIRST_DETAILED = (0, 2, 4)
_NUM_ALTERNATING = 8  # at operation level; five of these are light


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options of `profile`; see there. Checked once, before anything is measured."""

    level: Any = None
    check: Any = None
    stop: Any = False
    memory: Any = True
    backward: Any = None
    warmup: Any = None
    repeats: Any = _REPEATS
    max_steps: Any = 100
    skip: Any = 0
    measure: Any = None
    every: Any = None
    thresholds: Any = None
    has_inputs: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        # A check says more at operation level: which operation made a value.
        level = self.level or ("module" if self.check is None else "operation")
        object.__setattr__(self, "level", level)
        if self.warmup is None:
            object.__setattr__(self, "warmup", 2 if self.has_inputs else 0)
        self._check_together()

    def _check_types(self) -> None:
        check_choice("level", self.level, get_args(Level), or_none=True)
        check_choice("check", self.check, get_args(Check), or_none=True)
        for name, words in _FLAGS.items():
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and "None" in words):
                raise TypeError(f"{name} must be {words}, got {got(value)}.")
        for name, (least, may_be_none) in _COUNTS.items():
            value = getattr(self, name)
            if not (value is None and may_be_none):
                check_count(name, value, least)
        if self.thresholds is not None:
            self._check_thresholds()

    def _check_thresholds(self) -> None:
        if not isinstance(self.thresholds, Mapping):
            raise TypeError(
                f"thresholds must be a dict such as {{'dead_share': 0.5}}, or None, got "
                f"{got(self.thresholds)}."
            )
        checked_thresholds(self.thresholds)

    def _check_together(self) -> None:
        if self.stop and self.check is None:
            raise ValueError(
                "stop=True stops at the first NaN or Inf, so it needs a check: check='nonfinite'."
            )
        if self.has_inputs and (self.skip or self.measure or self.every):
            raise ValueError(
                "skip, measure and every are for a loop of your own; with inputs, use warmup and "
                "repeats."
            )
        if not self.has_inputs and (self.backward is not None or self.repeats != _REPEATS):
            raise ValueError(
                "repeats and backward need inputs: profile(model, x, repeats=3). Your own loop "
                "decides both."
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        num_measured = self.measure or 1
        if self.measure is not None and self.every is None:
            raise ValueError(
                "measure is how many steps out of `every` to measure; give both: measure=5, "
                "every=100."
            )
        if self.every is not None and self.every < self.warmup + num_measured:
            raise ValueError(
                f"every must be at least warmup + measure ({self.warmup} + {num_measured}), got "
                f"{self.every}."
            )

    @property
    def is_operation_level(self) -> bool:
        return bool(self.level == "operation")

    @property
    def num_detailed_runs(self) -> int:
        """With inputs: how many runs measure memory, FLOPs, operations and values."""
        return min(self.repeats, _MOST_DETAILED_RUNS) if self.is_operation_level else 1

    @property
    def num_runs(self) -> int:
        """With inputs: how many runs are made in all."""
        return int(self.warmup + self.num_detailed_runs + self.repeats)

    def role_of(self, position: int) -> Role:
        """What to do with the step at that position of the loop, 1 = first."""
        number = position - self.skip - 1
        if number < 0:
            return "skip"
        if self.every is not None:
            number %= self.every
        if number < self.warmup:
            return "warmup"
        if self.every is None or number < self.warmup + (self.measure or 1):
            return "measure"
        return "skip"


class Wanted(NamedTuple):
    """What to measure in a step besides times."""

    memory: bool
    log: bool
    checking: Checking


class StepPlan:
    """Decides what to measure in each step.

    In a light step, only clocks are read: times come from these. In a detailed step, memory is
    measured, operations are logged and values are checked, all of which make it slower. Steps of
    one kind (training or not, with gradients or not, input shapes) alternate, a detailed one first:

    - at module level until three were detailed; all later steps are light;
    - at operation level until three were detailed and five light; all later steps are detailed, so
      that checks miss little;
    - never with `stop=True` at operation level, because only a detailed step knows which operation
      made the first NaN.
    """

    def __init__(self, options: ProfileOptions) -> None:
        self._options = options
        self._num_runs = 0
        # By phase (training, gradients): how many steps of each kind there were.
        self._counts: dict[tuple[bool, bool], Counter[Signature | None]] = {}
        self._kind: Signature | None = None  # of the last step
        checking = Checking.NONFINITE if options.is_operation_level else Checking.EVERYTHING
        self._light = Wanted(memory=False, log=False, checking=checking)

    def wanted(self, signature: Signature, is_warmup: bool, is_compiled: bool) -> Wanted:
        """What to measure in the step that begins."""
        options = self._options
        if options.has_inputs:
            return self._wanted_of_run(is_warmup)
        if is_warmup:
            return Wanted(options.memory, options.is_operation_level, Checking.EVERYTHING)
        counts = self._counts.setdefault(signature[:2], Counter())
        # Of inputs with many shapes, all shapes but the first few are one kind.
        if signature in counts or len(counts) < MOST_KINDS:
            self._kind = signature
        else:
            self._kind = None
        number = counts[self._kind]
        counts[self._kind] += 1
        if self._is_detailed(number, is_compiled):
            has_memory = options.memory and number <= _FIRST_DETAILED[-1]
            return Wanted(has_memory, True, Checking.EVERYTHING)
        return self._light

    def repeat(self, signature: Signature) -> None:
        """The step raised: measures the same in the next one of its kind."""
        if self._kind in self._counts.get(signature[:2], ()):
            self._counts[signature[:2]][self._kind] -= 1

    def _is_detailed(self, number: int, is_compiled: bool) -> bool:
        options = self._options
        if options.is_operation_level:
            # The log runs the source of a compiled model, so light steps would time something else.
            is_always = options.stop or is_compiled or number >= _NUM_ALTERNATING
            return is_always or number in _FIRST_DETAILED
        if options.memory:
            return number in _FIRST_DETAILED
        return number == 0 and not is_compiled

    def _wanted_of_run(self, is_warmup: bool) -> Wanted:
        """With inputs: all runs are alike, so the timed ones come first, then the detailed ones."""
        if is_warmup:
            return Wanted(False, False, Checking.NOTHING)
        self._num_runs += 1
        number = self._num_runs - self._options.repeats
        if number < 1:
            return Wanted(False, False, Checking.NOTHING)
        return Wanted(self._options.memory and number == 1, True, Checking.EVERYTHING)
