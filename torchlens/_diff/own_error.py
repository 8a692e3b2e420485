"""A layer's own error: what the candidate computes from the reference's inputs."""

from collections.abc import Callable

import torch

from torchlens._diff.divergence import Section
from torchlens._diff.matched import Found, Matched
from torchlens._diff.subject import Subject
from torchlens._recording.relative_error import comparable, dense, relative_error
from torchlens._replay.replay import NotReplayableError, Replay

Tensor = torch.Tensor


def own_error_in(
    reference: Subject, candidate: Subject, replay: Replay, found: Found
) -> Callable[[Matched, Section], float | None]:
    """Gives the own error of a pair, in units of rounding; None where its section cannot run on the
    reference's values.
    """

    def own_error(pair: Matched, section: Section) -> float | None:
        target = reference.side.value(pair.reference)
        if target is None or pair.layout is None:
            return None
        entries, given = set(section.entries), dict[int, Tensor]()
        for entry in section.entries:
            for parent in candidate.side.parents[entry]:
                root = candidate.root[parent]
                if parent in entries or root in given:
                    continue
                value = _put_in(reference, candidate, found, root)
                if value is None:
                    return None
                given[root] = value
                while parent != root:  # a view of it, which is made anew
                    entries.add(parent)
                    parent = candidate.side.parents[parent][0]
        try:
            result = dense(replay.part(entries | {pair.candidate}, given))
        except NotReplayableError:
            return None
        if result is None or result.numel() != target.numel():
            return None
        back = pair.layout.to_reference(comparable(result), tuple(target.shape))
        return relative_error(comparable(target), back) / pair.eps

    return own_error


def _put_in(reference: Subject, candidate: Subject, found: Found, entry: int) -> Tensor | None:
    """The reference's value in place of an entry of the candidate; its own where it comes from no
    input.
    """
    raw = candidate.side.raw(entry)
    if not isinstance(raw, Tensor):
        return None
    pair = found.of_candidate.get(entry) or found.twins[1].get(entry)
    if pair is None or not raw.is_floating_point():
        is_free = pair is not None or not candidate.side.graph.has_input_ancestor[entry]
        return raw if is_free else None
    value = reference.side.value(pair.reference)
    if value is None or pair.layout is None or value.numel() != raw.numel():
        return None
    return pair.layout.to_candidate(value, tuple(raw.shape)).to(raw.dtype)
