"""The public functions that measure: check the options, then call `profiling`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from torchlens.model_history import ModelHistory
from torchlens.options import check_inputs, check_model
from torchlens.profiling import Profile, ProfileOptions, run_trial
from torchlens.profiling.options import Check, Level
from torchlens.profiling.output.comparison import Comparison, compare_measurements
from torchlens.profiling.output.quantities import QuantityName
from torchlens.wording import check_count, got

__all__ = ["compare", "profile"]


def profile(
    model: torch.nn.Module,
    input_args: Any = None,
    input_kwargs: Mapping[str, Any] | None = None,
    *,
    level: Level | None = None,
    check: Check | None = None,
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
) -> Profile:
    """Measures the time, memory and FLOPs of every module of a model, forward and backward.

    Without inputs, it measures whatever the block does in the current thread; each call of the model begins a step:

    >>> with torchlens.profile(model) as p:
    ...     for x, y in batches:
    ...         loss = loss_of(model(x), y)
    ...         loss.backward()
    ...         optimizer.step()
    >>> print(p)

    With inputs, it runs the model itself and leaves it as it was: `warmup` times, one to three times for details, then
    `repeats` times for times, with a backward pass from an artificial gradient of the outputs unless `backward=False` or
    nothing requires a gradient:

    >>> print(torchlens.profile(model, x))

    Measuring memory, recording operations and checking values slow a model down. They alternate with steps in which only
    times are measured, and the times in the table come from those steps.

    level: 'module', or 'operation' to measure each operation as well; this runs steps under the log (`p.history`).
    check: 'nonfinite' finds the first operation that makes NaN or Inf; 'health' also looks for dead units, saturation,
        vanishing and exploding gradients (`p.findings()`). A check implies level='operation' unless you give
        level='module'.
    stop: raise NonFiniteError at the first NaN or Inf.
    memory: whether to measure memory, by listening to torch's allocators.
    warmup: how many steps to leave out of medians and spreads: by default 2 with inputs, none otherwise.
    max_steps: how many steps to measure at most.
    skip, measure, every: a schedule for long loops. The first `skip` steps are not measured. Then, of every `every` steps,
        the first `warmup` are warm-up, the next `measure` (by default one) are measured, and the rest are not.
    thresholds: the limits beyond which something is a finding, by name.
    """
    options = ProfileOptions(
        level=level, check=check, stop=stop, memory=memory, backward=backward, warmup=warmup, repeats=repeats,
        max_steps=max_steps, skip=skip, measure=measure, every=every, thresholds=thresholds,
        has_inputs=input_args is not None or input_kwargs is not None,
    )  # fmt: skip
    if not options.has_inputs:
        check_model(model)
        return Profile(model, options, ModelHistory)
    args, kwargs = check_inputs(model, input_args, input_kwargs)
    measured = Profile(model, replace(options, max_steps=options.num_runs), ModelHistory)
    run_trial(measured, model, args, kwargs, options.num_runs, options.backward)
    return measured


def compare(
    before: Profile,
    after: Profile,
    quantity: QuantityName = "total_time",
    *,
    step_kind: str | None = None,
    width: int | None = None,
    limit: int | None = None,
) -> Comparison:
    """Shows what changed between two profiles, module by module, matched by address; the largest change comes first.

    quantity: what to compare: 'total_time', 'forward_time', 'peak_bytes', 'flops', ...
    step_kind: which kind of steps to compare ('training', 'evaluation', ...); by default, the most frequent kind.

    >>> print(torchlens.compare(before, after))
    >>> print(torchlens.compare(before, after, 'peak_bytes', limit=10))
    """
    for name, value in (("before", before), ("after", after)):
        if not isinstance(value, Profile):
            raise TypeError(f"{name} must be a Profile, as torchlens.profile returns it, got {got(value)}.")
    for name, number in (("width", width), ("limit", limit)):
        if number is not None:
            check_count(name, number, 1)
    return compare_measurements(before.measurements, after.measurements, quantity, width, limit, step_kind)
