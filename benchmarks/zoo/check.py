"""Logging one model and holding the log against a plain run."""

import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

import numpy as np
import torch

import torchlens as tl
from benchmarks.zoo.specimen import Absent, Case, Specimen
from benchmarks.zoo.torch_state import (
    changes_of_model,
    changes_of_torch,
    state_of_model,
    state_of_torch,
)
from tests.validate.proof import prove

__all__ = ["Result", "check"]

SEED = 1234
_MAX_REASONS = 5


@dataclass(slots=True)
class Result:
    """What came of one model. `reasons` is empty where everything held."""

    name: str
    reasons: list[str] = field(default_factory=list)
    entries: int = 0
    layers: int = 0
    passes: int = 0
    time_ratio: float | None = None
    memory_ratio: float | None = None
    validated: bool = False
    trained: bool = False
    seconds: float = 0.0
    trace: str = ""
    absence: str = ""

    @property
    def passed(self) -> bool:
        return not self.reasons and not self.absence

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(specimen: Specimen) -> Result:
    """Makes the model, runs it plainly and logged, and tells what differs. An exception is a reason
    like any other.
    """
    result = Result(specimen.name)
    start = time.perf_counter()
    try:
        with _third_party_warnings_ignored():
            _seed()
            case = specimen.make()
            case.model.eval()
            _check_eval(specimen, case, result)
            if specimen.trains:
                _seed()
                _check_training(specimen.make(), result)
                result.trained = True
    except Absent as absence:
        result.absence = str(absence)
    except (
        Exception
    ) as error:  # the boundary: whatever a model or the library raises is the verdict on it
        first_line = next(iter(str(error).splitlines()), "")
        result.reasons.append(f"{type(error).__name__}: {first_line[:300]}")
        result.trace = traceback.format_exc()
    result.seconds = time.perf_counter() - start
    return result


# -- eval
# --------------------------------------------------------------------------------------------------


def _check_eval(specimen: Specimen, case: Case, result: Result) -> None:
    model, reasons = case.model, result.reasons
    with torch.no_grad():
        first = _run_seeded(lambda: _call(case))
        # Compared with the second: some models prepare themselves in the first, and draw random
        # numbers for it.
        plain = _run_seeded(lambda: _call(case))
        if not _all_equal(first.tensors, plain.tensors):
            reasons.append(
                "the model itself gives two results for one seed; nothing can be compared"
            )
            return
        module_outputs = _module_outputs(case)
        torch_before, model_before = state_of_torch(), state_of_model(model)
        logged = _run_seeded(lambda: _log(case))
        reasons += changes_of_torch(torch_before)
        reasons += changes_of_model(model_before, model)
        history = logged.value
        _compare_runs(plain, logged, reasons)
        outputs = [history[label].tensor_contents for label in history.output_layers]
        if not _all_equal(plain.tensors, outputs):
            reasons.append("the output entries hold other values than the model returned")
        _compare_modules(history, module_outputs, reasons)
        if history.num_tensors_saved != history.num_tensors_total:
            reasons.append(
                f"{history.num_tensors_total - history.num_tensors_saved} entries hold no tensor"
            )
        _read_everything(history)
        result.entries = len(history)
        result.layers = len(history.layer_labels_no_pass)
        result.passes = history.model_max_recurrent_loops
        if specimen.is_recurrent not in (None, history.model_is_recurrent):
            most = max(history, key=lambda entry: entry.layer_passes_total)
            reasons.append(
                f"recurrent: {history.model_is_recurrent}, expected {specimen.is_recurrent} "
                f"({most.layer_label_no_pass} has {most.layer_passes_total} passes)"
            )
        del first, history, outputs, logged, module_outputs
        result.time_ratio = _ratio(
            lambda: _timed(lambda: _log(case)), lambda: _timed(lambda: _call(case))
        )
        result.memory_ratio = _ratio(
            lambda: _peak_bytes(lambda: _log(case)), lambda: _peak_bytes(lambda: _call(case)), 1
        )
    _validate(case, result)


