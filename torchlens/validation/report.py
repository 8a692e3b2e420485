"""What a validation found, for people and for programs."""

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["CHECKS", "Finding", "ValidationReport"]

# The five checks, in the order they are made.
CHECKS = ("outputs", "arguments", "replay", "dependence", "completeness")

# Above this many findings of one check, printing shows the first ones and counts the rest.
_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as the log says: which check, which layer, what was expected and what was found.

    `layer` is a label; empty where the finding is about the pass as a whole.
    """

    check: str
    layer: str
    expected: str
    found: str

    def __str__(self) -> str:
        place = f" {self.layer}:" if self.layer else ""
        return f"[{self.check}]{place} expected {self.expected}; found {self.found}"


@dataclass(slots=True)
class ValidationReport:
    """The outcome of a validation; true in a condition if nothing was found.

    `num_checked` counts what each check looked at, `exemptions` what it let pass unlooked at, by check and reason, and
    `seconds` where the time went.

    >>> report = validate_forward_pass(model, x)
    >>> report.passed, report.findings
    """

    model_name: str
    findings: list[Finding] = field(default_factory=list)
    num_checked: Counter[str] = field(default_factory=Counter)
    exemptions: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.findings

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return f"<ValidationReport of {self.model_name}: {self._verdict()}>"

    def __str__(self) -> str:
        lines = [f"Validation of {self.model_name}: {self._verdict()}"]
        for check in CHECKS:
            own = [finding for finding in self.findings if finding.check == check]
            verdict = "nothing found" if not own else "1 finding" if len(own) == 1 else f"{len(own)} findings"
            lines.append(f"  {check:<13}{self.num_checked[check]:>7} checked, {verdict}")
            lines += [f"    {finding}" for finding in own[:_MAX_SHOWN]]
            if len(own) > _MAX_SHOWN:
                lines.append(f"    ... and {len(own) - _MAX_SHOWN} more, in the report's findings")
            lines += [
                f"    {count} not checked: {reason}" for (name, reason), count in self.exemptions.items() if name == check
            ]
        if self.seconds:
            lines.append("  time         " + ", ".join(f"{name} {took:.2f} s" for name, took in self.seconds.items()))
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.passed:
            return "passed"
        return f"FAILED, {len(self.findings)} finding{'s' if len(self.findings) > 1 else ''}"
