"""Check 4, replay: each operation made its saved value, and makes it again when it runs again."""

from collections.abc import Sequence
from typing import Any

import torch

from torchlens._capture.observer import CallKind
from torchlens._recording.interruptions import interrupts
from torchlens._recording.recording import Recording, Row
from torchlens._recording.trees import Path
from torchlens._recording.unseen import GradMode
from torchlens._recording.wrappers import copy_of
from torchlens._replay.replay import call_again
from torchlens._replay.values import brief, close, difference, same
from torchlens._validate.check_arguments import StorageCopy
from torchlens._validate.exemptions import (
    COLLECTIVE,
    CONTENDED,
    EARLY,
    OPAQUE_REPLAY,
    REPLAY,
    UNINITIALISED,
)
from torchlens._validate.report import ValidationReport, failure_text
from torchlens._validate.snapshots import Snapshot, is_same_as_frozen, thaw
from torchlens._validate.witness import Subject, WitnessedCall, location_of

Tensor = torch.Tensor


def check_replay(subject: Subject, report: ValidationReport) -> None:
    """Runs every call again, and compares the results with the values that were saved and seen."""
    values, seen = subject.log.recording.values, subject.witness.tensors
    for number, saved in enumerate(values):
        value = seen[number].value if number in seen else None
        if value is not None and not same(value, saved):
            what = f"the value when its operation ended ({brief(value)})"
            _find(report, subject.label(number), what, f"saved {_saved(value, saved)}")
    for call in subject.calls:
        rows = subject.log.recording.rows[call.first : call.last]
        reason = replay_exemption(call, rows[0])
        if reason is None:
            report.num_checked["replay"] += len(rows)
            _check_call(subject, report, call, rows)
        else:
            report.exemptions["replay", reason] += len(rows)
    for kind, count in subject.witness.snapshots.uncopied.items():
        reason = f"a tensor of the kind {kind} cannot be copied, and was compared with itself"
        report.exemptions["replay", reason] += count


def check_unwitnessed(subject: Subject, logged: Recording, report: ValidationReport) -> None:
    """Compares the log with one of the same pass that was made without a witness.

    Uninitialised memory and numbers such as the time differ from run to run, and so does what is
    computed from them; a result may also differ by rounding.
    """
    recording = subject.log.recording
    if [row.operation.name for row in logged.rows] != [
        row.operation.name for row in recording.rows
    ]:
        _find(report, "", f"the same {len(logged.rows)} steps beside the witness", "others")
        return
    unspecified = _unspecified(subject, logged)
    different: set[int] = set()
    for number, (first, second) in enumerate(zip(logged.values, recording.values, strict=True)):
        if first is second or same(first, second):
            continue
        sources = set().union(*subject.reads(number).values())
        if number in unspecified or sources & different or close(first, second):
            different.add(number)
        else:
            what = f"the same value with and without the witness ({brief(first)})"
            _find(report, subject.label(number), what, _saved(first, second))


def _unspecified(subject: Subject, logged: Recording) -> set[int]:
    return {
        number
        for call in subject.calls
        for number in range(call.first, call.last)
        if _may_differ(call, logged.rows[number])
    }


def _saved(value: Tensor, saved: Any) -> str:
    return difference(value, saved) if isinstance(saved, Tensor) else brief(saved)


def _may_differ(call: WitnessedCall, row: Row) -> bool:
    """True if the result of a call is unspecified, or its arguments differ between runs."""
    if replay_exemption(call, row) in (UNINITIALISED, EARLY, *OPAQUE_REPLAY.values()):
        return True
    is_same = is_same_as_frozen(row.args, call.args)
    return not is_same or not is_same_as_frozen(row.kwargs or {}, call.kwargs)


def replay_exemption(call: WitnessedCall, row: Row) -> str | None:
    """The reason why a call is not replayed; None if it is."""
    if call.is_collective or call.is_early:
        return COLLECTIVE if call.is_collective else EARLY
    if call.contended:
        return CONTENDED
    if call.kind is CallKind.OPAQUE:
        return OPAQUE_REPLAY.get(row.operation.name)
    return REPLAY.get(row.operation.name) if call.kind is CallKind.FUNCTION else None


