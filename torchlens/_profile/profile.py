"""The `Profile` that `torchlens.profile` returns: starts and ends measuring, and holds the results.
`run_trial` runs a model on given inputs for it.
"""

import difflib
import os
import threading
from typing import TYPE_CHECKING, Any, overload

import torch

from torchlens._capture.session import finished
from torchlens._health.checker import HealthChecker
from torchlens._health.finding import Findings
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._history.overlay import Overlay
from torchlens._history.receipt import Receipt, exported_receipt
from torchlens._profile.exports import RowsBy, to_chrome_trace, to_json, to_pandas
from torchlens._profile.findings import find
from torchlens._profile.make_records import label_finder, make_measurements
from torchlens._profile.model_watcher import ModelWatcher
from torchlens._profile.profile_options import ProfileOptions
from torchlens._profile.quantities import QuantityName, overlay
from torchlens._profile.records import (
    CallRecord,
    Measurements,
    ModuleRecord,
    OperationRecord,
    ParameterRecord,
    ProfiledStep,
)
from torchlens._profile.table import Table, TableBy, Times, summary
from torchlens._recording.origin import versions_now
from torchlens._recording.trees import named_tensors
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._replay.model_state import KeptTensor, State
from torchlens._text.problems import Problems

if TYPE_CHECKING:
    import pandas


