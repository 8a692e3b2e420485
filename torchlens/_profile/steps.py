"""The steps of a profile: what was measured of each as a whole, and which of them stand for all."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Shape = tuple[int, ...]
Kind: TypeAlias = tuple[str, bool, tuple[Shape, ...]]
Span: TypeAlias = tuple[str, int, int]  # kind, start and end

# With more kinds of steps than these, they are not told apart by the shapes of their inputs.
MOST_KINDS = 4


class Statistic(NamedTuple):
    """A quantity over the measured steps. `spread` is the width of the middle half (0 for one
    step).
    """

    median: float
    spread: float
    num: int
    minimum: float = 0.0
    p95: float = 0.0  # of twenty steps, one takes longer

    @classmethod
    def of(cls, values: list[float]) -> "Statistic | None":
        """Of some values; None of none."""
        if not values:
            return None
        ordered = sorted(values)
        spread = _quantile(ordered, 0.75) - _quantile(ordered, 0.25)
        return cls(
            _quantile(ordered, 0.5), spread, len(ordered), ordered[0], _quantile(ordered, 0.95)
        )


def _quantile(ordered: list[float], share: float) -> float:
    """The value below which a share of the others lie; between two of them, by proportion."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One call of the model and what followed until the next: backward, optimizer, whatever the
    user does.
    """

    number: int  # 1 = first
    is_warmup: bool
    phase: str = "training"  # or 'evaluation': which of the two the model was set to
    has_grad: bool = True  # whether autograd recorded
    input_shapes: tuple[Shape, ...] = ()
    # whether its FLOPs were counted: at module level those of the first step of each kind are
    has_flops: bool = False
    # what was measured that makes it take longer: 1 for memory, 2 for operations or FLOPs, 3 for
    # both
    details: int = 0
    # nothing was, but in the step just before it: Python has to learn anew where it finds things
    is_cold: bool = False
    position: int = (
        0  # which step of the loop it was, with those that a schedule lets pass; 1 = first
    )
    start_ns: int = 0  # from the beginning of the profile
    end_ns: int = 0  # when the next step began, or the profile ended
    forward_end_ns: int = 0
    outside_spans: tuple[Span, ...] = ()  # of kind 'backward', 'optimizer', 'data' or 'skip'
    forward_seconds: float
    backward_seconds: float | None  # all backward passes through the model; None: there was none
    num_backward_passes: int
    own_seconds: float = (
        0.0  # what measuring itself took in and around the forward pass, and is not in its time
    )
    peak_bytes: int | None  # above what was allocated when the step began
    added_bytes: int | None  # still allocated when the step ended
    raised: str | None = None  # the name of the exception that ended the forward pass

    @property
    def is_light(self) -> bool:
        """Whether it was watched for its times alone: no memory was measured, no operation
        recorded, no FLOPs counted.
        """
        return not self.details

    @property
    def disturbance(self) -> tuple[int, bool]:
        """How much its times are to be trusted: the less, the more."""
        return self.details, self.is_cold

    @property
    def kind(self) -> Kind:
        """Phase, whether autograd recorded, and the shapes of the inputs."""
        return self.phase, self.has_grad, self.input_shapes

    @property
    def wall_seconds(self) -> float:
        """From the call of the model to the next one, without what measuring took in the forward
        pass.
        """
        return max(0.0, (self.end_ns - self.start_ns) / 1e9 - self.own_seconds)

    @property
    def loss_seconds(self) -> float | None:
        """From the end of the forward pass to the first backward pass, without data and optimizers:
        the loss, as a rule.

        None without a backward pass.
        """
        return self._outside("loss")

    @property
    def backward_call_seconds(self) -> float | None:
        """What the calls of `backward` took, the loss's own nodes included; None if there was
        none.
        """
        return self._outside("backward")

    @property
    def optimizer_seconds(self) -> float | None:
        """What the steps of optimizers took; None if there was none. A closure that runs the model
        counts as the model.
        """
        return self._outside("optimizer")

    @property
    def data_seconds(self) -> float | None:
        """What waiting for a `DataLoader` took; None if nobody did."""
        return self._outside("data")

    @property
    def other_seconds(self) -> float:
        """What is left of the step."""
        known = (
            self.loss_seconds,
            self.backward_call_seconds,
            self.optimizer_seconds,
            self.data_seconds,
        )
        return max(
            0.0, self.wall_seconds - self.forward_seconds - sum(value or 0.0 for value in known)
        )

    def _outside(self, kind: str) -> float | None:
        starts = [start for name, start, _ in self.outside_spans if name == "backward"]
        loss = [("loss", self.forward_end_ns, min(starts))] if starts else []
        found = _own_ns([*self.outside_spans, *loss], self.forward_end_ns)
        return found[kind] / 1e9 if kind in found else None


def _own_ns(spans: list[Span], since: int) -> dict[str, int]:
    """How long each kind of span took from a moment on. Where several run, the time is that of the
    one that began last.

    They lie inside each other: an optimizer steps in a backward pass, or is given a closure that
    does it all; the next batch is fetched before the backward pass.
    """
    found = dict.fromkeys([kind for kind, _, _ in spans], 0)
    last = max([end for _, _, end in spans], default=since)
    running: list[tuple[str, int]] = []  # kind and end, the last to begin at the end
    now = since
    for kind, start, end in [
        *sorted(spans, key=lambda span: (span[1], -span[2])),
        ("", last, last),
    ]:
        while running and now < start:
            inner, inner_end = running[-1]
            until = min(inner_end, start)
            found[inner] += max(0, until - now)
            now = max(now, until)
            if inner_end <= now:
                running.pop()
        now = max(now, start)
        running.append((kind, end))
    return found


def by_kind(steps: list[StepRecord]) -> dict[Kind, list[StepRecord]]:
    """Steps that are alike, together. Shapes are told apart as long as there are few."""
    found: dict[Kind, list[StepRecord]] = {}
    for step in steps:
        found.setdefault(step.kind, []).append(step)
    if len(found) <= MOST_KINDS:
        return found
    found = {}
    for step in steps:
        found.setdefault((*step.kind[:2], ()), []).append(step)
    return found


@dataclass(frozen=True, slots=True)
class TypicalSteps:
    """The steps that times are the mean of: the timed ones without the quickest and the slowest
    quarter.

    They are the same for all modules, for forward and backward and for what is outside the model,
    so that times add up. Timed are the light steps that do not follow a detailed one; of a kind
    without any, those that were disturbed least.
    """

    forward: frozenset[int] = frozenset()
    backward: frozenset[int] = frozenset()  # those of them that have a backward pass
    timed: frozenset[int] = frozenset()

    @classmethod
    def of(cls, steps: list[StepRecord]) -> "TypicalSteps":
        """Of the measured steps."""
        timed = []
        for alike in by_kind(steps).values():
            least = min(step.disturbance for step in alike)
            timed += [step for step in alike if step.disturbance == least]
        whole = [(step.number, step.forward_seconds, step.backward_seconds) for step in timed]
        backward = _middle_half(
            [(forward + after, number) for number, forward, after in whole if after is not None]
        )
        others = _middle_half(
            [(forward, number) for number, forward, after in whole if after is None]
        )
        return cls(backward | others, backward, frozenset(step.number for step in timed))

    def statistic(self, values: Mapping[int, float]) -> Statistic | None:
        """Of a time that was measured in some steps: over those of them that are timed."""
        return Statistic.of(
            [value for step, value in values.items() if step in self.timed] or list(values.values())
        )

    def mean(self, quantity: str, values: Mapping[int, float]) -> float | None:
        """The mean of a quantity that was measured in some steps; in others it is nothing. None if
        in no typical one.
        """
        chosen = self.backward if quantity.startswith("backward") else self.forward
        chosen = chosen or frozenset(values)
        found = [value for step, value in values.items() if step in chosen]
        return sum(found) / len(chosen) if found else None


def _middle_half(steps: list[tuple[float, int]]) -> frozenset[int]:
    num_left_out = (len(steps) + 1) // 4 if len(steps) > 2 else 0
    return frozenset(
        number for _, number in sorted(steps)[num_left_out : len(steps) - num_left_out]
    )
