"""Findings over the steps of a run: when each begins to hold, and when it is over."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from torchlens._health.finding import Finding, RunFinding

# A finding begins after so many recorded steps in a row.
_STEPS_IN_A_ROW = 3
# These begin with the first step: NaN is never by chance, dead units were counted for long.
_AT_ONCE = frozenset({"non-finite values", "non-finite gradients", "dead units"})
# These concern the whole model. NaN spreads, and which weight has the largest gradient changes from
# step to step.
_OF_MODEL = frozenset(
    {
        "non-finite values",
        "non-finite gradients",
        "vanishing gradient",
        "zero gradients",
        "exploding gradient",
    }
)
# A finding that comes and goes begins at most so often.
_MOST_EPISODES = 3
# The kinds of series that show a finding: without them, a step cannot end it.
_SEEN_IN = {
    "non-finite values": {"parameters", "outputs", "watched"},
    "non-finite gradients": {"gradients", "parameter_gradients"},
    "dead units": {"outputs"},
    "saturated activation": {"outputs"},
    "vanishing gradient": {"parameter_gradients"},
    "zero gradients": {"parameter_gradients"},
    "exploding gradient": {"parameter_gradients"},
    "small update": {"updates"},
    "large update": {"updates"},
}
_Key = tuple[str, str]  # kind and place


class Episodes:
    """Remembers which findings hold from step to step."""

    def __init__(self) -> None:
        self._in_a_row: dict[_Key, tuple[int, str]] = {}  # number of steps, and the module
        self._begun: dict[_Key, Finding] = {}
        self._num_episodes: dict[_Key, int] = {}

    def after_step(
        self, step: int, findings: Iterable[Finding], seen: Mapping[str, set[str]]
    ) -> list[RunFinding]:
        """The findings that begin or end with a step. `seen`: module → the kinds of series that the
        step recorded of it.
        """
        now = {
            (finding.kind, "" if finding.kind in _OF_MODEL else finding.where): finding
            for finding in findings
        }
        begun: dict[str, list[Finding]] = {}
        for key, finding in now.items():
            if self._begins(key, finding):
                begun.setdefault(finding.kind, []).append(finding)
        found = [RunFinding(step, _as_one(group)) for group in begun.values()]
        ended = self._end(now.keys(), seen)
        return found + [RunFinding(step, finding, is_over=True) for finding in ended]

    def _end(self, now: Collection[_Key], seen: Mapping[str, set[str]]) -> list[Finding]:
        """Ends what does not hold now although the step recorded what would show it; returns the
        findings that had begun.
        """
        ended = [
            key
            for key, (_, module) in self._in_a_row.items()
            if key not in now and not _SEEN_IN[key[0]].isdisjoint(seen.get(module, ()))
        ]
        for key in ended:
            del self._in_a_row[key]
        return [self._begun.pop(key) for key in ended if key in self._begun]

    def _begins(self, key: _Key, finding: Finding) -> bool:
        count = self._in_a_row.get(key, (0, ""))[0] + 1
        self._in_a_row[key] = count, finding.module
        num_episodes = self._num_episodes.get(key, 0)
        is_sure = count >= _STEPS_IN_A_ROW or finding.kind in _AT_ONCE
        if not is_sure or key in self._begun or num_episodes >= _MOST_EPISODES:
            return False
        self._begun[key] = finding
        self._num_episodes[key] = num_episodes + 1
        return True


def _as_one(findings: list[Finding]) -> Finding:
    """One finding for all of a kind that begin at once: the first, or the most unusual update."""
    if len(findings) == 1:
        return findings[0]
    worst = findings[0]
    if worst.kind == "small update":
        worst = min(findings, key=lambda finding: finding.number)
    elif worst.kind == "large update":
        worst = max(findings, key=lambda finding: finding.number)
    others = ", ".join(finding.where for finding in findings if finding is not worst)
    others = others if len(others) < 200 else f"{others[:200]} ..."
    return replace(worst, text=f"{worst.text} And so for {len(findings) - 1} more: {others}.")
