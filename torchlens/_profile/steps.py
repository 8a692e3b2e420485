"""The steps of a profile: what was measured of each as a whole, and which of them times come
from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Shape: TypeAlias = tuple[int, ...]
# Whether the model is in training, whether autograd records, the shapes of the inputs.
Signature: TypeAlias = tuple[bool, bool, tuple[Shape, ...]]
Kind: TypeAlias = tuple[str, bool, tuple[Shape, ...]]  # the same, with the name of the phase
OutsideTime: TypeAlias = tuple[str, int, int]  # kind, start and end in nanoseconds

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
    """One call of the model and what followed until the next: backward, optimizer, the user's own
    code.
    """

    number: int  # 1 = first
    is_warmup: bool
    phase: str = "training"  # or 'evaluation': the mode of the model
    has_grad: bool = True  # whether autograd recorded
    input_shapes: tuple[Shape, ...] = ()
    has_flops: bool = False  # at module level, the first step of each kind has
    # whether the allocators were heard, and whether it ran under the log: each makes it slower
    has_memory: bool = False
    has_log: bool = False
    # whether it follows a step under the log, after which Python finds methods more slowly
    is_cold: bool = False
    position: int = 0  # in the loop, counting the steps that a schedule skips; 1 = first
    start_ns: int = 0  # from the beginning of the profile
    end_ns: int = 0  # when the next step began, or the profile ended
    forward_end_ns: int = 0
    outside_spans: tuple[OutsideTime, ...] = ()  # 'backward', 'optimizer', 'data' or 'skip'
    forward_seconds: float
    backward_seconds: float | None  # all backward passes through the model; None: there was none
    num_backward_passes: int
    own_seconds: float = 0.0  # in and around the forward pass, and in none of the times
    peak_bytes: int | None  # above what was allocated when the step began
    added_bytes: int | None  # still allocated when the step ended
    raised: str | None = None  # the name of the exception that ended the forward pass

    @property
    def is_light(self) -> bool:
        """Whether nothing but times was measured. Times come from light steps."""
        return not (self.has_memory or self.has_log)

    @property
    def disturbance(self) -> tuple[bool, bool, bool]:
        """Sorts steps by how much measuring slowed them down."""
        return self.has_log, self.has_memory, self.is_cold

    @property
    def kind(self) -> Kind:
        """Phase, whether autograd recorded, and the shapes of the inputs."""
        return self.phase, self.has_grad, self.input_shapes

    @property
    def wall_seconds(self) -> float:
        """From the call of the model to the next one, without `own_seconds`."""
        return max(0.0, (self.end_ns - self.start_ns) / 1e9 - self.own_seconds)

    @property
    def loss_seconds(self) -> float | None:
        """From the end of the forward pass to the first backward pass, without data and optimizers:
        usually the loss. None without a backward pass.
        """
        return self._outside("loss")

    @property
    def backward_call_seconds(self) -> float | None:
        """Calls of `backward`, including the nodes of the loss; None without any."""
        return self._outside("backward")

    @property
    def optimizer_seconds(self) -> float | None:
        """Steps of optimizers; None without any. A closure that runs the model counts as the
        model.
        """
        return self._outside("optimizer")

    @property
    def data_seconds(self) -> float | None:
        """Waiting for a `DataLoader`; None without any."""
        return self._outside("data")

    @property
    def other_seconds(self) -> float:
        """What is left of the step."""
        parts = (
            self.loss_seconds,
            self.backward_call_seconds,
            self.optimizer_seconds,
            self.data_seconds,
        )
        known = sum(part for part in parts if part is not None)
        return max(0.0, self.wall_seconds - self.forward_seconds - known)

    def _outside(self, kind: str) -> float | None:
        starts = [start for name, start, _ in self.outside_spans if name == "backward"]
        loss = [("loss", self.forward_end_ns, min(starts))] if starts else []
        found = _innermost_ns([*self.outside_spans, *loss], self.forward_end_ns)
        return found[kind] / 1e9 if kind in found else None


def _innermost_ns(spans: list[OutsideTime], since: int) -> dict[str, int]:
    """How long each kind of span took from a moment on. Where several run, the time is that of the
    one that began last.

    Spans nest: an optimizer steps in a backward pass, or runs a closure that does everything; the
    next batch is fetched before the backward pass.
    """
    found = dict.fromkeys([kind for kind, _, _ in spans], 0)
    last = max([end for _, _, end in spans], default=since)
    ordered = sorted(spans, key=lambda span: (span[1], -span[2]))
    running: list[tuple[str, int]] = []  # kind and end, the last to begin at the end
    now = since
    for kind, start, end in [*ordered, ("", last, last)]:
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
    """Groups steps of one kind. Shapes are told apart as long as there are few."""
    has_few = len({step.kind for step in steps}) <= MOST_KINDS
    found: dict[Kind, list[StepRecord]] = {}
    for step in steps:
        shapes = step.input_shapes if has_few else ()
        found.setdefault((step.phase, step.has_grad, shapes), []).append(step)
    return found


@dataclass(frozen=True, slots=True)
class TypicalSteps:
    """The steps that times are the mean of: the timed ones without the quickest and the slowest
    quarter.

    They are the same for all modules, for forward and backward and for what is outside the model,
    so that times add up. Timed steps are, of each kind, the ones that measuring slowed down least:
    light steps that do not follow a logged one, if there are any.
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
        backward, others = [], []
        for step in timed:
            if step.backward_seconds is None:
                others.append((step.forward_seconds, step.number))
            else:
                backward.append((step.forward_seconds + step.backward_seconds, step.number))
        chosen = _middle_half(backward)
        return cls(chosen | _middle_half(others), chosen, frozenset(step.number for step in timed))

    def statistic(self, values: Mapping[int, float]) -> Statistic | None:
        """Of a time by step: over the timed steps."""
        timed = [value for step, value in values.items() if step in self.timed]
        return Statistic.of(timed or list(values.values()))

    def mean(self, quantity: str, values: Mapping[int, float]) -> float | None:
        """The mean of a time by step over the typical steps; a step that is not in `values` counts
        as 0. None if no typical step has it.
        """
        chosen = self.backward if quantity.startswith("backward") else self.forward
        chosen = chosen or frozenset(values)
        found = [value for step, value in values.items() if step in chosen]
        return sum(found) / len(chosen) if found else None


def _middle_half(steps: list[tuple[float, int]]) -> frozenset[int]:
    num_left_out = (len(steps) + 1) // 4 if len(steps) > 2 else 0
    kept = sorted(steps)[num_left_out : len(steps) - num_left_out]
    return frozenset(number for _, number in kept)
