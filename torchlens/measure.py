"""The public function that measures: check the options, then the profiling room."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from torchlens.model_history import ModelHistory
from torchlens.options import check_inputs, check_model
from torchlens.profiling import Profile, ProfileOptions, run_trial
from torchlens.profiling.options import Check, Level

__all__ = ["profile"]


def profile(
    model: torch.nn.Module,
    input_args: Any = None,
    input_kwargs: dict[str, Any] | None = None,
    *,
    level: Level | None = None,
    check: Check | None = None,
    stop: bool = False,
    memory: bool = True,
    backward: bool | None = None,
    warmup: int | None = None,
    repeats: int = 5,
    max_steps: int = 100,
    thresholds: Mapping[str, Any] | None = None,
) -> Profile:
    """Measures time, memory and FLOPs of every module of a model, forward and backward.

    Without inputs, around whatever the caller does, in the thread that does it; each call of the model is a step:

    >>> with torchlens.profile(model) as p:
    ...     for x, y in batches:
    ...         loss = loss_of(model(x), y)
    ...         loss.backward()
    ...         optimizer.step()
    >>> print(p)

    With inputs it runs the model itself (`warmup` times, then `repeats` times, with a backward pass from a made-up gradient
    of the outputs unless `backward=False` or nothing requires a gradient) and leaves the model as it was:

    >>> print(torchlens.profile(model, x))

    level: 'module', or 'operation' to measure each operation too, on top of a log of each step (`p.history`).
    check: 'nonfinite' finds the first operation that makes NaN or Inf; 'health' also looks for dead units, saturation,
        vanishing and exploding gradients (`p.findings()`). A check is at operation level unless level='module'.
    stop: raise NonFiniteError at the first NaN or Inf.
    memory: listen to the allocators.
    warmup: how many steps to leave out of medians and spreads: 2 of the runs with inputs, none otherwise.
    max_steps: measure no more steps than these.
    thresholds: limits of the findings, by name.
    """
    options = ProfileOptions(
        level=level, check=check, stop=stop, memory=memory, backward=backward, warmup=warmup, repeats=repeats,
        max_steps=max_steps, thresholds=thresholds, has_inputs=input_args is not None or input_kwargs is not None,
    )  # fmt: skip
    if not options.has_inputs:
        check_model(model)
        return Profile(model, options, ModelHistory)
    args, kwargs = check_inputs(model, input_args, input_kwargs)
    num_runs = options.warmup + options.repeats
    measured = Profile(model, replace(options, max_steps=num_runs), ModelHistory)
    run_trial(measured, model, args, kwargs, num_runs, options.backward)
    return measured
