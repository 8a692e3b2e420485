"""Units that are always zero, and activations that lie at their limits: statistics and rules."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchlens._health.checking import CheckedPlace, GivenInputs
from torchlens._health.finding import Finding
from torchlens._health.tensor_statistics import has_numbers

# Activations that are exactly zero for a whole range of inputs.
ZEROING = frozenset({"relu", "relu6", "threshold", "hardswish"})
# Activations with limits, and the limits.
BOUNDED: dict[str, tuple[float, float]] = {
    "sigmoid": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "hardtanh": (-1.0, 1.0),
    "softmax": (0.0, 1.0),
}
# How many numbers of a tensor are checked for saturation.
_SAMPLE = 4096
# Autograd's nodes after which the units are the second dimension of three, and the last of four.
_CHANNELS_FIRST = ("Convolution", "BatchNorm", "GroupNorm", "InstanceNorm")
_CHANNELS_LAST = ("Addmm", "Mm", "UnsafeView", "LayerNorm", "Linear")


_DEAD_ADVICE = (
    "They learn nothing. A lower learning rate, a smaller or zero bias, normalisation before the "
    "activation, or a leaky one helps."
)
_SATURATION_ADVICE = (
    "Hardly any gradient comes through there. Smaller weights or inputs, or normalisation before "
    "it, help."
)
_SOFTMAX_ADVICE = (
    "One value takes all, and hardly any gradient comes through. That is fine in a confident "
    "classifier; in attention, scale the scores down."
)


def activation_kind(name: str) -> str:
    """The name of an activation, from that of its function or class: 'leakyrelu'."""
    return name.lower().replace("_", "")


def dead_units(
    where: str, module: str, share: float, limits: Mapping[str, float], text: str
) -> list[Finding]:
    """A finding if a large share of the units is always zero."""
    if not share >= limits["dead_share"]:
        return []
    return [
        Finding(
            kind="dead units",
            severity="warning",
            where=where,
            module=module,
            number=share,
            threshold=limits["dead_share"],
            text=text,
            advice=_DEAD_ADVICE,
        )
    ]


def saturation(
    where: str, module: str, kind: str, share: float, num_values: int, limits: Mapping[str, float]
) -> list[Finding]:
    """A finding if a large share of the values lies at the limits of the activation."""
    if not share > limits["saturated_share"] or num_values < limits["min_values"]:
        return []
    is_softmax = kind == "softmax"
    return [
        Finding(
            kind="saturated activation",
            severity="info" if is_softmax else "warning",
            where=where,
            module=module,
            number=share,
            threshold=limits["saturated_share"],
            text=f"{share:.0%} of the values of {kind} lie at its limits (within "
            f"{limits['saturation_margin']:.2g} of the range).",
            advice=_SOFTMAX_ADVICE if is_softmax else _SATURATION_ADVICE,
        )
    ]


@dataclass(slots=True)
class Activity:
    """The statistics of one activation over the steps."""

    place: CheckedPlace
    kind: str  # the activation's name in lower case, without underscores
    num_steps: int = 0
    is_comparable: bool = True  # not once the number of its units changed
    alive: torch.Tensor | None = None  # which units ever gave something other than zero
    num_alive: int = 0
    values_per_unit: int = 0
    num_sampled: int = 0
    num_at_limits: int = 0

    @property
    def num_units(self) -> int:
        return 0 if self.alive is None else self.alive.numel()

    @property
    def num_dead(self) -> int:
        return self.num_units - self.num_alive

    @property
    def saturated_share(self) -> float:
        return self.num_at_limits / self.num_sampled if self.num_sampled else 0.0


class ActivationStatistics:
    """Gathers an Activity for each activation of the model."""

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self._found: dict[tuple[Any, ...], Activity] = {}
        self._step = -1
        self._seen: dict[tuple[Any, ...], int] = {}

    def on_value(self, place: CheckedPlace, tensor: torch.Tensor, inputs: GivenInputs) -> None:
        kind = activation_kind(place.operation)
        is_zeroing = kind in ZEROING
        if (
            not (is_zeroing or kind in BOUNDED)
            or not tensor.is_floating_point()
            or not tensor.numel()
        ):
            return
        if tensor.layout is not torch.strided or tensor.is_nested or not has_numbers(tensor):
            return
        activity = self._activity(place, kind)
        activity.num_steps += 1
        if is_zeroing:
            _add_living(activity, tensor)
        else:
            self._add_saturation(activity, kind, tensor, inputs)

    def activities(self) -> list[Activity]:
        """All of them, in the order in which they were first seen."""
        return list(self._found.values())

    def _activity(self, place: CheckedPlace, kind: str) -> Activity:
        """By module, pass of it, and its number among its kind there: the same from step to
        step.
        """
        if place.step != self._step:
            self._step = place.step
            self._seen.clear()
        where = (place.address, place.pass_num, kind)
        number = self._seen[where] = self._seen.get(where, 0) + 1
        activity = self._found.get((*where, number))
        if activity is None:
            activity = self._found[*where, number] = Activity(place, kind)
        activity.place = place
        return activity

    def _add_saturation(
        self, activity: Activity, kind: str, tensor: torch.Tensor, inputs: GivenInputs
    ) -> None:
        low, high = BOUNDED[kind]
        kwargs = inputs.kwargs or {}
        if kind == "softmax":
            self._add_certainty(activity, tensor, inputs.args, kwargs)
            return
        if kind == "hardtanh":
            if activity.place.entry is None:  # of a module, the limits are not known
                return
            low, high = _limits(inputs.args, kwargs, low, high)
        sample = _sample(tensor)
        margin = self._margin * (high - low)
        at_limits = (sample >= high - margin).logical_or_(sample <= low + margin)
        activity.num_sampled += sample.numel()
        activity.num_at_limits += int(at_limits.sum())

    def _add_certainty(
        self, activity: Activity, tensor: torch.Tensor, args: Any, kwargs: dict[str, Any]
    ) -> None:
        """A softmax is saturated where one value takes all: its maxima are counted."""
        dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
        if not isinstance(dim, int) or tensor.dim() == 0 or tensor.shape[dim] < 2:
            return
        sample = _sample(tensor.amax(dim))
        activity.num_sampled += sample.numel()
        activity.num_at_limits += int((sample >= 1.0 - self._margin).sum())


def _add_living(activity: Activity, tensor: torch.Tensor) -> None:
    """Updates which units have ever given something other than zero."""
    axis = _unit_axis(tensor)
    if axis is None or not activity.is_comparable:
        return
    num_units = tensor.shape[axis]
    activity.values_per_unit += tensor.numel() // num_units
    if activity.alive is None:
        activity.alive = torch.zeros(num_units, dtype=torch.bool)
    elif activity.alive.numel() != num_units:
        activity.is_comparable = False
        return
    if activity.num_alive == num_units:
        return
    activity.alive = _living(tensor, axis, activity.alive)
    activity.num_alive = int(activity.alive.sum())


def _living(tensor: torch.Tensor, axis: int, known: torch.Tensor) -> torch.Tensor:
    """Which units along `axis` are not zero somewhere, or are `known` not to be.

    The first sample of a batch shows it for most units; only the others are read in full.
    """
    others = [dim for dim in range(tensor.dim()) if dim != axis]
    first = tensor.narrow(0, 0, 1) if others[0] == 0 else tensor
    living = (first != 0).any(dim=others).cpu().logical_or_(known)
    doubtful = (~living).nonzero().flatten()
    if doubtful.numel():
        rest = tensor.index_select(axis, doubtful.to(tensor.device))
        living[doubtful] = (rest != 0).any(dim=others).cpu()
    return living


def _unit_axis(tensor: torch.Tensor) -> int | None:
    """Which dimension counts the units: the channels of an image, the features of anything else."""
    num_dims = tensor.dim()
    if num_dims < 2:
        return None
    maker = _maker(tensor)
    if num_dims >= 4:
        return num_dims - 1 if maker.startswith(_CHANNELS_LAST) else 1
    if num_dims == 3 and any(name in maker for name in _CHANNELS_FIRST):
        return 1
    return num_dims - 1


def _maker(tensor: torch.Tensor) -> str:
    """The name of the autograd node of the activation's input; '' if gradients are off."""
    node = tensor.grad_fn
    # The activation's own node, then, after a linear layer of three dimensions, a view.
    for _ in range(2):
        if node is None or not node.next_functions:
            return ""
        node = node.next_functions[0][0]
        if node is not None and not node.name().startswith("ViewBackward"):
            break
    return "" if node is None else node.name()


def _limits(args: Any, kwargs: dict[str, Any], low: float, high: float) -> tuple[float, float]:
    given = (
        args[1] if len(args) > 1 else kwargs.get("min_val", low),
        args[2] if len(args) > 2 else kwargs.get("max_val", high),
    )
    return (
        (float(given[0]), float(given[1]))
        if all(isinstance(each, int | float) for each in given)
        else (low, high)
    )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """At most a few thousand of the numbers, evenly spread."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]
