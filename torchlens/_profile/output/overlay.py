"""What was measured, by layer label and module address: to colour drawings and the viewer by."""

from torchlens._history.overlay import Overlay
from torchlens._profile.output.quantities import (
    Quantity,
    QuantityName,
    call_values,
    checked_quantity,
    module_value,
    operation_values,
)
from torchlens._profile.records import Measurements, ModuleRecord


def overlay(measurements: Measurements, quantity: QuantityName) -> Overlay:
    """A number for each module and, at operation level, each layer, for `vis_color_by=` and
    `explore(overlays=)`.

    Of several kinds of steps, that with the most steps that has any of it.

    >>> history.render_graph(vis_color_by=profile.overlay('forward_time'))
    """
    wanted = checked_quantity(quantity, "The quantity of an overlay")
    found = [_overlay(alike, wanted) for _, alike in measurements.usual_first()]
    known = [each for each in found if each]
    if not known:
        raise ValueError(f"This profile has no {wanted.title}. {_reason(measurements, wanted)}")
    return next(
        (each for each in known if any(each.values())), known[0]
    )  # nothing runs backward in an evaluation


def _overlay(measurements: Measurements, quantity: Quantity) -> Overlay:
    values: dict[str, float] = {}
    own: dict[str, float] = {}
    for record in measurements.root.walk():
        values.update(_values(record, quantity))
        own.update(_own_values(record, quantity))
    values |= operation_values(measurements, quantity)
    return Overlay(
        values, title=quantity.title, unit=quantity.unit, is_sum=quantity.is_sum, own=own
    )


def _values(record: ModuleRecord, quantity: Quantity) -> dict[str, float]:
    if quantity.call is not None:
        return call_values(record, quantity, quantity.call)
    value = module_value(record, quantity)
    return {} if value is None else {record.address: value}


def _own_values(record: ModuleRecord, quantity: Quantity) -> dict[str, float]:
    """What operations outside inner modules have: what was measured without those, or what they
    leave over.
    """
    if quantity.own_call is not None:
        return call_values(record, quantity, quantity.own_call)
    if not record.children:
        return _values(record, quantity)
    value = module_value(record, quantity)
    is_single = record.num_calls == 1
    if value is None or not quantity.is_sum or not is_single:
        return {}
    inside = [module_value(child, quantity) for child in record.children]
    return {record.address: max(0.0, value - sum(part for part in inside if part is not None))}


def _reason(measurements: Measurements, quantity: Quantity) -> str:
    if not measurements.steps:
        return "The model was not called while it was measured."
    if "backward" in quantity.title and all(
        step.backward_seconds is None for step in measurements.steps
    ):
        return "No backward pass ran while it was measured."
    return (
        " ".join(measurements.problems)
        or "It was not measured: see the options of torchlens.profile."
    )
