"""What is known of a result: whether it equals, bit for bit, what the model would give."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from torchlens._replay.program import ReplayProgram
from torchlens._replay.proof import Proof
from torchlens._replay.steps import RecordedCalls
from torchlens._replay.values import close, difference, same

Tensor = torch.Tensor
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


def certificate_of(
    proof: Proof, program: ReplayProgram, calls: RecordedCalls, doubt: str
) -> Certificate:
    """The certificate of what a program gives."""
    if doubt:
        return Certificate("not shown", doubt)
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


def compared(values: Sequence[Tensor], reruns: Sequence[Tensor]) -> Certificate:
    """The certificate of values that were compared with those of a run of the whole model."""
    for value, again in zip(values, reruns, strict=True):
        if not same(value, again):
            how = f"compared with a run of the model, {difference(again, value)}"
            return Certificate("rounding" if close(value, again) else "not shown", how)
    return Certificate("bit-equal", "compared with a run of the model")
