"""What the caller of `profile` asked for, checked once, before anything is measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torchlens._health.thresholds import checked_thresholds
from torchlens._text.wording import check_choice, check_count, got

Level: TypeAlias = Literal["module", "operation"]
Check: TypeAlias = Literal["nonfinite", "health"]

Role: TypeAlias = Literal["skip", "warmup", "measure"]

LEVELS: tuple[str, ...] = get_args(Level)
CHECKS: tuple[str, ...] = get_args(Check)
# How often to time a model that is given inputs, unless said otherwise.
_REPEATS = 5
# Times of operations are means of these.
_MOST_DETAILED_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options of `profile`; see there."""

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
        check_choice("level", self.level, LEVELS, or_none=True)
        check_choice("check", self.check, CHECKS, or_none=True)
        for name in ("stop", "memory"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {got(getattr(self, name))}.")
        if self.backward is not None and not isinstance(self.backward, bool):
            raise TypeError(
                "backward must be True, False, or None (if something requires a gradient), got "
                f"{got(self.backward)}."
            )
        if self.stop and self.check is None:
            raise ValueError(
                "stop=True stops at the first NaN or Inf, so it needs a check: check='nonfinite'."
            )
        for name, least in (
            ("warmup", 0),
            ("repeats", 1),
            ("max_steps", 1),
            ("skip", 0),
            ("measure", 1),
            ("every", 1),
        ):
            value = getattr(self, name)
            if value is None and name in ("warmup", "measure", "every"):
                continue
            check_count(name, value, least)
        if self.thresholds is not None and not isinstance(self.thresholds, Mapping):
            raise TypeError(
                f"thresholds must be a dict such as {{'dead_share': 0.5}}, or None, got "
                f"{got(self.thresholds)}."
            )
        checked_thresholds(self.thresholds)
        # A value is checked where it is made: an operation says more than a module.
        object.__setattr__(
            self, "level", self.level or ("module" if self.check is None else "operation")
        )
        object.__setattr__(
            self, "warmup", (2 if self.has_inputs else 0) if self.warmup is None else self.warmup
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
        if self.measure is not None and self.every is None:
            raise ValueError(
                "measure is how many steps out of `every` to measure; give both: measure=5, "
                "every=100."
            )
        if self.every is not None and self.every < self.warmup + (self.measure or 1):
            raise ValueError(
                f"every must be at least warmup + measure ({self.warmup} + {self.measure or 1}), "
                f"got {self.every}."
            )

    @property
    def num_detailed_runs(self) -> int:
        """With inputs: how many runs are made for memory, FLOPs, operations and checks, beside
        those that are timed.
        """
        return min(self.repeats, _MOST_DETAILED_RUNS) if self.level == "operation" else 1

    @property
    def num_runs(self) -> int:
        """With inputs: how many runs are made in all."""
        return int(self.warmup + self.num_detailed_runs + self.repeats)

    def role_of(self, position: int) -> "Role":
        """What is done with the step at that position of the loop, 1 = first."""
        number = position - self.skip - 1
        if number < 0:
            return "skip"
        if self.every is None:
            return "warmup" if number < self.warmup else "measure"
        number %= self.every
        measure = self.measure or 1
        return (
            "warmup"
            if number < self.warmup
            else "measure"
            if number < self.warmup + measure
            else "skip"
        )
