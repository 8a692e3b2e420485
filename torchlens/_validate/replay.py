"""Check 4, replay: each saved value is the one its operation left, and the one it gives when it
runs again.
"""

from collections.abc import Sequence
from typing import Any

import torch

from torchlens._capture.observer import CallKind
from torchlens._recording.recording import Row
from torchlens._recording.trees import Path
from torchlens._recording.wrappers import copy_of
from torchlens._replay.replay import call_again
from torchlens._replay.snapshots import Snapshot, frozen_tensors, thaw
from torchlens._replay.values import brief, close, difference, same
from torchlens._validate.arguments import contributions_of
from torchlens._validate.exemptions import (
    COLLECTIVE,
    CONTENDED,
    EARLY,
    OPAQUE_REPLAY,
    REPLAY,
    UNINITIALISED,
    VARIED,
)
from torchlens._validate.memory import Memory, paint
from torchlens._validate.report import Finding, ValidationReport
from torchlens._validate.subject import Subject
from torchlens._validate.witness import Call

Tensor = torch.Tensor


def check_replay(subject: Subject, report: ValidationReport) -> None:
    """Runs every call again, and compares every saved value with what was seen and with what came
    out.
    """
    recording = subject.log.recording
    for number in {number for part in (recording.inputs, recording.buffers) for _, number in part}:
        _check_kept(subject, report, number, None)
    for call in subject.calls:
        row = recording.rows[call.first]
        reason = VARIED if call.first in subject.varied else replay_exemption(call, row)
        if reason is None:
            report.num_checked["replay"] += call.last - call.first
            _check_call(subject, report, call, row)
        else:
            report.exemptions["replay", reason] += call.last - call.first
            is_steady = reason not in (UNINITIALISED, VARIED, *OPAQUE_REPLAY.values())
            if is_steady and not own_arguments(subject, call.first, subject.arguments(call)):
                for number in range(call.first, call.last):
                    _check_kept(subject, report, number, None)
    for _, number in recording.outputs:
        if number in subject.evidence.tensors:
            given = own_arguments(subject, number, {0: subject.evidence.tensors[number]})
            _check_kept(subject, report, number, given.get(0))
    for kind, count in subject.evidence.uncopied.items():
        report.exemptions[
            "replay", f"a tensor of the kind {kind} cannot be copied, and was compared with itself"
        ] += count


def replay_exemption(call: Call, row: Row) -> str | None:
    """Why a call is not made again; None if it is."""
    if call.is_collective or call.is_early:
        return COLLECTIVE if call.is_collective else EARLY
    if call.contended:
        return CONTENDED
    if call.kind is CallKind.OPAQUE:
        return OPAQUE_REPLAY.get(row.operation.name)
    return REPLAY.get(row.operation.name) if call.kind is CallKind.FUNCTION else None


def own_arguments(
    subject: Subject, number: int, arguments: dict[Any, Snapshot]
) -> dict[Any, Tensor]:
    """The arguments, by location, that had another value in the run that was logged than beside the
    witness.

    Memory that nobody has written is different each time, and so is what is made of it.
    """
    found = {}
    for location, sources in subject.reads(number).items():
        argument = arguments.get(location)
        if argument is not None and not subject.unsteady.isdisjoint(sources):
            painting = paint(argument, contributions_of(subject, number, location, as_logged=True))
            value = subject.value(sources[0]) if painting is None else painting.value
            if isinstance(value, Tensor):
                found[location] = value
    return found


def _check_call(subject: Subject, report: ValidationReport, call: Call, row: Row) -> None:
    label, own = (
        subject.label(call.first),
        own_arguments(subject, call.first, subject.arguments(call)),
    )
    try:
        outputs = run_again(call, subject.log.recording.rows[call.first : call.last], own)
    except Exception as error:  # whatever the operation has to say is the finding
        found = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        report.findings.append(
            Finding("replay", label, f"{row.operation.name} to run again", found)
        )
        return
    numbers = range(call.first, call.last)
    if len(outputs) != len(numbers):
        found = f"{len(outputs)} when run again"
        report.findings.append(
            Finding("replay", label, f"{len(numbers)} results of {row.operation.name}", found)
        )
        return
    for number, output in zip(numbers, outputs, strict=True):
        saved = subject.value(number)
        if number in subject.unsteady and not own:
            _check_kept(subject, report, number, None)
        elif not same(saved, output):
            subject.inexact.add(call.first)
            if not close(saved, output):
                expected = f"{row.operation.name} to give its saved value ({brief(saved)}) again"
                report.findings.append(
                    Finding("replay", subject.label(number), expected, difference(saved, output))
                )


