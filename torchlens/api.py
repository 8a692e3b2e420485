"""The public functions: check the options, then capture → graph → history."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Unpack

import torch

from torchlens.capture.collector import pause_collector, resume_collector
from torchlens.capture.memory_watch import expected_bytes, warn_of_size
from torchlens.capture.session import (
    CaptureOptions,
    Runnable,
    Session,
    generator_states,
    restore_generators,
    session_of,
)
from torchlens.capture.trees import named_tensors
from torchlens.capture.user_code import warn_caller
from torchlens.foreign_names import OPTION_NAMES, classic_drawing_options, no_such_name
from torchlens.frameworks import Model, OtherModel, as_model, title_of
from torchlens.history.base_history import LayersToSave
from torchlens.history.failure import explain
from torchlens.history.log import Log
from torchlens.history.lookup import Lookup
from torchlens.history.rerun import keep_only, rerun, select_numbers
from torchlens.lazy_import import lazy_function
from torchlens.model_history import ModelHistory
from torchlens.options import LogOptions, check_inputs, check_model, forward_names, inputs_note

if TYPE_CHECKING:
    from torchlens.draw.drawing import draw
    from torchlens.draw.options import DrawKeywords, DrawOptions, VisOpt, draw_options
else:
    draw = lazy_function("torchlens.draw.drawing", "draw")
    draw_options = lazy_function("torchlens.draw.options", "draw_options")

__all__ = ["get_model_metadata", "log_forward_pass", "show_model_graph"]


def log_forward_pass(
    model: Model,
    input_args: Any = None,
    input_kwargs: Mapping[str, Any] | None = None,
    layers_to_save: LayersToSave = "all",
    keep_unsaved_layers: bool = True,
    output_device: str | torch.device | int = "same",
    activation_postfunc: Callable[[torch.Tensor], Any] | None = None,
    mark_input_output_distances: bool = False,
    detach_saved_tensors: bool = False,
    save_function_args: bool = False,
    save_gradients: bool = False,
    vis_opt: "VisOpt | None" = None,
    *by_position: Any,
    random_seed: int | None = None,
    **vis_options: "Unpack[DrawKeywords]",
) -> ModelHistory:
    """Runs one forward pass and returns a log of every operation in it.

    The log changes nothing: the model's result, its state, torch and the random generators are the same as without it.

    >>> history = log_forward_pass(model, x)
    >>> history['conv2d_3_7'].tensor_contents

    Args:
        model: Any `nn.Module`; or a JAX function, an Equinox or nnx module, the `apply` of a linen module, or a dict of
            layers.
        input_args: A tensor, or a list or tuple of positional arguments. If `forward` takes only one argument, a tuple is
            that argument. To pass a list as the only argument, write `[the_list]`.
        input_kwargs: Keyword arguments of the model.
        layers_to_save: `'all'`, `'none'`, a key or a list of keys (a label, module, address, number, or part of a
            label), or a function of a layer entry. Labels are known only after a pass, so naming labels takes two passes,
            with generators, inputs and buffers restored in between; module addresses take one (two with
            `save_function_args`).
        keep_unsaved_layers: If False, the history lists only saved layers.
        output_device: Where to put saved tensors: `'same'` or a torch device.
        activation_postfunc: Applied to each tensor that is saved.
        mark_input_output_distances: Whether to compute the entries' distances from input and output.
        detach_saved_tensors: Whether to detach saved tensors from the autograd graph.
        save_function_args: Whether to keep the arguments of each call.
        save_gradients: Whether a later `backward()` fills each entry's `grad_contents`.
        vis_opt: `'unrolled'` draws every operation, `'rolled'` every layer once, `'none'` nothing. None draws unrolled if
            another drawing option is given, and nothing otherwise.
        *by_position: Drawing options in the order of the classic TorchLens, for code written for it.
        random_seed: Seeds the generators of Python, NumPy and torch before the run; None leaves them alone.
        **vis_options: The other drawing options: `vis_outpath`, `vis_fileformat`, `vis_nesting_depth`, ...;
            `torchlens.draw.options.DrawOptions` lists all of them.
    """
    model = as_model(model, input_args, input_kwargs)
    given = classic_drawing_options("log_forward_pass()", by_position, vis_options)
    random_seed = given.pop("random_seed", random_seed)
    vis_opt = vis_opt or ("unrolled" if given else "none")
    drawing = _drawing_options("log_forward_pass()", model, vis_opt, given)
    args, kwargs = check_inputs(model, input_args, input_kwargs)
    options = LogOptions(
        layers_to_save=layers_to_save,
        keep_unsaved_layers=keep_unsaved_layers,
        output_device=output_device,
        activation_postfunc=activation_postfunc,
        mark_input_output_distances=mark_input_output_distances,
        detach_saved_tensors=detach_saved_tensors,
        save_function_args=save_function_args,
        save_gradients=save_gradients,
        random_seed=random_seed,
    )
    if isinstance(model, OtherModel) and options.save_gradients:
        raise ValueError(
            "save_gradients=True is for PyTorch, where the backward pass comes later. In JAX, functions compute gradients: "
            "log jax.grad(f) or jax.value_and_grad(f), and the gradients are entries of the log."
        )
    capture = CaptureOptions(
        transform=options.transform,
        keeps_args=options.save_function_args,
        keeps_gradients=options.save_gradients,
        random_seed=options.random_seed,
    )
    # Not a context manager: an interrupt may come after it has been entered and before its block begins.
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
    history = ModelHistory(log, capture, options.keep_unsaved_layers)
    _draw(history, drawing)
    return history


def get_model_metadata(model: Model, input_args: Any = None, input_kwargs: Mapping[str, Any] | None = None) -> ModelHistory:
    """Runs one forward pass and returns a log of every operation in it, without saving tensors.

    >>> get_model_metadata(model, x).module_nparams
    """
    return log_forward_pass(model, input_args, input_kwargs, layers_to_save="none")


def show_model_graph(
    model: Model,
    input_args: Any = None,
    input_kwargs: Mapping[str, Any] | None = None,
    vis_opt: "VisOpt" = "unrolled",
    *by_position: Any,
    random_seed: int | None = None,
    **vis_options: "Unpack[DrawKeywords]",
) -> None:
    """Runs one forward pass and draws it, without saving tensors. The drawing options are those of `log_forward_pass`.

    >>> show_model_graph(model, x, vis_opt='rolled', vis_outpath='model.svg')
    """
    model = as_model(model, input_args, input_kwargs)
    given = classic_drawing_options("show_model_graph()", by_position, vis_options)
    random_seed = given.pop("random_seed", random_seed)
    drawing = _drawing_options("show_model_graph()", model, vis_opt, given)
    history = log_forward_pass(model, input_args, input_kwargs, layers_to_save="none", random_seed=random_seed)
    _draw(history, drawing)


def _drawing_options(function: str, model: Any, vis_opt: "VisOpt", given: dict[str, Any]) -> "DrawOptions | None":
    """The given drawing options, checked; None if nothing is to be drawn."""
    check_model(model)
    if vis_opt == "none" and not given:
        return None
    own = [field.name for field in fields(LogOptions)]
    for name in given:
        if name.startswith("vis_"):  # draw_options knows those
            continue
        if name in forward_names(model):
            raise TypeError(
                f"{function} has no option {name!r}. It is an argument of {title_of(model)}: give it as "
                f"input_kwargs={{{name!r}: ...}}."
            )
        if function == "show_model_graph()" and OPTION_NAMES.get(name, name) in own:
            raise TypeError(
                f"{function} has no option {name!r}: it draws, and returns no log. Use log_forward_pass(model, x, "
                f"{OPTION_NAMES.get(name, name)}=..., vis_opt='unrolled') instead."
            )
        listing = f"Available: {', '.join(own)}, and those for drawing (vis_...)."
        if function == "show_model_graph()":
            listing = "Available: random_seed, and those for drawing (vis_...)."
        raise TypeError(no_such_name(function, "option", name, OPTION_NAMES, own, listing))
    return draw_options({"vis_opt": vis_opt, **given}, function)


def _draw(history: ModelHistory, options: "DrawOptions | None") -> None:
    """Writes the HTML page, or draws a picture."""
    if options is None:
        return
    if options.vis_opt != "none" and options.picture_format == "html":
        page = history.explore(options.picture_path)
        if not options.vis_save_only:
            page.open()
    else:
        draw(history, options)


def _run(model: Any, args: list[Any], kwargs: dict[str, Any], options: LogOptions, capture: CaptureOptions) -> Log:
    return _run_session(session_of(model, capture), args, kwargs, options, capture)


def _run_session(
    session: Runnable, args: list[Any], kwargs: dict[str, Any], options: LogOptions, capture: CaptureOptions
) -> Log:
    try:
        session.run(args, kwargs)
    except BaseException as error:
        explain(error, session.recording, capture, ModelHistory)
        raise
    log = Log(session.recording, marks_distances=options.mark_input_output_distances)
    if isinstance(session, Session):
        log.model = weakref.ref(session.model)
    return log


def _run_selecting(
    model: Any, args: list[Any], kwargs: dict[str, Any], options: LogOptions, capture: CaptureOptions
) -> Log:
    """Saves the named layers: in one run if they are modules, otherwise in a second run.

    The state of another framework's model cannot be restored, so such a model runs once: everything is saved, and what was
    not named is released.
    """
    if isinstance(model, OtherModel):
        log = _run(model, args, kwargs, options, replace(capture, saves=True))
        chosen = select_numbers(log, Lookup(log), options.layers_to_save, ModelHistory(log, capture).layer_list)
        if not isinstance(chosen, bool):
            keep_only(chosen, log.recording)
        return log
    states = generator_states()
    # The operation that made a module's output is known only when the module returns: too late to keep its arguments.
    modules = frozenset() if options.save_function_args else _named_modules(model, options.layers_to_save)
    first = replace(capture, saves=False, saved_modules=modules, keeps_undo=True, keeps_gradients=False)
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
    capture = replace(capture, watches_memory=not _warns_of_size(log, options, saves, args, kwargs))
    log.take(rerun(log, capture, model, args, kwargs, saves, options.random_seed, ModelHistory))
    return log


def _warns_of_size(
    log: Log, options: LogOptions, saves: bool | frozenset[int], args: list[Any], kwargs: dict[str, Any]
) -> bool:
    """Warns if saving these entries would take too much memory, now that their shapes are known; returns whether it did."""
    if options.activation_postfunc is not None or isinstance(saves, bool):
        return False
    recording = log.recording
    tensors = (*recording.params, *(tensor for _, tensor in named_tensors((args, kwargs))))
    device = options.output_device
    if device == "same":
        device = next((tensor.device for tensor in tensors), "cpu")
    return warn_of_size(expected_bytes(recording, saves), torch.device(device), options.save_gradients)


def _named_modules(model: torch.nn.Module, layers: Any) -> frozenset[str]:
    """The module addresses in `layers` if it consists of nothing else; otherwise an empty set."""
    if callable(layers):
        return frozenset()
    keys = layers if isinstance(layers, list | tuple | set | frozenset) else [layers]
    addresses = {address for address, _ in model.named_modules() if address}
    names = [key for key in keys if isinstance(key, str) and key.partition(":")[0] in addresses]
    return frozenset(names) if len(names) == len(keys) else frozenset()