def _validate(case: Case, result: Result) -> None:
    """The checks of `validate_forward_pass`, and those of the bookkeeping."""
    args, kwargs = _fresh(case)
    _seed()
    report = prove(case.model, *args, **kwargs)
    result.validated = report.passed
    result.reasons += [f"validation: {finding}" for finding in report.findings[:_MAX_REASONS]]
    if len(report.findings) > _MAX_REASONS:
        result.reasons.append(f"validation: {len(report.findings) - _MAX_REASONS} more findings")


def _module_outputs(case: Case) -> dict[str, list[torch.Tensor]]:
    """The tensors that each module pass returned in a plain run, as hooks saw them.

    Not for Transformer encoder layers: seeing a hook, they take another path through their
    operations.
    """
    if any(isinstance(module, torch.nn.TransformerEncoderLayer) for module in case.model.modules()):
        return {}
    seen: dict[str, list[torch.Tensor]] = {}
    counts: dict[str, int] = {}

    def listen(address: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            counts[address] = counts.get(address, 0) + 1
            seen[f"{address}:{counts[address]}"] = [tensor.clone() for tensor in _tensors(output)]

        return hook

    handles = [
        module.register_forward_hook(listen(address))
        for address, module in case.model.named_modules()
        if address
    ]
    try:
        _run_seeded(lambda: _call(case))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _compare_modules(
    history: tl.ModelHistory, expected: dict[str, list[torch.Tensor]], reasons: list[str]
) -> None:
    """Every tensor that hooks saw a module return is the value of an entry that left that
    module.
    """
    left: dict[str, list[torch.Tensor]] = {}
    for entry in history:
        for name in entry.module_passes_exited:
            left.setdefault(name, []).append(entry.tensor_contents)
    lost: list[torch.Tensor] = []
    first_loser = ""
    for name, tensors in expected.items():
        for tensor in tensors:
            if name in left and not any(_equal(tensor, value) for value in left[name] + lost):
                lost.append(tensor)
                first_loser = first_loser or name
    # What leads neither from an input nor to an output is left out of a log, and counted.
    if len(lost) > history.num_operations_left_out:
        reasons.append(f"module {first_loser} returned a tensor that no entry leaving it holds")
    missing = {name for name, tensors in expected.items() if tensors} - set(history.module_passes)
    if missing:
        reasons.append(f"{len(missing)} module calls are not in the log, {min(missing)} among them")


def _read_everything(history: tl.ModelHistory) -> None:
    """Prints and tables the history, and reads every field of every entry; what raises is a
    failure.
    """
    str(history)
    history.to_pandas()
    for entry in history:
        str(entry)
        _ = (
            entry.parent_layer_arg_locs,
            entry.func_call_stack,
            entry.lookup_keys,
            entry.func_argnames,
        )
        if entry.has_parents != bool(entry.parent_layers):
            raise AssertionError(f"{entry.layer_label} disagrees with itself about its parents")


# -- training
# --------------------------------------------------------------------------------------------------


def _check_training(case: Case, result: Result) -> None:
    """In training mode: the same outputs, generator state, buffers and parameter gradients as a
    plain step.
    """
    model, reasons = case.model.train(), result.reasons
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = _run_seeded(lambda: _call(case))
    _loss(plain.tensors).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.load_state_dict(state)
    model.zero_grad(set_to_none=True)
    torch_before, model_before = state_of_torch(), state_of_model(model)
    logged = _run_seeded(lambda: _log(case, save_gradients=True))
    reasons += [
        f"training: {change}"
        for change in changes_of_torch(torch_before) + changes_of_model(model_before, model)
    ]
    training_reasons: list[str] = []
    _compare_runs(plain, logged, training_reasons)
    _loss(logged.tensors).backward()
    for name, parameter in model.named_parameters():
        if not _equal(expected[name], parameter.grad):
            training_reasons.append(f"the gradient of {name} differs from a plain step's")
            break
    for name, buffer in model.named_buffers():
        if not _equal(buffers[name], buffer):
            training_reasons.append(f"buffer {name} differs from a plain step's")
            break
    history = logged.value
    for entry in history:
        if entry.has_saved_grad and tuple(entry.grad_shape) != tuple(entry.tensor_shape):
            training_reasons.append(
                f"the gradient of {entry.layer_label} has another shape than its tensor"
            )
            break
    if not history.layers_with_saved_gradients:
        training_reasons.append("no gradient was saved")
    reasons += [f"training: {reason}" for reason in training_reasons]


def _loss(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A number that every differentiable output has a share in."""
    shares = [
        tensor.float().square().mean()
        for tensor in tensors
        if tensor.requires_grad and tensor.numel()
    ]
    return torch.stack(shares).sum()


# -- running
# --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    value: Any
    tensors: list[torch.Tensor]
    generators: tuple[Any, ...]


def _run_seeded(run: Callable[[], tuple[Any, Any]]) -> _Run:
    """`run` answers (value, what the model returned)."""
    _seed()
    value, returned = run()
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    return _Run(value, list(_tensors(returned)), generators)


def _seed() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def _fresh(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments anew, as a model may write into them or, like a cache, be changed by them."""
    return _copied(case.args), _copied(case.kwargs)


def _copied(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if type(tree) in (list, tuple):
        return type(tree)(map(_copied, tree))
    if type(tree) is dict:
        return {key: _copied(item) for key, item in tree.items()}
    return tree


def _call(case: Case) -> tuple[Any, Any]:
    args, kwargs = _fresh(case)
    returned = case.model(*args, **kwargs)
    return returned, returned


def _log(case: Case, **options: Any) -> tuple[tl.ModelHistory, Any]:
    """Logs the model; a hook of its own tells what the model returned meanwhile."""
    returned = []
    handle = case.model.register_forward_hook(lambda module, args, output: returned.append(output))
    try:
        args, kwargs = _fresh(case)
        history = tl.log_forward_pass(case.model, list(args), kwargs, **options)
    finally:
        handle.remove()
    return history, returned[-1]


def _compare_runs(plain: _Run, logged: _Run, reasons: list[str]) -> None:
    if not _all_equal(plain.tensors, logged.tensors):
        reasons.append("the model returned something else while it was logged")
    for kind, before, after in zip(
        ("python", "numpy", "torch"), plain.generators, logged.generators, strict=True
    ):
        if not _same_state(before, after):
            reasons.append(f"the state of the {kind} generator differs from a plain run's")


def _same_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return all(map(np.array_equal, a, b))


# -- tensors
# --------------------------------------------------------------------------------------------------


def _tensors(tree: Any, seen: frozenset[int] = frozenset()) -> Iterator[torch.Tensor]:
    """The tensors in what a model returned: in lists, dicts, dataclasses and plain objects."""
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    if id(tree) in seen or isinstance(tree, str | bytes | torch.nn.Module | type):
        return
    seen = seen | {id(tree)}
    if isinstance(tree, Mapping):
        items = list(tree.values())
    elif isinstance(tree, list | tuple | set):
        items = list(tree)
    elif is_dataclass(tree) or hasattr(tree, "__dict__"):
        items = list(vars(tree).values())
    else:
        return
    for item in items:
        yield from _tensors(item, seen)


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """The same, NaN for NaN."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.is_nested or a.is_quantized or a.layout != torch.strided:
        return str(a) == str(b)
    if a.shape != b.shape:
        return False
    if a.is_floating_point() or a.is_complex():
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return torch.equal(a, b)


def _all_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(_equal, a, b))


# -- cost
# --------------------------------------------------------------------------------------------------


def _ratio(
    numerator: Callable[[], float], denominator: Callable[[], float], num_runs: int = 3
) -> float | None:
    below = min(denominator() for _ in range(num_runs))
    return round(min(numerator() for _ in range(num_runs)) / below, 2) if below else None


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    kept = run()
    seconds = time.perf_counter() - start
    del kept
    return seconds


def _peak_bytes(run: Callable[[], Any]) -> float:
    """The most memory that tensors took at one time beyond what was there before, as torch's
    allocator reports it.
    """
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profile:
        kept = run()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    del kept
    return float(peak)


# -- warnings
# --------------------------------------------------------------------------------------------------


def _third_party_warnings_ignored() -> Any:
    """Ignores what other libraries warn of; our own warnings stay."""
    context = warnings.catch_warnings()

    class Quiet:
        def __enter__(self) -> None:
            context.__enter__()
            warnings.simplefilter("ignore")
            warnings.filterwarnings("default", message="torchlens:")

        def __exit__(self, *exception: Any) -> None:
            context.__exit__(*exception)

    return Quiet()
