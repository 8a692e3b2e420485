"""Logging one model and holding the log against a plain run."""

import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import torchlens as tl
from benchmarks.zoo.runs import (
    all_equal,
    arguments_of,
    call,
    compare_runs,
    equal,
    log,
    run_seeded,
    seed,
    tensors_in,
)
from benchmarks.zoo.specimen import Absent, Case, Specimen
from benchmarks.zoo.torch_state import (
    changes_of_model,
    changes_of_torch,
    state_of_model,
    state_of_torch,
)
from benchmarks.zoo.training import Untrainable, check_training
from tests.validate.proof import prove

__all__ = ["Result", "check"]

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
    gradients: int = 0
    untrained: str = ""  # why not
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
            seed()
            case = specimen.make()
            case.model.eval()
            _check_eval(specimen, case, result)
            seed()
            _train(specimen.make(), result)
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
        first = run_seeded(lambda: call(case))
        # Compared with the second: some models prepare themselves in the first, and draw random
        # numbers for it.
        plain = run_seeded(lambda: call(case))
        if not all_equal(first.tensors, plain.tensors):
            reasons.append(
                "the model itself gives two results for one seed; nothing can be compared"
            )
            return
        module_outputs = _module_outputs(case)
        torch_before, model_before = state_of_torch(), state_of_model(model)
        logged = run_seeded(lambda: log(case))
        reasons += changes_of_torch(torch_before)
        reasons += changes_of_model(model_before, model)
        history = logged.value
        compare_runs(plain, logged, reasons)
        outputs = [history[label].tensor_contents for label in history.output_layers]
        if not all_equal(plain.tensors, outputs):
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
            lambda: _timed(lambda: log(case)), lambda: _timed(lambda: call(case))
        )
        result.memory_ratio = _ratio(
            lambda: _peak_bytes(lambda: log(case)), lambda: _peak_bytes(lambda: call(case)), 1
        )
    _validate(case, result)


def _validate(case: Case, result: Result) -> None:
    """The checks of `validate_forward_pass`, and those of the bookkeeping."""
    args, kwargs = arguments_of(case)
    seed()
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
            seen[f"{address}:{counts[address]}"] = [tensor.clone() for tensor in tensors_in(output)]

        return hook

    handles = [
        module.register_forward_hook(listen(address))
        for address, module in case.model.named_modules()
        if address
    ]
    try:
        run_seeded(lambda: call(case))
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
            if name in left and not any(equal(tensor, value) for value in left[name] + lost):
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


def _train(case: Case, result: Result) -> None:
    try:
        result.gradients, reasons = check_training(case)
    except Untrainable as error:
        result.untrained = str(error)
    else:
        result.reasons += reasons
        result.trained = True


# -- cost
# --------------------------------------------------------------------------------------------------


def _ratio(
    numerator: Callable[[], float], denominator: Callable[[], float], num_runs: int = 2
) -> float | None:
    below = min(denominator() for _ in range(num_runs))
    return round(min(numerator() for _ in range(num_runs)) / below, 2) if below else None


def _timed(run: Callable[[], Any]) -> float:
    start = time.process_time()
    kept = run()
    seconds = time.process_time() - start
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