def _check_call(
    subject: Subject, report: ValidationReport, call: WitnessedCall, rows: Sequence[Row]
) -> None:
    name = rows[0].operation.name
    try:
        outputs = run_again(call, rows)
    except Exception as error:  # any exception of the operation is a finding
        if interrupts(error):
            raise
        _find(report, subject.label(call.first), f"{name} to run again", failure_text(error))
        return
    if len(outputs) != len(rows):
        found = f"{len(outputs)} when run again"
        _find(report, subject.label(call.first), f"{len(rows)} results of {name}", found)
        return
    for number, output in zip(range(call.first, call.last), outputs, strict=True):
        seen = subject.witness.tensors[number].value
        if same(seen, output):
            continue
        subject.inexact.add(call.first)
        if not close(seen, output):
            expected = f"{name} to give its saved value ({brief(seen)}) again"
            _find(report, subject.label(number), expected, difference(seen, output))


def _find(report: ValidationReport, label: str, expected: str, found: str) -> None:
    report.add_finding("replay", label, expected, found)


def run_again(
    call: WitnessedCall, rows: Sequence[Row], changed: dict[Any, Tensor] | None = None
) -> list[Tensor]:
    """The results of a call, run again from its own generator state under its own modes.

    The function is that of the log, in `rows`. `changed` has tensors, by location, that replace the
    original arguments. Call it inside `unseen`.
    """
    tensor_of = _Arguments(call, changed or {})
    with GradMode(call.modes.grad, call.modes.inference):
        args, kwargs = thaw(call.args, tensor_of), thaw(call.kwargs, tensor_of)
    if call.kind is CallKind.IDENTITY:
        return [args[0]]
    if call.kind is CallKind.OPAQUE:
        args, kwargs = args[0][0], args[0][1]
    operation, modes = rows[0].operation, call.modes
    outputs = call_again(operation.func, args, kwargs, operation.written, modes, call.generators)
    if call.kind is CallKind.OPAQUE and not outputs:  # it only writes
        outputs = tensor_of.written
    if call.kind is CallKind.AUTOGRAD:  # operations inside it may have left rows of some results
        return [outputs[row.output_index or 0] for row in rows]
    return outputs


class _Arguments:
    """Makes new tensors for a call: copies of those that it may write to, which share memory if the
    originals did.
    """

    def __init__(self, call: WitnessedCall, changed: dict[Any, Tensor]) -> None:
        self._call = call
        self._changed = changed
        self._made: dict[tuple[Any, ...], Tensor] = {}
        self.written: list[Tensor] = []  # those that it wrote to, in their order
        self._shared = _shared_memory(call, changed)

    def __call__(self, path: Path, snapshot: Snapshot) -> Tensor:
        tensor = self._tensor_at(path, snapshot)
        if snapshot.identity in {own.identity for own in self._call.written}:
            self.written.append(tensor)
        return tensor

    def _tensor_at(self, path: Path, snapshot: Snapshot) -> Tensor:
        is_written = snapshot.storage in self._call.written_storages
        changed = self._changed.get(location_of(path))
        if changed is not None:
            return self._with_grad(copy_of(changed), snapshot, is_written)
        shared = self._shared.get(snapshot.storage)
        if shared is None or snapshot.region is None:
            return self._with_grad(snapshot.value, snapshot, is_written)
        kind = (snapshot.value.dtype, snapshot.is_conj, snapshot.is_neg)
        key = (snapshot.storage, snapshot.region, *kind)
        if key not in self._made:
            self._made[key] = shared.look_at(snapshot)
        return self._made[key]

    def _with_grad(self, value: Tensor, snapshot: Snapshot, is_written: bool) -> Tensor:
        """`value` with the original `requires_grad`, by which torch chooses some kernels."""
        modes = self._call.modes
        wants_grad = snapshot.requires_grad and modes.grad and not modes.inference
        if wants_grad and (value.is_floating_point() or value.is_complex()):
            value = value.detach().requires_grad_()
        return copy_of(value) if is_written else value


def _shared_memory(call: WitnessedCall, changed: dict[Any, Tensor]) -> dict[int, StorageCopy]:
    """A copy of each written storage that several unchanged arguments use."""
    users: dict[int, list[Snapshot]] = {}
    for path, snapshot in call.tensors:
        has_memory = snapshot.region is not None and not snapshot.value.is_meta
        is_written = snapshot.storage in call.written_storages
        if has_memory and is_written and location_of(path) not in changed:
            users.setdefault(snapshot.storage, []).append(snapshot)
    return {storage: _memory_of(own) for storage, own in users.items() if len(own) > 1}


def _memory_of(snapshots: Sequence[Snapshot]) -> StorageCopy:
    regions = [snapshot.region for snapshot in snapshots if snapshot.region is not None]
    memory = StorageCopy(regions, snapshots[0].value.device)
    for snapshot in snapshots:
        memory.write(snapshot, snapshot.value)
    return memory
