"""The report of a validation, and the helpers that run its steps and add to it."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

from torchlens._recording.interruptions import interrupts
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._text.numbers import counted

T = TypeVar("T")

# The checks, in the order they are made.
CHECKS = ("outputs", "calls", "arguments", "replay", "dependence", "completeness")

# Above this many lines of one kind, printing shows the first ones and counts the rest.
_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class ValidationFinding:
    """One error of the log: the check, the layer, the expected and the actual state.

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

    `argument` is the location of the argument (`0`, `"mask"`, `(0, 1)`), and `reason` says what
    validation tried.
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

    `num_checked` counts the items of each check, `not_shown` lists claims that could not be
    decided, `exemptions` counts unchecked items by check and reason, and `seconds` has the time of
    each run and check.

    >>> report = validate_forward_pass(model, x)
    >>> report.passed, report.findings, report.not_shown
    """

    model_name: str
    findings: list[ValidationFinding] = field(default_factory=list)
    not_shown: list[NotShown] = field(default_factory=list)
    num_checked: Counter[str] = field(default_factory=Counter)
    exemptions: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def add_finding(self, check: str, layer: str, expected: str, found: str) -> None:
        """Adds a finding."""
        self.findings.append(ValidationFinding(check, layer, expected, found))

    def add_not_shown(self, check: str, layer: str, argument: object, reason: str) -> None:
        """Adds a claim that could not be decided."""
        self.not_shown.append(NotShown(check, layer, argument, reason))

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
            lines += self._lines_of(check)
        if self.seconds:
            times = ", ".join(f"{name} {took:.2f} s" for name, took in self.seconds.items())
            lines.append(f"  time         {times}")
        return "\n".join(lines)

    def _lines_of(self, check: str) -> list[str]:
        found = [str(finding) for finding in self.findings if finding.check == check]
        unshown = [str(item) for item in self.not_shown if item.check == check]
        verdict = counted(len(found), "finding") if found else "nothing found"
        if unshown:
            verdict += f", {len(unshown)} could not be shown"
        return [
            f"  {check:<13}{self.num_checked[check]:>7} checked, {verdict}",
            *_shown(found, "findings"),
            *_shown(unshown, "not_shown", "could not be shown: "),
            *(
                f"    {count} not checked: {reason}"
                for (name, reason), count in self.exemptions.items()
                if name == check
            ),
        ]

    def _verdict(self) -> str:
        return "passed" if self.passed else f"FAILED, {counted(len(self.findings), 'finding')}"


def _shown(items: list[str], field_name: str, head: str = "") -> list[str]:
    lines = [f"    {head}{item}" for item in items[:_MAX_SHOWN]]
    if len(items) > _MAX_SHOWN:
        lines.append(f"    ... and {len(items) - _MAX_SHOWN} more, in the report's {field_name}")
    return lines


# -- steps
# -------------------------------------------------------------------------------------------------


@contextmanager
def timed(report: ValidationReport, name: str) -> Iterator[None]:
    """Adds the time of the block to the report."""
    start = perf_counter()
    try:
        yield
    finally:
        report.seconds[name] = report.seconds.get(name, 0.0) + perf_counter() - start


def make_run(report: ValidationReport, name: str, check: str, run: Callable[[], T]) -> T | None:
    """The result of a run of the model; None, and a finding, if the model raised."""
    with timed(report, name):
        try:
            return run()
        except BaseException as error:  # any exception of the model, also SystemExit
            if interrupts(error):
                raise
            report.add_finding(check, "", f"the {name} to return", failure_text(error))
    return None


def make_check(report: ValidationReport, name: str, check: Callable[[], None]) -> None:
    """Makes a check; a check that fails on an unknown kind of tensor is a finding, too."""
    with timed(report, name):
        try:
            with unseen(), NoTorchFunction():
                check()
        except Exception as error:
            if interrupts(error):
                raise
            report.add_finding(name, "", f"the check of {name} to be possible", failure_text(error))


def failure_text(error: BaseException) -> str:
    """The type and the first line of an exception."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:  # its `__str__` raises
        text = "(without a message)"
    return f"{type(error).__name__}: {text}"
