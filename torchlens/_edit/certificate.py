"""What is known of a result: whether it equals, bit for bit, what the model would give."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchlens._replay.program import ReplayProgram
from torchlens._replay.proof import Proof
from torchlens._replay.steps import RecordedCalls

CertificateKind: TypeAlias = Literal["bit-equal", "rounding", "not shown", "refused"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """Whether a result is what a run of the whole model with the same edits gives.

    'bit-equal': it is, bit for bit: every call that ran gave its recorded value again without the
    edits, no value that the model reads into Python changed, and no tensor changed since the log.
    'rounding': it is, except for rounding, for the reason given.
    'not shown': it could not be checked, for the reason given.
    'refused': there is no result, for the reason given; `sweep` goes on with the other edits.
    """

    kind: CertificateKind
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}" if self.reason else self.kind


def certificate_of(proof: Proof, program: ReplayProgram, calls: RecordedCalls) -> Certificate:
    """The certificate of what a program gives."""
    unproven = proof.unproven(program)
    if unproven:
        labels = ", ".join([calls.label(number) for number in unproven[:3]])
        return Certificate(
            "not shown", f"the recorded value of {labels} was not saved, to compare with"
        )
    rounded = [number for number in proof.rounded if number in program.live]
    if rounded:
        label = calls.label(rounded[0])
        return Certificate("rounding", f"{label} run alone: {proof.rounded[rounded[0]]}")
    return Certificate("bit-equal")
