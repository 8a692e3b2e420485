"""Something that is wrong with a model, or worth knowing: the place, the number, and what to do."""

import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

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


class Findings(list[Finding]):
    """The findings, the worst first; prints as readable text.

    >>> [finding.where for finding in profile.findings() if finding.kind == 'dead units']
    """

    def __init__(self, found: Iterable[Finding], notes: Iterable[str] = ()) -> None:
        super().__init__(sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity)))
        self.notes = list(notes)  # what was not looked at

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
