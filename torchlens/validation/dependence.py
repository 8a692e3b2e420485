"""Check 4, dependence: changing what a parent gave changes what the operation gives.

A parent that the operation does not read would pass every comparison of values. So the argument that comes from each
parent is changed, and the operation run again: with noise first, then in the ways that are hard to ignore (very large
numbers, NaN, one constant for all), and at last with the other arguments changed too, for an argument may be hidden by
their values (a mask, a zero). An operation that raises on the changed argument has read it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchlens.capture.observer import CallKind
from torchlens.capture.recording import Row
from torchlens.capture.wrappers import holds_others, inner_of, local_value, with_inner
from torchlens.validation.arguments import NOBODY, contributions_of, side_effects_of
from torchlens.validation.exemptions import CAPTURED, EMPTY, OPAQUE, PART, VIEW, dependence_exemption
from torchlens.validation.memory import paint
from torchlens.validation.replay import replay_exemption, run_again
from torchlens.validation.report import Finding, ValidationReport
from torchlens.validation.snapshots import Snapshot
from torchlens.validation.subject import Subject
from torchlens.validation.values import same
from torchlens.validation.witness import Call

__all__ = ["check_dependence"]

Tensor = torch.Tensor
_SEED = 20_240_229
_NUM_RANDOM = 8191


def check_dependence(subject: Subject, report: ValidationReport) -> None:
    """Changes every parent of every operation, and looks for a change in its results."""
    generator = torch.Generator().manual_seed(_SEED)
    side_effects = side_effects_of(subject)
    for call in subject.evidence.calls:
        _check_call(subject, report, call, generator, side_effects)
    graph = subject.log.graph
    for entry, number in enumerate(graph.recorded):
        named = {source for sources in subject.reads(number).values() for source in sources}
        for parent in graph.parents[entry]:
            if graph.recorded[parent] not in named:
                found = f"the parent {subject.log.label(parent)}, which is none of the arguments"
                report.findings.append(Finding("dependence", subject.log.label(entry), "only parents that are read", found))


def _check_call(
    subject: Subject,
    report: ValidationReport,
    call: Call,
    generator: torch.Generator,
    side_effects: dict[int, list[Snapshot]],
) -> None:
    rows = subject.log.recording.rows[call.first : call.last]
    arguments = subject.arguments(call)
    places: dict[int, list[Any]] = {}
    for location, sources in subject.reads(call.first).items():
        for source in sources:
            places.setdefault(source, []).append(location)
    for parent, locations in places.items():
        name = rows[0].operation.name
        if call.kind is CallKind.IDENTITY:
            continue
        reason = None
        for location in locations:
            reason = _reason(subject, call, rows, arguments, parent, location, generator, side_effects)
            if reason is None:
                break
        report.num_checked["dependence"] += 1
        if reason == "":
            expected = f"{name} to depend on {subject.label(parent)} (argument {', '.join(map(str, locations))})"
            found = "the same result however the argument is changed"
            report.findings.append(Finding("dependence", subject.label(call.first), expected, found))
        elif reason is not None:
            report.num_checked["dependence"] -= 1
            report.exemptions["dependence", reason] += 1


def _reason(
    subject: Subject,
    call: Call,
    rows: Sequence[Row],
    arguments: dict[Any, Snapshot],
    parent: int,
    location: Any,
    generator: torch.Generator,
    side_effects: dict[int, list[Snapshot]],
) -> str | None:
    """None if the operation depends on the parent there, otherwise why it need not: an empty string if it should."""
    argument = arguments.get(location)
    if argument is None:
        return CAPTURED if isinstance(location, tuple) and location[0] == "captured" else ""
    before = [subject.value(number) for number in range(call.first, call.last)]
    if not _has_elements(argument.value) or not any(isinstance(value, Tensor) and _has_elements(value) for value in before):
        return EMPTY
    name = rows[0].operation.name
    if (reason := replay_exemption(call, rows[0])) is not None:
        return dependence_exemption(name, location) or reason
    part = _part_of(subject, call.first, location, argument, parent, side_effects)
    if part is not None and not bool(part.any()):
        return VIEW
    others = [snapshot.value for place, snapshot in arguments.items() if place != location]
    for attempt, changed in enumerate(_changes(argument.value, others, call, generator)):
        given = changed if part is None else torch.where(part.to(changed.device), changed, argument.value)
        if _changes_result(call, rows, {location: given}, before):
            return None
        if attempt == 0 and (reason := dependence_exemption(name, location)) is not None:
            return reason
    if part is not None:
        changed = next(_changes(argument.value, others, call, generator))
        if _changes_result(call, rows, {location: changed}, before):
            return PART
    if _is_hidden(call, rows, arguments, location, generator):
        return None
    return OPAQUE if call.kind is CallKind.OPAQUE else ""


def _part_of(
    subject: Subject,
    number: int,
    location: Any,
    argument: Snapshot,
    parent: int,
    side_effects: dict[int, list[Snapshot]],
) -> Tensor | None:
    """Which elements of the argument the parent wrote; None for all."""
    if len(subject.reads(number)[location]) == 1:
        return None
    painting = paint(argument, contributions_of(subject, number, location, side_effects), NOBODY)
    return None if painting is None else painting.sources == parent


def _changes_result(call: Call, rows: Sequence[Row], changed: dict[Any, Tensor], before: Sequence[Any]) -> bool:
    try:
        after = run_again(call, rows, changed)
    except Exception:  # the arguments differ in nothing but their values: those are what it raised about
        return True
    return len(after) != len(before) or not all(map(same, before, after))


def _is_hidden(
    call: Call, rows: Sequence[Row], arguments: dict[Any, Snapshot], location: Any, generator: torch.Generator
) -> bool:
    """Whether the argument matters once the others have other values."""
    for attempt in range(4):
        changed = {
            place: _other(snapshot.value, call, generator, is_varied=attempt % 2 == 1)
            for place, snapshot in arguments.items()
            if place != location and _has_elements(snapshot.value)
        }
        if not changed:
            return False
        try:
            before = run_again(call, rows, changed)
            changed[location] = next(_changes(arguments[location].value, [], call, generator))
        except Exception:  # other values than those are not to be had
            continue
        if _changes_result(call, rows, changed, before):
            return True
    return False


def _other(value: Tensor, call: Call, generator: torch.Generator, is_varied: bool) -> Tensor:
    """Some other tensor like `value`; `is_varied` makes whole numbers differ from each other, even where they did not."""
    if is_varied and value.dtype in (torch.int32, torch.int64) and value.layout is torch.strided and not value.is_nested:
        low, high = max(int(value.min()), -(2**30)), min(int(value.max()), 2**30)
        return torch.randint(min(low, high), high + 2, value.shape, generator=generator).to(value)
    return next(_changes(value, [], call, generator))


def _has_elements(tensor: Tensor) -> bool:
    tensor = local_value(tensor)
    return not tensor.is_meta and tensor.numel() > 0


# -- other values ------------------------------------------------------------------------------------------------------


def _changes(value: Tensor, others: Sequence[Tensor], call: Call, generator: torch.Generator) -> Iterator[Tensor]:
    """Tensors like `value` with other elements, the plainest first."""
    value = value.detach()
    if inner_of(value) is not None:
        for changed in _changes(local_value(value), [local_value(other) for other in others], call, generator):
            yield with_inner(value, changed)
    elif value.is_nested or value.layout is not torch.strided or value.is_quantized or holds_others(value):
        yield from _changed_whole(value, generator)
    elif value.dtype is torch.bool:
        yield ~value
        yield torch.ones_like(value)
        yield torch.zeros_like(value)
        yield _random(value, generator) > 0
    elif value.is_floating_point() or value.is_complex():
        yield from _changed_floats(value, others, call, generator)
    else:
        yield from _changed_integers(value, others, call, generator)


def _changed_floats(value: Tensor, others: Sequence[Tensor], call: Call, generator: torch.Generator) -> Iterator[Tensor]:
    sample = value.reshape(-1)[:_NUM_RANDOM]
    finite = sample[torch.isfinite(sample)]
    spread = float(finite.abs().float().mean()) if len(finite) else 0.0
    noise = _random(value, generator)
    yield torch.add(value, noise, alpha=spread or 1.0).to(value.dtype)
    yield (noise * 1000 * (spread or 1.0)).to(value.dtype)
    yield torch.full_like(value, torch.nan)
    yield -value
    yield torch.where(_random(value, generator).real > 0, torch.full_like(value, torch.nan), value)
    yield torch.full_like(value, torch.inf)
    yield torch.full_like(value, -torch.inf)
    yield torch.zeros_like(value)
    yield from _constants(value, others, call, generator)


def _changed_integers(value: Tensor, others: Sequence[Tensor], call: Call, generator: torch.Generator) -> Iterator[Tensor]:
    dtype, value = value.dtype, value.long()  # unsigned types know little arithmetic
    low, high = int(value.min()), int(value.max())
    yield (value.max() - value + value.min() if low != high else value + (1 if low == 0 else -1)).to(dtype)
    if low != high:
        low, high = max(low, -(2**62)), min(high, 2**62)
        yield torch.randint(low, high + 1, value.shape, generator=generator).to(value.device, dtype)
        yield torch.full_like(value, low, dtype=dtype)
        yield torch.full_like(value, high, dtype=dtype)
    yield torch.zeros_like(value, dtype=dtype)
    for changed in _constants(value, others, call, generator):
        yield changed.to(dtype)
    if value.device.type == "cpu":  # elsewhere, an index out of range is the end of the process
        yield (value + 1).to(dtype)
        yield (-1 - value).to(dtype)


def _constants(value: Tensor, others: Sequence[Tensor], call: Call, generator: torch.Generator) -> Iterator[Tensor]:
    """With some elements equal to what they may be compared with: the numbers and tensors among the other arguments."""
    some = _random(value, generator).real > 0
    for number in _numbers_in((call.args, call.kwargs)):
        yield torch.where(some, torch.full_like(value, number), value)
        yield from (torch.full_like(value, number + step) for step in (0, 1, -1))
    for other in others:
        if _has_elements(other) and other.dtype in (torch.int32, torch.int64) and other.dtype == value.dtype:
            yield torch.full_like(value, int(other.max()) + 1)
            yield torch.full_like(value, int(other.min()) - 1)
            yield torch.full_like(value, int(other.reshape(-1)[0]))
        if not other.is_nested and other.layout is torch.strided and _is_broadcastable(other, value):
            other = other.detach().to(value)
            yield torch.where(some, other, value)
            yield from (torch.where(some, other + step, value) for step in (1, -1))


def _numbers_in(tree: Any) -> list[int | float]:
    if isinstance(tree, int | float) and not isinstance(tree, bool) and abs(tree) < 2**31:
        return [tree]
    items = getattr(tree, "items", tree)
    if isinstance(items, dict):
        items = tuple(items.values())
    return [number for item in items for number in _numbers_in(item)] if isinstance(items, list | tuple) else []


def _is_broadcastable(other: Tensor, value: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(other.shape, value.shape) == value.shape
    except RuntimeError:
        return False


def _changed_whole(value: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """For tensors that are more than their elements: scaled, where they can be."""
    try:
        yield value * 1.5
        yield value * float("nan")
    except (NotImplementedError, RuntimeError, TypeError):  # a quantized tensor, say
        yield torch.zeros_like(value)


def _random(value: Tensor, generator: torch.Generator) -> Tensor:
    """Noise in the shape of `value`: a few thousand numbers over and over, for making them is what costs time."""
    dtype = torch.complex64 if value.is_complex() else torch.float32
    count = value.numel()
    noise = torch.randn(min(count, _NUM_RANDOM), generator=generator, dtype=dtype)
    if count > _NUM_RANDOM:
        noise = noise.repeat(-(-count // _NUM_RANDOM))[:count]
    return noise.reshape(value.shape).to(value.device)