class Profile:
    """Time, memory, FLOPs and health of a model's modules and operations, measured while the user's
    code runs.

    >>> with torchlens.profile(model) as p:
    ...     loss = model(x).sum()
    ...     loss.backward()
    >>> print(p)
    >>> p['features.0'].statistic('forward_seconds').median
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: ProfileOptions,
    ) -> None:
        self.problems = Problems()
        self._model_name = type(getattr(model, "_orig_mod", model)).__name__
        self._options = options
        self._history: ModelHistory | None = None
        self._checker: HealthChecker | None = None
        if options.check is not None:
            self._checker = HealthChecker(
                options.check, options.stop, options.thresholds, options.level == "module"
            )
        self._watcher: ModelWatcher | None = ModelWatcher(
            model, options, self._checker, self.problems
        )
        self._measurements: Measurements | None = None
        self._thread = 0

    # -- beginning and end
    # -----------------------------------------------------------------------------------------

    def start(self) -> "Profile":
        """Starts measuring; `finish` ends it. `with` does both."""
        if self._thread:
            raise RuntimeError(
                "A profile can be started only once, and this one has been. Make a new one: "
                "torchlens.profile(model)."
            )
        assert self._watcher is not None
        self._thread = threading.get_ident()
        try:
            self._watcher.start()
            return self
        except BaseException:  # an interrupt
            self._watcher.stop()
            raise

    def finish(self) -> None:
        """Ends measuring and removes everything that was added. May be called again."""
        if self._watcher is None:
            return
        if self._thread not in (0, threading.get_ident()):
            raise RuntimeError(
                "A profile must be finished in the thread that started it, because it measures "
                "that thread."
            )
        watcher = self._watcher
        try:
            watcher.stop()
        finally:  # again, because an interrupt may have cut the first call short
            watcher.stop()
        self._watcher, self._thread = None, -1
        if not watcher.ledger.steps and not self.problems:
            self.problems.add(watcher.why_nothing())
        try:
            self._measurements = make_measurements(watcher.ledger, self._model_name)
            if self._checker is not None:
                self._checker.finish(label_finder(watcher.ledger))
        except Exception as error:  # the user's code has succeeded, so this must not raise
            self.problems.add_failure(error, "What was measured is lost")
            watcher.ledger.forget_all()
            watcher.logged.last = None
            self._measurements = make_measurements(watcher.ledger, self._model_name)
        if watcher.logged.last is not None:
            self._history = ModelHistory(Log(watcher.logged.last))
        watcher.let_go()

    def __enter__(self) -> "Profile":
        return self.start()

    def __exit__(self, *error: object) -> None:
        try:
            self.finish()
        finally:  # again, as above
            self.finish()

    # -- what was measured
    # -----------------------------------------------------------------------------------------

    @property
    def measurements(self) -> Measurements:
        """All records together."""
        if self._measurements is None:
            raise RuntimeError(
                f"This profile of {self._model_name} has no results until measuring ends: read it "
                "after the `with` block, or after `finish()`."
            )
        return self._measurements

    @property
    def modules(self) -> dict[str, ModuleRecord]:
        """Every module by address, the model itself ('') first."""
        return self.measurements.modules

    def __getitem__(self, address: str) -> ModuleRecord:
        modules = self.modules
        if address not in modules:
            for record in modules.values():
                if address in record.aliases:
                    return record
            close = difflib.get_close_matches(str(address), modules, n=1)
            raise KeyError(
                f"No module {address!r}." + (f" Closest: {close[0]!r}." if close else "")
            )
        return modules[address]

    @property
    def root(self) -> ModuleRecord:
        """The model itself, with the modules inside as `children`."""
        return self.measurements.root

    @property
    def calls(self) -> list[CallRecord]:
        """Every call of every module, in the order they began."""
        return self.measurements.calls

    @property
    def operations(self) -> list[OperationRecord]:
        """Every operation of every step; empty at module level."""
        return self.measurements.operations

    @property
    def parameters(self) -> list[ParameterRecord]:
        """Every parameter once."""
        return self.measurements.parameters

    @property
    def steps(self) -> list[ProfiledStep]:
        """One record for each call of the model from your code."""
        return self.measurements.steps

    @property
    def flops_not_counted(self) -> dict[str, int]:
        """Layer types without a FLOP formula → the number of their calls in the last logged
        step.
        """
        return self.measurements.flops_not_counted

    @property
    def history(self) -> Any:
        """The log of the last detailed step, without saved tensors; None at module level."""
        return self._history

    @property
    def first_nonfinite(self) -> Any:
        """The first operation that made NaN or Inf; None if there was none, or without a check."""
        return None if self._checker is None else self._checker.origins.first_nonfinite

    # -- output
    # ----------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return repr(self) if self._measurements is None else str(summary(self._measurements))

    def __repr__(self) -> str:
        if self._measurements is None:
            return (
                f"<Profile of {self._model_name}: {'measuring' if self._thread else 'not started'}>"
            )
        num_steps = f"{len(self.steps)} step{'' if len(self.steps) == 1 else 's'}"
        counts = f"{num_steps}, {len(self.calls)} module calls"
        return f"<Profile of {self._model_name}: {counts}; print() it to see them>"

    def summary(
        self,
        depth: int | None = None,
        sort_by: QuantityName | None = None,
        width: int | None = None,
        by: TableBy = "module",
        limit: int | None = None,
        times: Times = "typical",
    ) -> Table:
        """A table to print: the modules as a tree or, with `sort_by`, as a list with the largest
        first.

        depth: how many levels of modules to show: 0 is the model alone; by default, as many as fit
        a screen or two.
        width: the width of the table; by default, that of the terminal.
        by: 'operation' lists operations; 'type' adds up the modules of each type, each without the
        modules inside.
        limit: how many lines to show; this leaves out the totals.
        times: 'minimum', 'median' or 'p95' of the measured steps, instead of typical times, which
        add up.

        >>> print(p.summary(depth=2, sort_by='backward_time'))
        """
        return summary(self.measurements, depth, sort_by, width, by, limit, times)

    @overload
    def to_json(self, path: None = None, indent: int | None = None) -> str: ...

    @overload
    def to_json(self, path: str | os.PathLike[str], indent: int | None = None) -> None: ...

    def to_json(
        self, path: str | os.PathLike[str] | None = None, indent: int | None = None
    ) -> str | None:
        """Returns the profile as JSON, nested like the model, or writes it to `path`."""
        return to_json(self.measurements, path, indent)

    def to_pandas(self, by: RowsBy = "module") -> "pandas.DataFrame":
        """A table with one row per module, or per 'call', 'operation', 'step' or 'parameter'."""
        table = to_pandas(self.measurements, by)
        table.attrs["receipt"] = self._receipt().to_dict()
        return table

    def _receipt(self) -> Receipt:
        if self._history is None:
            return Receipt(self._model_name, None, None, None, versions_now())
        return exported_receipt(self._history._log)

    @overload
    def to_chrome_trace(self, path: None = None) -> str: ...

    @overload
    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None: ...

    def to_chrome_trace(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Returns a timeline for Perfetto or chrome://tracing as JSON text, or writes it to
        `path`.
        """
        return to_chrome_trace(self.measurements, path)

    def overlay(self, quantity: QuantityName) -> Overlay:
        """A number for each module and layer, for `vis_color_by=` and `explore(overlays=)`."""
        return overlay(self.measurements, quantity)

    def findings(self) -> Findings:
        """What looks wrong with the model, the worst first."""
        return find(self.measurements, self._checker, self._options.thresholds)


