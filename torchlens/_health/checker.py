"""Checks values and gradients while they exist, and keeps the statistics that findings need."""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

import torch

from torchlens._health.activations import ActivationStatistics, Activity
from torchlens._health.checking import Checking, GradientSources, Inputs, Place
from torchlens._health.live_nonfinite import NonFiniteFindings
from torchlens._health.nonfinite import NonFinite
from torchlens._health.thresholds import checked_thresholds
from torchlens._text.error_wording import check_choice

CHECKS = ("nonfinite", "health")


def make_checker(
    check: str,
    stop: bool = False,
    thresholds: Mapping[str, Any] | None = None,
    sees_modules_alone: bool = False,
) -> "HealthChecker":
    """The checker for `check=`: 'nonfinite' finds NaN and Inf, 'health' also checks activations
    and gradients.
    """
    check_choice("check", check, CHECKS)
    return HealthChecker(
        stop, checked_thresholds(thresholds), check == "health", sees_modules_alone
    )


class HealthChecker:
    """A Checker. Its results are read when measuring is over."""

    def __init__(
        self,
        stop: bool,
        thresholds: Mapping[str, float],
        is_full: bool,
        sees_modules_alone: bool = False,
    ) -> None:
        self.is_full = is_full
        # Parameter address → the norm of its gradient, for each that arrived.
        self.gradient_norms: dict[str, list[float]] = {}
        # Parameter address → the norm it had when its first gradient arrived.
        self.parameter_norms: dict[str, float] = {}
        self._origins = NonFiniteFindings(stop, sees_modules_alone)
        self._activations = ActivationStatistics(thresholds["saturation_margin"])
        self._is_everything = True  # whether everything is checked in the step that has begun last
        self._labels: dict[tuple[int, int], str | None] = {}  # of activations, by step and entry

    @property
    def first_nonfinite(self) -> NonFinite | None:
        """The first operation that made a NaN or an Inf; one of which nothing came only if there is
        no other.
        """
        found = [(record, is_lasting) for record, is_lasting in self.nonfinite if record.is_certain]
        return next(
            (record for record, is_lasting in found if is_lasting), found[0][0] if found else None
        )

    @property
    def nonfinite(self) -> list[tuple[NonFinite, bool]]:
        """All operations that did, each once, and whether it came through to an output or a
        gradient.
        """
        return self._origins.told()

    def activities(self) -> list[tuple[str, Activity]]:
        """The statistics of each activation, by its label; without a log, by the module's
        address.
        """
        return [
            (self._name(activity.place), activity) for activity in self._activations.activities()
        ]

    def _name(self, place: Place) -> str:
        label = None if place.entry is None else self._labels.get((place.step, place.entry))
        return (
            label
            or (place.address if place.pass_num == 1 else f"{place.address}:{place.pass_num}")
            or place.operation
        )

    # -- while measuring
    # ---------------------------------------------------------------------------------------------

    def on_step(self, step: int, checking: Checking, has_grad: bool, has_stepped: bool) -> None:
        self._is_everything = checking is Checking.EVERYTHING
        self._origins.on_step(step, checking, has_grad, has_stepped)

    def on_boundary(self, place: Place, tensor: torch.Tensor, node: int | None) -> None:
        self._origins.on_boundary(place, tensor, node)

    def on_entered(self, place: Place, inputs: Inputs) -> None:
        self._origins.on_entered(place, inputs)

    def on_value(self, place: Place, tensor: torch.Tensor, inputs: Inputs) -> None:
        self._origins.on_value(place, tensor, inputs)
        if self.is_full and self._is_everything:
            self._activations.on_value(place, tensor, inputs)

    def on_gradient(self, place: Place, gradient: torch.Tensor, made_of: GradientSources) -> None:
        self._origins.on_gradient(place, gradient, made_of)

    def on_parameter(self, place: Place, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if not self.is_full or place.parameter is None:
            return
        self.gradient_norms.setdefault(place.parameter, []).append(_norm(gradient))
        if place.parameter not in self.parameter_norms:
            self.parameter_norms[place.parameter] = _norm(parameter)

    def finish(self, label_of: Callable[[int, int], str | None]) -> None:
        places = [activity.place for activity in self._activations.activities()]
        self._labels = {
            (place.step, place.entry): label_of(place.step, place.entry)
            for place in places
            if place.entry is not None
        }
        self._origins.finish(label_of)


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
