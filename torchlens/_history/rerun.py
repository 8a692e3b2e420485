"""Running a model again to save tensors of a graph that is known already."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchlens._capture.options import CaptureOptions, Transform, check_inputs, checked_layers
from torchlens._capture.session import session_of
from torchlens._history.failure import explain
from torchlens._history.log import Log
from torchlens._history.lookup import Lookup
from torchlens._recording.frameworks import as_model
from torchlens._recording.functions import StandIn
from torchlens._recording.recording import Recording, Row, located
from torchlens._recording.user_code import source_line
from torchlens._text.lazy_import import lazy_function
from torchlens.errors import DifferentGraphError

if TYPE_CHECKING:
    from torchlens._graph.edges import find_edges
    from torchlens._graph.order import order_of_rows
else:
    find_edges = lazy_function("torchlens._graph.edges", "find_edges")
    order_of_rows = lazy_function("torchlens._graph.order", "order_of_rows")


def select_numbers(
    log: Log, lookup: Lookup, layers_to_save: Any, entries: list[Any]
) -> bool | frozenset[int]:
    """Which entries of the recording `layers_to_save` means: all (True), none (False), or their
    numbers.
    """
    layers_to_save = checked_layers(layers_to_save)
    if layers_to_save in ("all", "none"):
        return bool(layers_to_save == "all")
    if isinstance(layers_to_save, Callable):  # type: ignore[arg-type]
        chosen = [entry._entry for entry in entries if layers_to_save(entry)]
    else:
        keys = (
            layers_to_save
            if isinstance(layers_to_save, list | tuple | set | frozenset)
            else [layers_to_save]
        )
        chosen = [entry for key in keys for entry in lookup.many(key)]
    return frozenset(log.graph.recorded[entry] for entry in chosen)


def rerun(
    log: Log,
    options: CaptureOptions,
    model: Any,
    input_args: Any,
    input_kwargs: Mapping[str, Any] | None,
    saves: bool | frozenset[int],
    random_seed: int | None,
) -> Recording:
    """The recording of another run, after seeing that it did what `log` says."""
    postfunc = (
        options.transform.activation_postfunc
        if isinstance(options.transform, Transform)
        else options.transform
    )
    if isinstance(postfunc, StandIn):
        raise ValueError(
            "New tensors cannot be saved as the old ones were, by activation_postfunc. "
            f"{postfunc.explanation} Log the model anew: log_forward_pass(model, ..., "
            "activation_postfunc=...)."
        )
    model = as_model(model, input_args, input_kwargs)
    args, kwargs = check_inputs(model, input_args, input_kwargs)
    # Numbers of entries are those of the run where threads took turns: what is saved must be chosen
    # afterwards.
    saves_all = saves if isinstance(saves, bool) else bool(log.recording.branches)
    options = replace(
        options,
        saves=saves_all or saves,
        saved_modules=frozenset(),
        keeps_undo=False,
        random_seed=random_seed,
    )
    session = session_of(model, options)
    try:
        session.run(args, kwargs)
    except BaseException as error:
        explain(error, session.recording, options)
        raise
    recording = session.recording
    before, after = _order_of(log.recording), _order_of(recording)
    _check_same(log.recording, recording, before, after)
    if saves_all and not isinstance(saves, bool):
        keep_only({new for old, new in zip(before, after, strict=True) if old in saves}, recording)
    return recording


def _order_of(recording: Recording) -> Sequence[int]:
    """The rows in an order that is the same in every run."""
    if not recording.branches:
        return range(len(recording.rows))
    return order_of_rows(recording, find_edges(recording).parents)


def keep_only(numbers: AbstractSet[int], recording: Recording) -> None:
    """Lets go of the saved values of all other entries."""
    for number in set(range(len(recording.rows))).difference(numbers):
        recording.values[number] = None
        recording.versions[number] = -1
        recording.saved_args.pop(number, None)


def _check_same(
    before: Recording, after: Recording, order_before: Sequence[int], order_after: Sequence[int]
) -> None:
    num_params = len(before.params)
    old_place, new_place = _places(order_before), _places(order_after)
    for number, (old_number, new_number) in enumerate(zip(order_before, order_after, strict=False)):
        old, new = before.rows[old_number], after.rows[new_number]
        if (
            old.operation.name != new.operation.name
            or old.output_index != new.output_index
            or (
                (old.references != new.references or old_place or new_place)
                and _logged_references(old, num_params, old_place)
                != _logged_references(new, num_params, new_place)
            )
        ):
            raise DifferentGraphError(
                f"This run of {after.model_name} differs from the logged one at step {number}: the "
                f"logged run did {_step(before, old)}, this one {_step(after, new)}. If a model's "
                "operations depend on its input or on its own state, log it again: "
                "log_forward_pass(model, ...)."
            )
    if len(before.rows) != len(after.rows):
        raise DifferentGraphError(
            f"This run of {after.model_name} did {len(after.rows)} steps and the logged one "
            f"{len(before.rows)}; they agree up to there. Log it again: log_forward_pass(model, "
            "...)."
        )


def _places(order: Sequence[int]) -> dict[int, int]:
    """Number of a row → its place in the order; empty where that is the same."""
    return {} if isinstance(order, range) else {number: place for place, number in enumerate(order)}


def _logged_references(row: Row, num_params: int, places: dict[int, int]) -> list[tuple[Any, int]]:
    found = located(row.references)
    return [
        (location, places.get(number, number))
        for location, number in found
        if number >= -num_params
    ]


def _step(recording: Recording, row: Row) -> str:
    module = recording.module_calls[row.module_call].address
    place = "" if row.code is None else f" at {source_line(row.code, row.instruction)}"
    inside = f" in module {module!r}" if module else ""
    return f"{row.operation.name}{inside}{place}"