# -- on given inputs


def run_trial(
    profile: Profile,
    model: torch.nn.Module,
    args: list[Any],
    kwargs: dict[str, Any],
    num_runs: int,
    backward: bool | None,
) -> None:
    """Measures `num_runs` runs. The model, the inputs and the generators of random numbers are then
    as they were.
    """
    state = State(model, (args, kwargs))
    with unseen(), NoTorchFunction():
        inputs = [KeptTensor(tensor) for _, tensor in named_tensors((args, kwargs))]
    try:
        with profile:
            for _ in range(num_runs):
                _begin_run(model, inputs)
                try:
                    _run(model, args, kwargs, backward)
                except _BackwardFailedError as failure:
                    if backward:
                        raise failure.error from None
                    backward = False
                    profile.problems.add(
                        "The backward pass from made-up gradients failed "
                        f"({str(failure).partition('. ')[0]}): forward alone was measured"
                    )
    finally:
        state.restore()
        for problem in state.problems:
            profile.problems.add(f"Not all state could be saved and restored ({problem})")


def _begin_run(model: torch.nn.Module, inputs: list[KeptTensor]) -> None:
    """Every run begins without gradients, and with the inputs that were given."""
    with unseen(), NoTorchFunction():
        for kept in inputs:
            kept.restore()
    for leaf in (*model.parameters(), *(kept.tensor for kept in inputs)):
        if leaf.is_leaf and leaf.requires_grad:
            leaf.grad = None


def _run(
    model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any], backward: bool | None
) -> None:
    result = finished(model(*args, **kwargs))
    if backward is False:
        return
    outputs = [tensor for _, tensor in named_tensors(result) if tensor.requires_grad]
    if outputs:
        try:
            torch.autograd.backward([_made_up_loss(output) for output in outputs])
        except RuntimeError as error:  # autograd's; exceptions of the model go through
            raise _BackwardFailedError(error) from error
    elif backward:
        raise ValueError(
            "backward=True, but no output of the model requires a gradient: its parameters and "
            "inputs do not, or gradients are switched off (torch.no_grad, torch.inference_mode)."
        )


def _made_up_loss(output: torch.Tensor) -> torch.Tensor:
    """A scalar from which the gradient of the output has a norm of about 1, as from a loss.

    The gradient's values differ, because equal ones become zero behind a normalisation or a
    softmax. (Passing the gradient to `backward` instead would make torch import sympy, which takes
    seconds.)
    """
    if output.is_complex():
        output = torch.view_as_real(output)
    if output.layout is not torch.strided or output.is_nested:
        return output.to_dense().sum() if output.is_sparse else output.values().sum()
    count = output.numel()
    places = torch.arange(count, device=output.device, dtype=torch.float32)
    weights = places.cos_().div_(max(1, count) ** 0.5)
    return (output * weights.view(output.shape).to(output.dtype)).sum().float()


class _BackwardFailedError(Exception):
    """The backward pass raised an error."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.error = error