def _check_kept(
    subject: Subject, report: ValidationReport, number: int, expected: Tensor | None
) -> None:
    """The saved value must be the one that the witness saw, or the one given here instead."""
    seen = subject.evidence.tensors.get(number)
    value = seen.value if expected is None and seen is not None else expected
    saved = subject.value(number) if number < len(subject.log.recording.rows) else None
    if value is not None and not same(value, saved):
        found = f"saved {difference(value, saved) if isinstance(saved, Tensor) else brief(saved)}"
        what = f"the value when its operation ended ({brief(value)})"
        report.findings.append(Finding("replay", subject.label(number), what, found))


def run_again(
    call: Call, rows: Sequence[Row], changed: dict[Any, Tensor] | None = None
) -> list[Tensor]:
    """The results of a call, made again from its own generator state under its own modes; to be
    called from `apart`.

    `rows` are those of the call. The function is taken from them: what the log says was called is
    what must give the result. `changed` has tensors to be given in place of the original arguments,
    by location.
    """
    tensor_of = _Arguments(call, changed or {})
    with torch.inference_mode(call.modes.inference), torch.set_grad_enabled(call.modes.grad):
        args, kwargs = thaw(call.args, tensor_of), thaw(call.kwargs, tensor_of)
    operation = rows[0].operation
    if call.kind is CallKind.IDENTITY:
        return [args[0]]
    if call.kind is CallKind.OPAQUE:
        args, kwargs = args[0][0], args[0][1]
    outputs = call_again(
        operation.func, args, kwargs, operation.written, call.modes, call.generators
    )
    if call.kind is CallKind.AUTOGRAD:
        # Has rows only for the results that no operation inside it made.
        return [outputs[row.output_index or 0] for row in rows]
    return outputs


class _Arguments:
    """Makes the tensors of a call anew: as they are where they are only read, as copies where they
    may be written.

    Tensors that shared memory that the call writes share it again.
    """

    def __init__(self, call: Call, changed: dict[Any, Tensor]) -> None:
        self._call = call
        self._changed = changed
        self._made: dict[tuple[Any, ...], Tensor] = {}
        self._shared = _shared_memory(call, changed)

    def __call__(self, path: Path, snapshot: Snapshot) -> Tensor:
        location = path[0] if len(path) == 1 else path
        if location in self._changed:
            is_written = snapshot.storage in self._call.written_storages
            return _with_grad(copy_of(self._changed[location]), snapshot, self._call, is_written)
        if snapshot.storage not in self._call.written_storages:
            return _with_grad(snapshot.value, snapshot, self._call)
        if snapshot.storage in self._shared and snapshot.region is not None:
            key = (
                snapshot.storage,
                snapshot.region,
                snapshot.value.dtype,
                snapshot.is_conj,
                snapshot.is_neg,
            )
            if key not in self._made:
                self._made[key] = self._shared[snapshot.storage].look_at(snapshot)
            return self._made[key]
        return _with_grad(snapshot.value, snapshot, self._call, is_written=True)


def _shared_memory(call: Call, changed: dict[Any, Tensor]) -> dict[int, Memory]:
    """A copy of each written storage that several arguments look at."""
    looking: dict[int, list[Snapshot]] = {}
    for frozen in (call.args, call.kwargs):
        for path, snapshot in frozen_tensors(frozen):
            location = path[0] if len(path) == 1 else path
            if (
                snapshot.storage in call.written_storages
                and snapshot.region is not None
                and location not in changed
            ):
                looking.setdefault(snapshot.storage, []).append(snapshot)
    shared = {}
    for storage, snapshots in looking.items():
        if len(snapshots) > 1 and not snapshots[0].value.is_meta:
            regions = [snapshot.region for snapshot in snapshots if snapshot.region is not None]
            shared[storage] = memory = Memory(regions, snapshots[0].value.device)
            for snapshot in snapshots:
                memory.write(snapshot, snapshot.value)
    return shared


def _with_grad(value: Tensor, snapshot: Snapshot, call: Call, is_written: bool = False) -> Tensor:
    """`value` as autograd saw it: some kernels are chosen by whether a gradient is wanted."""
    wants_grad = snapshot.requires_grad and call.modes.grad and not call.modes.inference
    if wants_grad and (value.is_floating_point() or value.is_complex()):
        leaf = value.detach().requires_grad_()
        return copy_of(leaf) if is_written else leaf
    return copy_of(value) if is_written else value
