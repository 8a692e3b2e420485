"""Runs a model under the log: once, or twice if the caller names labels, which a run must find."""

from dataclasses import replace
from typing import Any

import torch

from torchlens._capture.options import CaptureOptions, LogOptions, inputs_note
from torchlens._capture.session import (
    Runnable,
    Session,
    generator_states,
    restore_generators,
    session_of,
)
from torchlens._history.failure import explain
from torchlens._history.log import Log
from torchlens._history.lookup import Lookup
from torchlens._history.model_history import ModelHistory
from torchlens._history.rerun import keep_only, rerun, select_numbers
from torchlens._recording.collector import pause_collector, resume_collector
from torchlens._recording.frameworks import OtherModel
from torchlens._recording.user_code import warn_caller


def log_model(
    model: Any, input_args: Any, args: list[Any], kwargs: dict[str, Any], options: LogOptions
) -> ModelHistory:
    """Runs a model on checked arguments; `input_args` are the same as the caller gave them."""
    capture = CaptureOptions(
        transform=options.transform,
        keeps_args=options.save_function_args,
        keeps_gradients=options.save_gradients,
        random_seed=options.random_seed,
    )
    # Not a context manager: an interrupt may come after it has been entered and before its block
    # begins.
    user = object()
    try:
        pause_collector(user)
        if options.layers_to_save == "all":
            log = _run(model, args, kwargs, options, replace(capture, saves=True))
        elif options.layers_to_save == "none":
            log = _run(model, args, kwargs, options, replace(capture, saves=False))
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
    return ModelHistory(log, capture, options.keep_unsaved_layers)


def _run(
    model: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    options: LogOptions,
    capture: CaptureOptions,
) -> Log:
    return _run_session(session_of(model, capture), args, kwargs, options, capture)


def _run_session(
    session: Runnable,
    args: list[Any],
    kwargs: dict[str, Any],
    options: LogOptions,
    capture: CaptureOptions,
) -> Log:
    try:
        session.run(args, kwargs)
    except BaseException as error:
        explain(error, session.recording, capture)
        raise
    return Log(session.recording, marks_distances=options.mark_input_output_distances)


def _run_selecting(
    model: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    options: LogOptions,
    capture: CaptureOptions,
) -> Log:
    """Saves the named layers: in one run if they are modules, otherwise in a second run.

    The state of another framework's model cannot be restored, so such a model runs once: everything
    is saved, and what was not named is released.
    """
    if isinstance(model, OtherModel):
        log = _run(model, args, kwargs, options, replace(capture, saves=True))
        chosen = select_numbers(
            log, Lookup(log), options.layers_to_save, ModelHistory(log, capture).layer_list
        )
        if not isinstance(chosen, bool):
            keep_only(chosen, log.recording)
        return log
    states = generator_states()
    # The operation that made a module's output is known only when the module returns: too late to
    # keep its arguments.
    modules = (
        frozenset() if options.save_function_args else _named_modules(model, options.layers_to_save)
    )
    first = replace(
        capture, saves=False, saved_modules=modules, keeps_undo=True, keeps_gradients=False
    )
    if modules:
        first = replace(first, keeps_gradients=capture.keeps_gradients)
    session = Session(model, first)
    log = _run_session(session, args, kwargs, options, first)
    history = ModelHistory(log, first)
    try:
        saves = select_numbers(log, Lookup(log), options.layers_to_save, history.layer_list)
    except BaseException:
        session.restore_memory()
        restore_generators(states)
        raise
    if modules and not session.is_uncertain:
        return log
    session.restore_memory()
    restore_generators(states)
    log.take(rerun(log, capture, model, args, kwargs, saves, options.random_seed))
    return log


def _named_modules(model: torch.nn.Module, layers: Any) -> frozenset[str]:
    """The module addresses in `layers` if it consists of nothing else; otherwise an empty set."""
    if callable(layers):
        return frozenset()
    keys = layers if isinstance(layers, list | tuple | set | frozenset) else [layers]
    addresses = {address for address, _ in model.named_modules() if address}
    names = [key for key in keys if isinstance(key, str) and key.partition(":")[0] in addresses]
    return frozenset(names) if len(names) == len(keys) else frozenset()
