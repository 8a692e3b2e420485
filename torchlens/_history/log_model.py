"""Runs a model under the log: the first time, or again for another input. If the model raises, its
exception gets a note and the log so far.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torchlens._capture.options import (
    CaptureOptions,
    LogOptions,
    Transform,
    check_inputs,
    checked_layers,
    inputs_note,
)
from torchlens._capture.selection import can_exclude, keys_in
from torchlens._capture.session import session_of
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._history.lookup import Lookup
from torchlens._history.model_history import ModelHistory
from torchlens._recording.called_model import model_of
from torchlens._recording.frameworks import OtherModel
from torchlens._recording.functions import StandIn
from torchlens._recording.garbage_collector import pause_collector, resume_collector
from torchlens._recording.origin import version_of
from torchlens._recording.recording import Recording, Row, located
from torchlens._recording.trees import named_tensors
from torchlens._recording.user_code import source_line, warn_caller
from torchlens._recording.wrappers import why_valueless
from torchlens._text.lazy_import import lazy_function
from torchlens.errors import DifferentGraphError

if TYPE_CHECKING:
    from torchlens._graph.edges import find_edges, order_of_rows
else:
    find_edges = lazy_function("torchlens._graph.edges", "find_edges")
    order_of_rows = lazy_function("torchlens._graph.edges", "order_of_rows")


def log_model(
    model: Any, input_args: Any, args: list[Any], kwargs: dict[str, Any], options: LogOptions
) -> ModelHistory:
    """Runs a model on checked arguments; `input_args` are the same as the caller gave them."""
    history, _ = log_call(model, input_args, args, kwargs, options, needs_output=False)
    return history


def log_call(
    model: Any,
    input_args: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    options: LogOptions,
    needs_output: bool = True,
) -> tuple[ModelHistory, Any]:
    """The same, with what the model returned, if it is needed.

    An output that is not needed is dropped during the run: while the recorder still holds the nodes
    of a very deep graph, torch does not overflow its stack in freeing it.
    """
    capture = CaptureOptions(
        transform=options.transform,
        keeps_args=options.save_function_args,
        keeps_gradients=options.save_gradients,
        random_seed=options.random_seed,
        keeps_output=needs_output or options.layers_to_save != "none",
    )
    # Not a context manager: an interrupt may come after it has been entered and before its block
    # begins.
    user = object()
    try:
        pause_collector(user)
        if options.layers_to_save in ("all", "none"):
            saves = options.layers_to_save == "all"
            recording = _run(model, args, kwargs, replace(capture, saves=saves))
            log = Log(recording, capture)
        else:
            log = _run_selecting(model, args, kwargs, options, capture)
    except Exception as error:
        note = inputs_note(model, input_args, args)
        if note is not None:
            error.add_note(note)
        raise
    finally:
        try:
            resume_collector(user)
        finally:  # again, because an interrupt may cut the first call short
            resume_collector(user)
    for message in log.recording.warnings:
        warn_caller(f"torchlens: {message}.")
    log.marks_distances = options.mark_input_output_distances
    log.keeps_unsaved = options.keep_unsaved_layers
    log.note_values_changed()
    output = log.recording.output
    if not _may_keep_output(log.recording, options):
        log.recording.output = None
    return ModelHistory(log), output


def _may_keep_output(recording: Recording, options: LogOptions) -> bool:
    """Whether a history may hold the output: not if it would keep tensors, or the autograd graph,
    that were not to be kept.
    """
    if options.layers_to_save == "none":
        return not recording.outputs
    if not options.detach_saved_tensors or recording.framework != "torch":
        return True
    return not any(tensor.requires_grad for _, tensor in named_tensors(recording.output))


def _run(model: Any, args: list[Any], kwargs: dict[str, Any], capture: CaptureOptions) -> Recording:
    session = session_of(model, capture)
    try:
        session.run(args, kwargs)
    except BaseException as error:
        explain(error, session.recording, capture)
        raise
    return session.recording


def _run_selecting(
    model: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    options: LogOptions,
    capture: CaptureOptions,
) -> Log:
    """Saves the named layers, in one run.

    Whatever could be meant is saved; the rest of it is released when the graph is known. Only then
    are the values transformed, since a transform may not take every operation's.
    """
    keys: frozenset[str] = frozenset()
    if not isinstance(model, OtherModel) and can_exclude(options.layers_to_save):
        keys = frozenset(keys_in(options.layers_to_save))
    run = replace(capture, saves=not keys, keys=keys, transform=None)
    recording = _run(model, args, kwargs, run)
    log = Log(recording, capture, marks_distances=options.mark_input_output_distances)
    chosen = select_numbers(log, Lookup(log), options.layers_to_save)
    if not isinstance(chosen, bool):
        keep_only(chosen, recording)
    if capture.transform is not None:
        _transform_values(recording, capture.transform)
    return log


# -- running it again ------------------------------------------------------------------------------


class _EntryToChoose(LayerEntry):
    """What a predicate of `layers_to_save` is given: an entry whose value is not saved yet."""

    __slots__ = ()

    @property
    def tensor_contents(self) -> Any:
        raise ValueError(
            "layers_to_save chooses layers before their values are saved: its function can read "
            "names, shapes, modules, parameters and edges of an entry, but no tensor_contents. To "
            "choose by value, save all layers and select entries of the history."
        )


def select_numbers(log: Log, lookup: Lookup, layers_to_save: Any) -> bool | frozenset[int]:
    """The rows of the recording that `layers_to_save` means: all (True), none (False), or their
    numbers.
    """
    layers_to_save = checked_layers(layers_to_save)
    if layers_to_save in ("all", "none"):
        return bool(layers_to_save == "all")
    if isinstance(layers_to_save, Callable):  # type: ignore[arg-type]
        chosen = [entry for entry in log.visible if layers_to_save(_EntryToChoose(log, entry))]
    else:
        chosen = [entry for key in keys_in(layers_to_save) for entry in lookup.many(key)]
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
    model = model_of(model, input_args, input_kwargs)
    args, kwargs = check_inputs(model, input_args, input_kwargs)
    # Numbers of entries are those of the run where threads took turns: what is saved must be chosen
    # afterwards.
    saves_all = saves if isinstance(saves, bool) else bool(log.recording.branches)
    options = replace(
        options,
        saves=saves_all or saves,
        random_seed=random_seed,
    )
    recording = _run(model, args, kwargs, options)
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


def _transform_values(recording: Recording, transform: Callable[[torch.Tensor], Any]) -> None:
    """Transforms the saved values, except those that were changed in place since."""
    for number, value in enumerate(recording.values):
        version = recording.versions[number]
        if value is not None and (version < 0 or version == version_of(value)):
            recording.values[number] = new = transform(value)
            is_tensor = isinstance(new, torch.Tensor)
            recording.versions[number] = version_of(new) if is_tensor else -1


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


# -- if the model raises ---------------------------------------------------------------------------


def explain(error: BaseException, recording: Recording, options: CaptureOptions) -> None:
    """Adds a note that names module, operation, argument shapes and source line; hangs the log so
    far on the exception.
    """
    history = ModelHistory(Log(recording, options))
    try:
        error.add_note(_note(recording, len(history)))
        if hint := _hint(error, recording):
            error.add_note(f"torchlens: {hint}")
        error.partial_history = history  # type: ignore[attr-defined]
    except AttributeError:  # an exception that takes no attributes, such as a frozen dataclass
        return


# torch's messages if an operation needs values of a tensor that has none, and if tensors with
# values meet tensors without.
_WANTS_VALUES = re.compile(
    r"\bmeta\b|register_meta|FakeTensor|DataDependent|DynamicOutputShape", re.IGNORECASE
)
_MIXES = re.compile("expected device|same device|convert all Tensors to FakeTensors")


def _hint(error: BaseException, recording: Recording) -> str:
    """What to do about a tensor without values, if the model failed because of one."""
    text = f"{type(error).__name__} {error}"
    is_said = any("output_device" in note for note in getattr(error, "__notes__", ()))
    if not isinstance(error, Exception) or is_said or not _WANTS_VALUES.search(text):
        return ""
    reasons = _reasons_without_values(recording)
    known = [reason for reason in reasons if reason is not None]
    if not known:
        return ""
    if None in reasons or _MIXES.search(text):
        return (
            "some of the tensors that came together here, the model's or its inputs, have values, "
            f"and others have none: they are {', '.join(known)}. Make all alike: model.to('meta') "
            "and x.to('meta'), or a model with its weights."
        )
    return (
        f"a tensor that is {' or '.join(known)} has no values. Where a model needs some to go on "
        "(item(), an if, nonzero, a mask as an index), it can be logged up to there; "
        "partial_history has that."
    )


def _reasons_without_values(recording: Recording) -> dict[str | None, None]:
    """Why parameters, inputs and buffers have no values; None among them if some have values."""
    sources = [number for _, number in (*recording.inputs, *recording.buffers)]
    tensors = [*recording.params, *(recording.values[number] for number in sources)]
    return dict.fromkeys(why_valueless(tensor) for tensor in tensors if tensor is not None)


def _note(recording: Recording, num_entries: int) -> str:
    failure = recording.failure
    words = []
    if failure is not None:
        address = recording.module_calls[failure.module_call].address
        kind = recording.module_classes.get(address, "")
        words.append(
            f"raised in module {address!r} ({kind})"
            if address
            else f"raised in {recording.model_name}"
        )
        if failure.operation is not None:
            words.append(f"by the operation {failure.operation.name}({failure.arguments})")
        if failure.code is not None:
            words.append(f"called at {source_line(failure.code, failure.instruction)}")
    count = "1 logged tensor" if num_entries == 1 else f"{num_entries} logged tensors"
    words.append(f"after {count}, which the exception holds as partial_history")
    return f"torchlens: {', '.join(words)}."
