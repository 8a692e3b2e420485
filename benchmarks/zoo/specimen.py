"""One model of the zoo: its name, and how to make it with an input."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Absent", "Case", "Specimen"]


class Absent(Exception):  # noqa: N818 (it says what is the case, and is no mistake)
    """The installed version of a library does not have the model."""


@dataclass(slots=True)
class Case:
    """A model with the arguments to call it with."""

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Specimen:
    """A named recipe. `is_recurrent` is what the log must say, where a person knows it."""

    source: str
    short_name: str
    make: Callable[[], Case]
    is_recurrent: bool | None = None

    @property
    def name(self) -> str:
        return f"{self.source}/{self.short_name}"
