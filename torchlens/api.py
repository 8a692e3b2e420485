"""Every public function: its signature, its checks, and one call into the package that does it.

The packages of features are imported when one of their functions is first called.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

import torch

from torchlens._capture.made_inputs import (
    Dtypes,
    InputKeywords,
    InputSize,
    MadeInputsNote,
    given_inputs,
)
from torchlens._capture.options import LogOptions, check_inputs, check_model, forward_names
from torchlens._compat.monitor_names import known_options
from torchlens._compat.torchlens_names import OPTION_NAMES, classic_drawing_options, no_such_name
from torchlens._history.log_model import log_model
from torchlens._history.model_history import LayersToSave, ModelHistory
from torchlens._recording.called_model import model_of
from torchlens._recording.frameworks import Model, OtherModel, as_model, title_of
from torchlens._recording.garbage_collector import without_collector
from torchlens._recording.tolerance import TOLERANCE
from torchlens._recording.unseen import GradMode
from torchlens._text.error_wording import check_count, checked_file, got

if TYPE_CHECKING:
    from torchlens._diff.result import Diff
    from torchlens._draw.draw_options import DrawKeywords, DrawOptions, VisOpt
    from torchlens._draw.drawing import Drawing
    from torchlens._edit.editing import Editing
    from torchlens._extract.feature_store import Features
    from torchlens._history.log_calls import LoggedCalls
    from torchlens._monitor.read.reader import RunReader
    from torchlens._monitor.record.run import Run
    from torchlens._monitor.sinks.sink import Sink
    from torchlens._page.page import Exploration
    from torchlens._profile.comparison import Comparison
    from torchlens._profile.profile import Profile
    from torchlens._profile.profile_options import Check, Level
    from torchlens._profile.quantities import QuantityName
    from torchlens._structure.structure_report import StructureReport
    from torchlens._trace.tail import Tail
    from torchlens._validate.report import ValidationReport

_Model = TypeVar("_Model", bound=Model)
_Torch = TypeVar("_Torch", bound=torch.nn.Module)

# -- logging ---------------------------------------------------------------------------------------


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
    input_size: InputSize | None = None,
    dtypes: Dtypes | None = None,
    device: str | torch.device | None = None,
    tokenizer: Any = None,
    **vis_options: "Unpack[DrawKeywords]",
) -> ModelHistory:
    """Runs one forward pass and returns a log of every operation in it.

    The log changes nothing: the model's result, its state, torch and the random generators are the
    same as without it.

    >>> history = log_forward_pass(model, x)
    >>> history['conv2d_3_7'].tensor_contents

    Args:
        model: Any `nn.Module`; any other callable that computes with torch (a function, a bound
            method such as `model.generate`, a pipeline, an exported program), whose models are
            found in what it refers to; or a JAX function, an Equinox or nnx module, the `apply` of
            a linen module, or a dict of layers.
        input_args: A tensor, or a list or tuple of positional arguments. If `forward` takes only
            one argument, a tuple is that argument. To pass a list as the only argument, write
            `[the_list]`.
        input_kwargs: Keyword arguments of the model.
        layers_to_save: `'all'`, `'none'`, a key or a list of keys (a label, module, address,
            number, or part of a label), or a function of a layer entry. Labels are known only after
            the run: until then, everything that a key could mean is kept.
        keep_unsaved_layers: If False, the history lists only saved layers.
        output_device: Where to put saved tensors: `'same'` or a torch device.
        activation_postfunc: Applied to each tensor that is saved.
        mark_input_output_distances: Whether to compute the entries' distances from input and
        output.
        detach_saved_tensors: Whether to detach saved tensors from the autograd graph.
        save_function_args: Whether to keep the arguments of each call.
        save_gradients: Whether a later `backward()` fills each entry's `grad_contents`.
        vis_opt: `'unrolled'` draws every operation, `'rolled'` every layer once, `'none'` nothing.
            None draws unrolled if another drawing option is given, and nothing otherwise.
        *by_position: Drawing options in the order of the classic TorchLens, for code written for
        it.
        random_seed: Seeds the generators of Python, NumPy and torch before the run; None leaves
        them alone.
        input_size: Instead of inputs, their sizes: random tensors are made, the same each time. A
            size `(1, 3, 224, 224)`, a list of sizes, or a dict of sizes by argument.
        dtypes: The dtypes of inputs that are made: one, a list, or a dict by argument; by default,
            the floating-point type of the model.
        device: Where to make them; by default, where the model is.
        tokenizer: A tokenizer of Hugging Face; `input_args` is then a string or a list of strings.
        **vis_options: The other drawing options: `vis_outpath`, `vis_fileformat`,
            `vis_nesting_depth`, ...; `torchlens._draw.draw_options.DrawOptions` lists all of them.
    """
    input_args, input_kwargs = given_inputs(
        model, input_args, input_kwargs, input_size, dtypes, device, tokenizer
    )
    model = model_of(model, input_args, input_kwargs)
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
            "save_gradients=True is for PyTorch, where the backward pass comes later. In JAX, "
            "functions compute gradients: log jax.grad(f) or jax.value_and_grad(f), and the "
            "gradients are entries of the log."
        )
    with MadeInputsNote(input_size, dtypes):
        history = log_model(model, input_args, args, kwargs, options)
    if drawing is not None:
        _draw(history, drawing)
    return history


def log_calls(model: torch.nn.Module, **options: Any) -> "LoggedCalls":
    """Logs every call of a model inside the `with` block, wherever in the program it is made.

    Entering the block gives a list of histories, in the order of the calls. The calls return what
    they return without a log. A call that raises has a history up to there.

    >>> with log_calls(model) as histories:
    ...     trainer.validate(model)
    >>> histories[0].output

    model: a module; calls of the modules inside it are part of its histories.
    **options: those of `log_forward_pass`, such as `layers_to_save='none'`; each call keeps what
        they say until you drop its history.
    """
    from torchlens._history.log_calls import LoggedCalls

    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {got(model)}. To log one call of a function, "
            "give it to log_forward_pass."
        )
    own = [field.name for field in fields(LogOptions)]
    for name in options:
        if name not in own:
            listing = f"Available: {', '.join(own)}."
            raise TypeError(no_such_name("log_calls()", "option", name, OPTION_NAMES, own, listing))
    return LoggedCalls(model, LogOptions(**options))


def get_model_metadata(
    model: Model,
    input_args: Any = None,
    input_kwargs: Mapping[str, Any] | None = None,
    **made: "Unpack[InputKeywords]",
) -> ModelHistory:
    """Runs one forward pass and returns a log of every operation in it, without saving tensors.

    >>> get_model_metadata(model, x).module_nparams
    >>> get_model_metadata(model, input_size=(1, 3, 224, 224)).summary()

    **made: what to make inputs from (`input_size`, `dtypes`, `device`, `tokenizer`), as in
        `log_forward_pass`.
    """
    return log_forward_pass(model, input_args, input_kwargs, layers_to_save="none", **made)


def show_model_graph(
    model: Model,
    input_args: Any = None,
    input_kwargs: Mapping[str, Any] | None = None,
    vis_opt: "VisOpt" = "unrolled",
    *by_position: Any,
    random_seed: int | None = None,
    input_size: InputSize | None = None,
    dtypes: Dtypes | None = None,
    device: str | torch.device | None = None,
    tokenizer: Any = None,
    **vis_options: "Unpack[DrawKeywords]",
) -> "Drawing | Exploration | None":
    """Runs one forward pass and draws it, without saving tensors; returns the drawing (None with
    `vis_opt='none'`). The other options are those of `log_forward_pass`.

    >>> show_model_graph(model, x, vis_opt='rolled', vis_outpath='model.svg')
    """
    input_args, input_kwargs = given_inputs(
        model, input_args, input_kwargs, input_size, dtypes, device, tokenizer
    )
    model = model_of(model, input_args, input_kwargs)
    given = classic_drawing_options("show_model_graph()", by_position, vis_options)
    random_seed = given.pop("random_seed", random_seed)
    drawing = _drawing_options("show_model_graph()", model, vis_opt, given)
    with MadeInputsNote(input_size, dtypes):
        history = log_forward_pass(
            model, input_args, input_kwargs, layers_to_save="none", random_seed=random_seed
        )
    return None if drawing is None else _draw(history, drawing)


def _drawing_options(
    function: str, model: Any, vis_opt: "VisOpt", given: dict[str, Any]
) -> "DrawOptions | None":
    """The given drawing options, checked; None if nothing is to be drawn."""
    from torchlens._draw.draw_options import draw_options

    check_model(model)
    if vis_opt == "none" and not given:
        return None
    own = [field.name for field in fields(LogOptions)]
    for name in given:
        if name.startswith("vis_"):  # draw_options knows those
            continue
        if name in forward_names(model):
            raise TypeError(
                f"{function} has no option {name!r}. It is an argument of {title_of(model)}: give "
                f"it as input_kwargs={{{name!r}: ...}}."
            )
        if function == "show_model_graph()" and OPTION_NAMES.get(name, name) in own:
            raise TypeError(
                f"{function} has no option {name!r}: it draws, and returns no log. Use "
                f"log_forward_pass(model, x, {OPTION_NAMES.get(name, name)}=..., "
                "vis_opt='unrolled') instead."
            )
        listing = f"Available: {', '.join(own)}, and those for drawing (vis_...)."
        if function == "show_model_graph()":
            listing = "Available: random_seed, and those for drawing (vis_...)."
        raise TypeError(no_such_name(function, "option", name, OPTION_NAMES, own, listing))
    return draw_options({"vis_opt": vis_opt, **given}, function)


def _draw(history: ModelHistory, options: "DrawOptions") -> "Drawing | Exploration | None":
    """Writes the HTML page, or draws a picture."""
    from torchlens._draw.drawing import draw

    if options.vis_opt == "none" or options.picture_format != "html":
        return draw(history, options)
    page = history.explore(options.picture_path)
    if not options.vis_save_only:
        page.open()
    return page


# -- proving ---------------------------------------------------------------------------------------


def validate_saved_activations(
    model: Model,
    input_args: Any = None,
    input_kwargs: Mapping[str, Any] | None = None,
    random_seed: int | None = None,
    verbose: bool = False,
    **made: "Unpack[InputKeywords]",
) -> bool:
    """Returns whether the log of this model on this input is right; `verbose` prints the report of
    `validate_forward_pass`.

    >>> validate_saved_activations(model, x)
    True
    """
    report = validate_forward_pass(model, input_args, input_kwargs, random_seed, **made)
    if verbose:
        sys.stdout.write(f"{report}\n")
    return report.passed


def validate_forward_pass(
    model: Model,
    input_args: Any = None,
    input_kwargs: Mapping[str, Any] | None = None,
    random_seed: int | None = None,
    **made: "Unpack[InputKeywords]",
) -> "ValidationReport":
    """Proves the log of a forward pass against the model, and reports what does not hold.

    Runs the model four times from the same state (without a log, logged, logged with a witness, and
    logged under a dispatch mode), then every operation again, and once more for each of its
    parents. Leaves the model, inputs, generators and gradients as they were. A model that raises is
    a finding; bad arguments raise a TypeError, as elsewhere.

    >>> print(validate_forward_pass(model, x))

    **made: what to make inputs from, as in `log_forward_pass`.
    """
    from torchlens._validate.validate import validate

    LogOptions(random_seed=random_seed)
    input_args, input_kwargs = given_inputs(model, input_args, input_kwargs, **made)
    model = model_of(model, input_args, input_kwargs)
    args, kwargs = check_inputs(model, input_args, input_kwargs)
    return validate(model, args, kwargs, random_seed)


# -- comparing -------------------------------------------------------------------------------------


def diff(
    reference: ModelHistory | str | os.PathLike[str],
    candidate: ModelHistory | str | os.PathLike[str],
    *,
    tolerance: float = TOLERANCE,
    mapping: Mapping[str, str] | None = None,
    isolate: bool = False,
) -> "Diff":
    """Finds the first layer at which two implementations of a model compute something different
    from the same inputs.

    Both arguments are histories, or files of histories, of the same input with all values saved;
    library, dtype and version may differ. Layers are matched by weights, values and order, whatever
    their names and the number of their steps. Of a file with several calls, the first is compared;
    `load(path, call=2)` gives another.

    >>> print(torchlens.diff(reference, candidate))
    >>> torchlens.diff(reference, candidate).ok

    tolerance: how far apart, in units of rounding, the results of a correct layer may be; single
        operations of torch and JAX differ by at most 8.5.
    mapping: names of modules, layers or weights in the reference → in the candidate, for when
        matching needs help: `{'h.*.ln_1': 'blocks.*.norm1'}`.
    isolate: wherever an error begins, substitutes the reference's value, runs the rest of the
        candidate again and continues to look, so that it finds errors behind the first, too. Needs
        a candidate whose functions can still be called.

    Raises CannotCompareError if nothing was saved, or if the inputs differ.
    """
    from torchlens._diff.compare import compare_histories

    ours, theirs = _history("reference", reference), _history("candidate", candidate)
    if not isinstance(tolerance, Real) or isinstance(tolerance, bool):
        raise TypeError(f"tolerance must be a number of units of rounding, got {got(tolerance)}.")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be above 0 (units of rounding), got {tolerance}.")
    if not isinstance(isolate, bool):
        raise TypeError(f"isolate must be True or False, got {got(isolate)}.")
    return compare_histories(ours, theirs, float(tolerance), mapping, isolate)


def _history(name: str, value: ModelHistory | str | os.PathLike[str]) -> ModelHistory:
    if isinstance(value, str | os.PathLike):
        return load(value)
    if not isinstance(value, ModelHistory):
        raise TypeError(
            f"{name} must be a ModelHistory, as log_forward_pass returns it, or a file of one, got "
            f"{got(value)}."
        )
    return value


def assert_same_structure(
    model: Model | ModelHistory,
    path: str | os.PathLike[str],
    input_args: Any = None,
    input_kwargs: Mapping[str, Any] | None = None,
    *,
    update: bool = False,
    **made: "Unpack[InputKeywords]",
) -> None:
    """Raises AssertionError unless a model does what a file says, with the differences in words.

    What counts is `history.structure_hash`: operations, arguments, shapes, dtypes, edges,
    parameters and addresses; no values. With `update=True`, or if the environment variable
    TORCHLENS_UPDATE is 1, the file is written instead.

    >>> def test_the_structure_of_my_model():
    ...     torchlens.assert_same_structure(make_model(), 'tests/model.lens.json')

    input_args, input_kwargs: the inputs of the model; by default, inputs are made like those that
        the file was written with.
    **made: what to make inputs from, as in `log_forward_pass`.
    """
    report = check_structure(model, path, input_args, input_kwargs, update=update, **made)
    if not report.ok:
        raise AssertionError(str(report))


def check_structure(
    model: Model | ModelHistory,
    path: str | os.PathLike[str],
    input_args: Any = None,
    input_kwargs: Mapping[str, Any] | None = None,
    *,
    update: bool = False,
    **made: "Unpack[InputKeywords]",
) -> "StructureReport":
    """The same as a report; `report.ok` says whether the structures are equal.

    >>> print(check_structure(model, 'model.lens.json'))
    """
    from torchlens._structure.structure_file import inputs_to_make, read_structure, write_structure
    from torchlens._structure.structure_report import structure_report

    target = checked_file("path", path, "model.lens.json")
    update = update or os.environ.get("TORCHLENS_UPDATE") == "1"
    if not update and not target.exists():
        raise FileNotFoundError(
            f"There is no file {str(path)!r} to compare with. Write it with update=True or the "
            "environment variable TORCHLENS_UPDATE=1."
        )
    stored = read_structure(target) if target.exists() and not update else None
    if isinstance(model, ModelHistory):
        history = model
    else:
        if input_args is None and input_kwargs is None and not made and target.exists():
            known = (stored or read_structure(target)).history
            made = inputs_to_make(known, target, forward_names(model_of(model)))
        with GradMode(False):
            history = get_model_metadata(model, input_args, input_kwargs, **made)
    if stored is None:
        write_structure(history, target)
        stored = read_structure(target)
    return structure_report(stored, history, target)


def explore_together(
    a: ModelHistory,
    b: ModelHistory,
    path: str | os.PathLike[str] | None = "two.html",
    *,
    pairs: Sequence[tuple[str, str] | Mapping[str, Any]] | None = None,
    names: tuple[str, str] | None = None,
    title: str | None = None,
) -> "Exploration":
    """Writes one HTML file that shows two histories side by side, with the differences marked.

    Operations are matched by structure, unless `pairs` says which correspond, as tuples `(a, b)` of
    keys or dicts with `a`, `b`, `note`, `error` and `colour`. Values are compared if both histories
    saved them. With `path=None`, nothing is written.

    >>> explore_together(before, after, 'two.html', names=('before', 'after'))
    """
    from torchlens._page.together import explore_together

    for name, history in (("a", a), ("b", b)):
        if not isinstance(history, ModelHistory):
            raise TypeError(f"{name} must be the result of log_forward_pass, got {got(history)}.")
    return explore_together(a, b, path, pairs=pairs, names=names, title=title)


# -- editing ---------------------------------------------------------------------------------------


def edit(
    model: _Torch, edits: "Mapping[Any, Any]", history: ModelHistory | None = None
) -> "Editing[_Torch]":
    """Edits what a model computes, in every call that this thread makes inside the block.

    >>> with torchlens.edit(model, {'h.4.attn': 0.0}):
    ...     model.generate(ids)
    >>> with torchlens.edit(model, {site('h.4.attn', head=3): 'mean', 'relu_3': steer}, history):
    ...     model(x)

    Blocks can be nested: inner edits act on what outer ones made. Gradients flow through edits.
    After the block, the model is as before. An edit that no call met raises EditError at its end.

    edits: sites and what becomes of the value there: a number, a tensor, an entry of another
        history, a function of the value, 'zero', 'mean', 'resample', `torchlens.edits.at(...)` or
        `torchlens.edits.splice(...)`.
    history: a history of the model, in which the sites are looked up. Without one, sites are
        modules, by their addresses.
    """
    from torchlens._edit.rerun import editing_of

    return editing_of(model, edits, history)


# -- measuring -------------------------------------------------------------------------------------


def profile(
    model: torch.nn.Module,
    input_args: Any = None,
    input_kwargs: Mapping[str, Any] | None = None,
    *,
    level: "Level | None" = None,
    check: "Check | None" = None,
    stop: bool = False,
    memory: bool = True,
    backward: bool | None = None,
    warmup: int | None = None,
    repeats: int = 5,
    max_steps: int = 100,
    skip: int = 0,
    measure: int | None = None,
    every: int | None = None,
    thresholds: Mapping[str, Any] | None = None,
    **made: "Unpack[InputKeywords]",
) -> "Profile":
    """Measures the time, memory and FLOPs of every module of a model, forward and backward.

    Without inputs, it measures whatever the block does in the current thread; each call of the
    model begins a step:

    >>> with torchlens.profile(model) as p:
    ...     for x, y in batches:
    ...         loss = loss_of(model(x), y)
    ...         loss.backward()
    ...         optimizer.step()
    >>> print(p)

    With inputs, it runs the model itself and leaves it as it was: `warmup` times, one to three
    times for details, then `repeats` times for times, with a backward pass from an artificial
    gradient of the outputs unless `backward=False` or nothing requires a gradient:

    >>> print(torchlens.profile(model, x))

    Measuring memory, recording operations and checking values slow a model down. They alternate
    with steps in which only times are measured, and the times in the table come from those steps.

    level: 'module', or 'operation' to measure each operation as well; this runs steps under the log
    (`p.history`).
    check: 'nonfinite' finds the first operation that makes NaN or Inf; 'health' also looks for dead
        units, saturation, vanishing and exploding gradients (`p.findings()`). A check implies
        level='operation' unless you give level='module'.
    stop: raise NonFiniteError at the first NaN or Inf.
    memory: whether to measure memory, by listening to torch's allocators.
    warmup: how many steps to leave out of medians and spreads: by default 2 with inputs, none
    otherwise.
    max_steps: how many steps to measure at most.
    skip, measure, every: a schedule for long loops. The first `skip` steps are not measured. Then,
        of every `every` steps, the first `warmup` are warm-up, the next `measure` (by default one)
        are measured, and the rest are not.
    thresholds: the limits beyond which something is a finding, by name.
    **made: what to make inputs from, as in `log_forward_pass`.
    """
    from torchlens._profile.profile import Profile, run_trial
    from torchlens._profile.profile_options import ProfileOptions

    input_args, input_kwargs = given_inputs(model, input_args, input_kwargs, **made)
    options = ProfileOptions(
        level=level, check=check, stop=stop, memory=memory, backward=backward, warmup=warmup,
        repeats=repeats,
        max_steps=max_steps, skip=skip, measure=measure, every=every, thresholds=thresholds,
        has_inputs=input_args is not None or input_kwargs is not None,
    )  # fmt: skip
    if not options.has_inputs:
        check_model(model)
        return Profile(model, options)
    args, kwargs = check_inputs(model, input_args, input_kwargs)
    measured = Profile(model, replace(options, max_steps=options.num_runs))
    run_trial(measured, model, args, kwargs, options.num_runs, options.backward)
    return measured


def compare(
    before: "Profile",
    after: "Profile",
    quantity: "QuantityName" = "total_time",
    *,
    step_kind: str | None = None,
    width: int | None = None,
    limit: int | None = None,
) -> "Comparison":
    """Shows what changed between two profiles, module by module, matched by address; the largest
    change comes first.

    quantity: what to compare: 'total_time', 'forward_time', 'peak_bytes', 'flops', ...
    step_kind: which kind of steps to compare ('training', 'evaluation', ...); by default, the most
    frequent kind.

    >>> print(torchlens.compare(before, after))
    >>> print(torchlens.compare(before, after, 'peak_bytes', limit=10))
    """
    from torchlens._profile.comparison import compare_measurements
    from torchlens._profile.profile import Profile

    for name, value in (("before", before), ("after", after)):
        if not isinstance(value, Profile):
            raise TypeError(
                f"{name} must be a Profile, as torchlens.profile returns it, got {got(value)}."
            )
    for name, number in (("width", width), ("limit", limit)):
        if number is not None:
            check_count(name, number, 1)
    return compare_measurements(
        before.measurements, after.measurements, quantity, width, limit, step_kind
    )


# -- training runs ---------------------------------------------------------------------------------


def monitor(
    model: torch.nn.Module,
    folder: str | os.PathLike[str],
    *,
    every: int = 1,
    log: str | Iterable[str] = "all",
    modules: str | Iterable[str] | None = None,
    seconds: float | None = None,
    step: int | None = None,
    budget: int = 64 << 20,
    graph: Literal["operations", "modules"] = "operations",
    compiled: Literal["boundary", "eager"] = "boundary",
    evaluation: bool = False,
    sinks: "Sink | Sequence[Sink]" = (),
    **foreign: Any,
) -> "Run":
    """Records, over a training run, the distributions of what the modules of a model compute, at
    almost no cost.

    >>> run = torchlens.monitor(model, 'runs/a', every=10)
    >>> for x, y in batches:                       # the training loop, unchanged
    ...     loss = loss_of(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()
    ...     run.log(loss=loss)
    >>> run.finish()                               # or `with`; also at exit
    >>> r = torchlens.open_run('runs/a')           # while it is written, or later

    Losses and weights are bit for bit the same as without it. A step ends when an optimizer that
    holds the model's parameters takes its step; without such an optimizer, call `run.step()`. If
    the folder already holds a run, that run continues.

    every: record every n-th step.
    log: what to record, 'all' or some of: 'inputs', 'outputs', 'gradients' (of outputs),
        'parameters', 'parameter_gradients', 'updates'.
    modules: record only modules with these addresses; '*' stands for anything ('layer1.*').
    seconds: record for this long, then let training continue unrecorded.
    step: the number of the first step, if training resumes from a checkpoint; steps recorded from
    there on are replaced.
    budget: how many bytes the files of each process may take. Beyond that, the oldest steps are
    merged in pairs.
    graph: 'operations' logs the first recorded call to get the graph; 'modules' only notes which
    module called which.
    compiled: 'boundary' records compiled code from outside only; 'eager' runs its Python source in
        recorded steps, whose numbers may differ in the last bits from those of the compiled code.
    evaluation: whether to also record calls in eval mode without gradients.
    sinks: where else to send the run: torchlens.sinks.TensorBoard('tb/a'), Wandb(),
    Trackio('project'), MLflow().

    Options of `torchexplorer.watch`, `wandb.watch` and pytorch_inspector that mean the same are
    accepted (`log_freq=`, `log=['io', 'params']`); for the others, an error says what to write
    instead.
    """
    from torchlens._monitor.record.monitor_options import MonitorOptions
    from torchlens._monitor.record.run import Run

    if isinstance(model, list | tuple | dict) and model:
        raise TypeError(
            f"model must be a torch.nn.Module, got {got(model)}. For several models, use one run "
            "for each, monitor(a, 'runs/a') and monitor(b, 'runs/b'), or one run for "
            "torch.nn.ModuleList([a, b])."
        )
    check_model(model)
    own = {
        "every": every, "log": log, "modules": modules, "seconds": seconds, "step": step,
        "budget": budget, "graph": graph,
        "compiled": compiled, "evaluation": evaluation, "sinks": sinks,
    }  # fmt: skip
    options = MonitorOptions(**(known_options(foreign, own) if foreign else own))
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        raise TypeError(f"folder must name a folder, such as 'runs/a', got {got(folder)}.")
    path = Path(folder).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder must name a folder, got the file {str(path)!r}.")
    return Run(model, path, options).start()


def current_run() -> "Run":
    """Returns the run that is being recorded, from anywhere in the program; of several runs, the
    one started last.

    >>> torchlens.current_run().watch('latent', z)
    >>> torchlens.current_run().video('layer1', 'layer1.mp4', seconds=60)
    """
    from torchlens._monitor.record.run import last_run

    run = last_run()
    if run is None:
        raise RuntimeError(
            "No run is being recorded. Start one with torchlens.monitor(model, 'runs/a')."
        )
    return run


def open_run(folder: Any) -> "RunReader":
    """Opens a run that `monitor` has recorded or is still recording.

    >>> r = torchlens.open_run('runs/a')
    >>> r['layer1.0.conv1'].outputs.histogram()
    >>> r.scalars['loss'].values, r.findings, r.problems, r.counts
    >>> r.to_pandas()
    """
    from torchlens._monitor.read.reader import open_run

    return open_run(folder)


# -- files -----------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], call: int | None = None) -> ModelHistory:
    """Opens a history that `history.save(path)` wrote, or one of the calls that `tail` recorded (by
    default the first).

    Labels, tables, drawings, pages and summaries work at once; a value is read from the file when
    you ask for it. The file may come from anyone: nothing in it is executed. Functions and
    autograd's nodes are not stored: a stand-in has the name of the function, and raises an error
    when called.

    >>> history = load('trace.safetensors')
    >>> history['conv2d_1'].tensor_contents
    """
    from torchlens._trace.load import load_trace

    # It makes many objects, none of them garbage.
    return without_collector(lambda: load_trace(path, call))


def tail(
    model: _Model,
    path: str | os.PathLike[str] = "trace.safetensors",
    layers: "str | Sequence[str] | Callable[[list[str], Any], bool]" = "all",
    every: int = 1,
    params: bool = False,
    max_bytes: int | None = None,
    *,
    max_shard_bytes: int = 268_435_456,
) -> "Tail[_Model]":
    """Records every call of a model inside the `with` block to a safetensors file, each call
    separately.

    Values are written while the model and the loop around it run. Entering the block gives the
    model itself, which behaves as it would without the recording. If something goes wrong, the
    recording ends with a warning, and the loop continues.

    >>> with tail(model, 'trace.safetensors') as m:
    ...     m(x)
    >>> load('trace.safetensors')

    Args:
        model: Any `nn.Module`, or a JAX callable, for which entering the block gives a function to
            call in its place. A jitted function stays one compiled program, which also returns the
            recorded arrays.
        path: The file. While it is being written, its finished parts are in the folder
            `path.partial`.
        layers: `'all'` for every operation; modules by address or pattern (`'features.*'`), whose
            outputs are recorded; names in the file (`'features.*/relu'`, every pass of it;
            `'/relu:2'` is the second outside any module); or a function of the path of a module (a
            list) and the module.
        every: 2 records every second call.
        params: Whether to write the parameters as well, as they are at the first call.
        max_bytes: Once the file has this many bytes, further calls are counted but not recorded.
        max_shard_bytes: The size of one file, about, and of what is held in memory until it is
            written. A larger trace has several files and an index of them.
    """
    from torchlens._trace.tail import TailOptions, start_tail

    own = as_model(model)
    check_model(own)
    target = checked_file("path", path, "trace.safetensors")
    check_count("every", every, 1)
    check_count("max_shard_bytes", max_shard_bytes, 1)
    if max_bytes is not None:
        check_count("max_bytes", max_bytes, 1)
    if not isinstance(params, bool):
        raise TypeError(f"params must be True or False, got {got(params)}.")
    options = TailOptions(target, every, params, max_bytes, max_shard_bytes)
    return start_tail(model, own, layers, options)


def magnify(
    path: str | os.PathLike[str], key: str | None = None, depth: int = 1, call: int | None = None
) -> None:
    """Prints the modules and operations in a trace, with statistics of their values; with a key,
    one of them in detail.

    >>> magnify('trace.safetensors')
    >>> magnify('trace.safetensors', 'features.0')
    """
    from torchlens._trace.files import open_trace
    from torchlens._trace.overview import overview

    found = overview(open_trace(path), key, depth, call)
    print(found.text(shutil.get_terminal_size((100, 24)).columns))  # noqa: T201 (printing is what it is for)


def read_trace(path: str | os.PathLike[str], pattern: str | None = None) -> dict[str, Any]:
    """Returns the values in a trace by name, in the order in which they were made; with a pattern,
    those that match it.

    A pattern is part of a name, or contains the wildcards `*` and `?`: `'features.0'`,
    `'2/*/relu'`. Any safetensors file can be read.

    >>> read_trace('trace.safetensors', 'act*')
    """
    from torchlens._trace.files import open_trace
    from torchlens._trace.load import read_pattern

    if pattern is not None and not isinstance(pattern, str):
        raise TypeError(f"pattern must be text, such as 'features.*', got {got(pattern)}.")
    return dict(read_pattern(open_trace(path), pattern))


# -- features of a data set ------------------------------------------------------------------------


def extract(
    model: Any,
    data: Any,
    layers: LayersToSave | Mapping[str, LayersToSave],
    path: str | os.PathLike[str] | None,
    *,
    ids: Iterable[str | int] | None = None,
    pool: Any = None,
    reduce: Any = None,
    dtype: Any = None,
    batch_size: int | None = None,
    shard_size: int = 4096,
    transform: Callable[[Any], Any] | None = None,
    tokenizer: Callable[..., Any] | None = None,
    into: Iterable[Any] = (),
    on_error: Literal["raise", "skip"] = "raise",
    compile: bool = False,  # noqa: A002
    progress: bool | None = None,
) -> Any:
    """Runs a data set through a model and stores the values of some layers, as `Features`.

    The same call resumes a run that was interrupted, at the last finished shard. The model runs in
    evaluation mode and without gradients; its mode is put back. With torchrun, each process
    extracts its part.

    >>> features = extract(model, images, ['relu_3', 'layer4', 'output'], 'features/')
    >>> features['layer4'][10:20], features.ids, features.verify(20)

    Args:
        model: A `torch.nn.Module`, or a dict of several, each of which is given every input.
        data: A Dataset, a DataLoader, a tensor or array, a list of inputs, a dict of arrays, a
            folder of images, a list of texts (with a tokenizer), or an iterable of batches. In a
            tuple, what the model does not need are labels, and are ignored; a dict has keyword
            arguments.
        layers: The keys of layers as in a history, or a function of a layer entry; for a dict of
            models, a dict of these.
        path: The folder; None stores nothing, and returns the reductions in `into`.
        ids: One for each input: strings or whole numbers. The default is a number, or the name of
            the file.
        pool: `'mean'`, `'max'`, `'cls'` (the first token), `'last'` (the last token), `'grid:N'`
            (N × N cells), a function of a value and the mask of its tokens, or a dict of these by
            layer. Without a pool, ragged text is stored as its tokens, without padding.
        reduce: `features.SparseProjection(512)` or `features.PCA(100)`.
        dtype: `'float16'`, `'bfloat16'` or `'float32'`; None keeps the model's.
        batch_size: How many inputs are run at once; 32, or that of the DataLoader. An iterable has
            its own batches.
        shard_size: How many inputs are in one file; no batch crosses a shard.
        transform: Applied to each input; for a folder, a function from a PIL image to a tensor.
        tokenizer: Makes tokens of texts, as those of Hugging Face do.
        into: Reductions of the stream, such as `features.CKA()`.
        on_error: `'skip'` leaves out inputs that cannot be read or make the model raise, and lists
            them in `features.skipped`.
        compile: Logs the first batch, then runs one compiled function that returns the chosen
            values; if the model cannot be compiled, a warning says why.
        progress: Whether to show progress; None shows it on a terminal.
    """
    from torchlens._extract.extraction import Extraction, ExtractOptions

    options = ExtractOptions(
        ids=ids,
        pool=pool,
        reduce=reduce,
        dtype=dtype,
        batch_size=batch_size,
        shard_size=shard_size,
        transform=transform,
        tokenizer=tokenizer,
        into=list(into) if isinstance(into, Iterable) else [into],
        on_error=on_error,
        compile=compile,
        progress=progress,
    )
    if path is not None and (not isinstance(path, str | os.PathLike) or not str(path)):
        raise TypeError(
            f"path must name a folder, such as 'features/', or be None, got {got(path)}."
        )
    if path is None and not options.into:
        raise ValueError(
            "path=None stores nothing: name a folder, such as 'features/', or give reductions, "
            "such as into=[torchlens.features.PCA(100)]."
        )
    extraction = Extraction(model, data, layers, options)
    return extraction.reduce_only() if path is None else extraction.store(Path(path).expanduser())


def open_features(path: str | os.PathLike[str]) -> "Features":
    """Opens a folder that `extract` has written, complete or not.

    >>> features = open_features('features/')
    >>> features['layer4'][10:20]
    """
    from torchlens._extract.feature_store import open_folder

    return open_folder(path)
