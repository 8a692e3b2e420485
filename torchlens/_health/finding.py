"""Something that is wrong with a model, or worth knowing: the place, the number, and what to do."""

import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to look at."""

    kind: str
    severity: str  # 'error', 'warning' or 'info'
    where: str  # the layer's label, or the address of a module or parameter
    module: str  # the address of the module
    number: float
    threshold: float | None  # what the number was held against
    text: str
    advice: str

    @property
    def place(self) -> str:
        """The place as text: a layer with its module."""
        is_told = not self.module or self.where.startswith(self.module) or self.where == self.module
        return self.where if is_told else f"{self.where} in module {self.module!r}"

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind} at {self.place}: {self.text} {self.advice}".rstrip()


@dataclass(frozen=True, slots=True)
class RunFinding:
    """A finding, and at which step it began to hold; with `is_over`, from which step on it holds no
    longer.
    """

    step: int
    finding: Finding
    is_over: bool = False

    @property
    def module(self) -> str:
        """The address of the module."""
        return self.finding.module

    @property
    def kind(self) -> str:
        """What it is: 'dead units', 'vanishing gradient', ..."""
        return self.finding.kind

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        found = {name: _plain(value) for name, value in asdict(self.finding).items()}
        return {"step": self.step, "is_over": self.is_over, **found}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "RunFinding":
        """From the file. ValueError if it is none."""
        texts = ("kind", "severity", "where", "module", "text", "advice")
        number, limit, step = value.get("number"), value.get("threshold"), value.get("step")
        if (
            not all(isinstance(value.get(name), str) for name in texts)
            or not isinstance(number, int | float)
            or not isinstance(limit, int | float | None)
            or not isinstance(step, int)
        ):
            raise ValueError("a finding without its parts")
        finding = Finding(
            **{name: value[name] for name in texts}, number=float(number), threshold=limit
        )
        return RunFinding(step, finding, bool(value.get("is_over")))

    def __str__(self) -> str:
        return f"step {self.step}: {'over: ' if self.is_over else ''}{self.finding}"


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


class Findings(list[Finding]):
    """The findings, the worst first; prints as readable text.

    >>> [finding.where for finding in profile.findings() if finding.kind == 'dead units']
    """

    def __init__(self, found: Iterable[Finding], notes: Iterable[str] = ()) -> None:
        super().__init__(sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity)))
        self.notes = list(notes)  # what was not checked

    def __str__(self) -> str:
        width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
        number = len(self)
        lines = [f"{number} finding{'s' * (number != 1)}{':' if number else '.'}"]
        for finding in self:
            lines.append(f"{finding.severity}: {finding.kind} at {finding.place}")
            for text in (finding.text, finding.advice):
                for line in text.splitlines():
                    indent = "    " + " " * (len(line) - len(line.lstrip()))
                    lines += textwrap.wrap(
                        line.strip(), width, initial_indent=indent, subsequent_indent=indent
                    )
        for note in self.notes:
            lines += textwrap.wrap(f"- {note}", width, subsequent_indent="  ")
        return "\n".join(lines)

    __repr__ = __str__
