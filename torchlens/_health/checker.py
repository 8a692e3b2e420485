"""Checks values and gradients while they exist, and keeps the statistics that findings need."""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

import torch

from torchlens._health.activations import ActivationStatistics, Activity
from torchlens._health.checking import CheckedPlace, Checking, GivenInputs
from torchlens._health.live_nonfinite import NonFiniteFindings
from torchlens._health.thresholds import checked_thresholds


class HealthChecker:
    """Checks values and gradients during the steps of a profile; its results are read afterwards.

    `check='nonfinite'` finds NaN and Inf, `check='health'` also gathers the statistics of
    activations and gradients. The methods `on_...`, also those of `origins`, are called with
    gradient recording off, and hidden from the log; they change nothing and keep no tensor.
    NonFiniteError propagates to the user and so stops the training; any other exception ends
    checking and becomes a problem.
    """

    def __init__(
        self,
        check: str,
        stop: bool = False,
        thresholds: Mapping[str, Any] | None = None,
        sees_modules_alone: bool = False,
    ) -> None:
        self.is_full = check == "health"
        # Parameter address → the norm of its gradient, for each that arrived.
        self.gradient_norms: dict[str, list[float]] = {}
        # Parameter address → the norm it had when its first gradient arrived.
        self.parameter_norms: dict[str, float] = {}
        self.origins = NonFiniteFindings(stop, sees_modules_alone)
        margin = checked_thresholds(thresholds)["saturation_margin"]
        self._activations = ActivationStatistics(margin)
        self._is_everything = True  # whether everything is checked in the current step
        self._labels: dict[tuple[int, int], str | None] = {}  # of activations, by step and entry

    def activities(self) -> list[tuple[str, Activity]]:
        """The statistics of each activation, by its label; without a log, by the module's
        address.
        """
        return [
            (self._name(activity.place), activity) for activity in self._activations.activities()
        ]

    def _name(self, place: CheckedPlace) -> str:
        label = None if place.entry is None else self._labels.get((place.step, place.entry))
        return (
            label
            or (place.address if place.pass_num == 1 else f"{place.address}:{place.pass_num}")
            or place.operation
        )

    # -- while measuring
    # ---------------------------------------------------------------------------------------------

    def on_step(self, step: int, checking: Checking, has_grad: bool, has_stepped: bool) -> None:
        """A step begins. If `checking` is NOTHING, no other method is called during the step.

        `has_grad`: autograd records. `has_stepped`: an optimizer made a step since the last step.
        """
        self._is_everything = checking is Checking.EVERYTHING
        self.origins.on_step(step, checking, has_grad, has_stepped)

    def on_value(self, place: CheckedPlace, tensor: torch.Tensor, inputs: GivenInputs) -> None:
        """After an operation (at module level: a module) made `tensor` from `inputs`.

        With `Checking.NONFINITE`, it is called for inner modules only if a result is not finite.
        """
        self.origins.on_value(place, tensor, inputs)
        if self.is_full and self._is_everything:
            self._activations.on_value(place, tensor, inputs)

    def on_parameter(
        self, place: CheckedPlace, parameter: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        """A backward pass gives a parameter a gradient: that of this pass alone."""
        if not self.is_full or place.parameter is None:
            return
        self.gradient_norms.setdefault(place.parameter, []).append(_norm(gradient))
        if place.parameter not in self.parameter_norms:
            self.parameter_norms[place.parameter] = _norm(parameter)

    def finish(self, label_of: Callable[[int, int], str | None]) -> None:
        """Measuring is over. `label_of(step, entry)` returns layer labels."""
        places = [activity.place for activity in self._activations.activities()]
        self._labels = {
            (place.step, place.entry): label_of(place.step, place.entry)
            for place in places
            if place.entry is not None
        }
        self.origins.finish(label_of)


def _norm(tensor: torch.Tensor) -> float:
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.is_sparse else values.to_dense()
    if values.dtype is torch.float32 and values.is_contiguous():
        flat = values.view(-1)
        square = float(torch.dot(flat, flat))  # twice as fast; may overflow where the norm does not
        if square < float("inf"):
            return sqrt(square)
    # Squares of numbers beyond 1e19 are beyond float32, the norm is not.
    dtype = torch.complex128 if values.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(values, dtype=dtype).real)
