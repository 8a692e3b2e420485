"""What a validation found: text for people, fields for programs."""

from collections import Counter
from dataclasses import dataclass, field

# The checks, in the order they are made.
CHECKS = ("outputs", "calls", "arguments", "replay", "dependence", "completeness")

# Above this many lines of one kind, printing shows the first ones and counts the rest.
_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with the log: which check, which layer, what was expected and what
    was found.

    `layer` is a label; it is empty if the finding is about the pass as a whole.
    """

    check: str
    layer: str
    expected: str
    found: str

    def __str__(self) -> str:
        place = f" {self.layer}:" if self.layer else ""
        return f"[{self.check}]{place} expected {self.expected}; found {self.found}"


@dataclass(frozen=True, slots=True)
class NotShown:
    """One claim of the log that could be neither shown nor refuted, which is not a failure.

    `argument` is the place of the argument in question (`0`, `"mask"`, `(0, 1)`), and `reason` says
    what was tried.
    """

    check: str
    layer: str
    argument: object
    reason: str

    def __str__(self) -> str:
        return f"[{self.check}] {self.layer}, argument {self.argument}: {self.reason}"


@dataclass(slots=True)
class ValidationReport:
    """The outcome of a validation; true in a condition if nothing was found.

    `num_checked` counts what each check looked at, `not_shown` lists what could not be decided,
    `exemptions` counts what was not checked, by check and reason, and `seconds` says where the time
    went.

    >>> report = validate_forward_pass(model, x)
    >>> report.passed, report.findings, report.not_shown
    """

    model_name: str
    findings: list[Finding] = field(default_factory=list)
    not_shown: list[NotShown] = field(default_factory=list)
    num_checked: Counter[str] = field(default_factory=Counter)
    exemptions: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return f"<ValidationReport of {self.model_name}: {self._verdict()}>"

    def __str__(self) -> str:
        lines = [f"Validation of {self.model_name}: {self._verdict()}"]
        for check in CHECKS:
            found = [str(finding) for finding in self.findings if finding.check == check]
            unshown = [str(item) for item in self.not_shown if item.check == check]
            verdict = "nothing found" if not found else _counted(len(found), "finding")
            if unshown:
                verdict += f", {len(unshown)} could not be shown"
            lines.append(f"  {check:<13}{self.num_checked[check]:>7} checked, {verdict}")
            lines += _shown(found, "findings")
            lines += _shown(unshown, "not_shown", "could not be shown: ")
            lines += [
                f"    {count} not checked: {reason}"
                for (name, reason), count in self.exemptions.items()
                if name == check
            ]
        if self.seconds:
            lines.append(
                "  time         "
                + ", ".join(f"{name} {took:.2f} s" for name, took in self.seconds.items())
            )
        return "\n".join(lines)

    def _verdict(self) -> str:
        return "passed" if self.passed else f"FAILED, {_counted(len(self.findings), 'finding')}"


def _shown(items: list[str], field_name: str, head: str = "") -> list[str]:
    lines = [f"    {head}{item}" for item in items[:_MAX_SHOWN]]
    if len(items) > _MAX_SHOWN:
        lines.append(f"    ... and {len(items) - _MAX_SHOWN} more, in the report's {field_name}")
    return lines


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
