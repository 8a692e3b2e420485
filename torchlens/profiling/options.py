"""What the caller of `profile` asked for, checked once, before anything is measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CHECKS", "LEVELS", "ProfileOptions"]

LEVELS = ("module", "operation")
CHECKS = ("nonfinite", "health")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options of `profile`; see there."""

    level: Any = None
    check: Any = None
    stop: Any = False
    memory: Any = True
    backward: Any = None
    warmup: Any = None
    repeats: Any = 5
    max_steps: Any = 100
    thresholds: Any = None
    has_inputs: bool = False

    def __post_init__(self) -> None:
        if self.level is not None and self.level not in LEVELS:
            raise ValueError(f"level is 'module' or 'operation', not {self.level!r}.")
        if self.check is not None and self.check not in CHECKS:
            raise ValueError(f"check is None, 'nonfinite' or 'health', not {self.check!r}.")
        for name in ("stop", "memory"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is True or False, not {getattr(self, name)!r}.")
        if self.backward is not None and not isinstance(self.backward, bool):
            raise TypeError(f"backward is True, False, or None (if something requires a gradient), not {self.backward!r}.")
        if self.stop and self.check is None:
            raise ValueError("stop=True stops at the first NaN or Inf, so it needs a check: check='nonfinite'.")
        for name, least in (("warmup", 0), ("repeats", 1), ("max_steps", 1)):
            value = getattr(self, name)
            if value is None and name == "warmup":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is a whole number, not {value!r}.")
            if value < least:
                raise ValueError(f"{name} is at least {least}, not {value}.")
        if self.thresholds is not None and not isinstance(self.thresholds, Mapping):
            raise TypeError(f"thresholds is a dict such as {{'dead_share': 0.5}}, or None, not {self.thresholds!r}.")
        # A value is checked where it is made: an operation says more than a module.
        object.__setattr__(self, "level", self.level or ("module" if self.check is None else "operation"))
        object.__setattr__(self, "warmup", (2 if self.has_inputs else 0) if self.warmup is None else self.warmup)
