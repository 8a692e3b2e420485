"""The public functions that record a training run and read it again: check the options, then call `monitoring`."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from torchlens.model_history import ModelHistory
from torchlens.monitoring import MonitorOptions, Run, RunReader
from torchlens.monitoring import open_run as _open_run
from torchlens.monitoring.run import last_run
from torchlens.monitoring.series import KINDS
from torchlens.monitoring.sinks.sink import Sink
from torchlens.options import check_model
from torchlens.watch_names import known_options
from torchlens.wording import got

__all__ = ["current_run", "monitor", "open_run"]


def monitor(
    model: torch.nn.Module,
    folder: str | os.PathLike[str],
    *,
    every: int = 1,
    log: str | Iterable[str] = KINDS,
    modules: str | Iterable[str] | None = None,
    seconds: float | None = None,
    step: int | None = None,
    budget: int = 64 << 20,
    graph: Literal["operations", "modules"] = "operations",
    compiled: Literal["boundary", "eager"] = "boundary",
    evaluation: bool = False,
    sinks: Sink | Sequence[Sink] = (),
    **foreign: Any,
) -> Run:
    """Records, over a training run, the distributions of what the modules of a model compute, at almost no cost.

    >>> run = torchlens.monitor(model, 'runs/a', every=10)
    >>> for x, y in batches:                       # the training loop, unchanged
    ...     loss = loss_of(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()
    ...     run.log(loss=loss)
    >>> run.finish()                               # or `with`; also at exit
    >>> r = torchlens.open_run('runs/a')           # while it is written, or later

    Losses and weights are bit for bit the same as without it. A step ends when an optimizer that holds the model's
    parameters takes its step; without such an optimizer, call `run.step()`. If the folder already holds a run, that run
    continues.

    every: record every n-th step.
    log: what to record: 'inputs', 'outputs', 'gradients' (of outputs), 'parameters', 'parameter_gradients', 'updates'.
    modules: record only modules with these addresses; '*' stands for anything ('layer1.*').
    seconds: record for this long, then let training continue unrecorded.
    step: the number of the first step, if training resumes from a checkpoint; steps recorded from there on are replaced.
    budget: how many bytes the files of each process may take. Beyond that, the oldest steps are merged in pairs.
    graph: 'operations' logs the first recorded call to get the graph; 'modules' only notes which module called which.
    compiled: 'boundary' records compiled code from outside only; 'eager' runs its Python source in recorded steps, whose
        numbers may differ in the last bits from those of the compiled code.
    evaluation: whether to also record calls in eval mode without gradients.
    sinks: where else to send the run: torchlens.sinks.TensorBoard('tb/a'), Wandb(), Trackio('project'), MLflow().

    Options of `torchexplorer.watch`, `wandb.watch` and pytorch_inspector that mean the same are accepted (`log_freq=`,
    `log=['io', 'params']`); for the others, an error says what to write instead.
    """
    if isinstance(model, list | tuple | dict) and model:
        raise TypeError(
            f"model must be a torch.nn.Module, got {got(model)}. For several models, use one run for each, "
            "monitor(a, 'runs/a') and monitor(b, 'runs/b'), or one run for torch.nn.ModuleList([a, b])."
        )
    check_model(model)
    own = {
        "every": every, "log": log, "modules": modules, "seconds": seconds, "step": step, "budget": budget, "graph": graph,
        "compiled": compiled, "evaluation": evaluation, "sinks": sinks,
    }  # fmt: skip
    options = MonitorOptions(**known_options(foreign, own))
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        raise TypeError(f"folder must name a folder, such as 'runs/a', got {got(folder)}.")
    path = Path(folder).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder must name a folder, got the file {str(path)!r}.")
    return Run(model, path, options, ModelHistory).start()


def current_run() -> Run:
    """Returns the run that is being recorded, from anywhere in the program; of several runs, the one started last.

    >>> torchlens.current_run().watch('latent', z)
    >>> torchlens.current_run().video('layer1', 'layer1.mp4', seconds=60)
    """
    run = last_run()
    if run is None:
        raise RuntimeError("No run is being recorded. Start one with torchlens.monitor(model, 'runs/a').")
    return run


def open_run(folder: Any) -> RunReader:
    """Opens a run that `monitor` has recorded or is still recording.

    >>> r = torchlens.open_run('runs/a')
    >>> r['layer1.0.conv1'].outputs.histogram()
    >>> r.scalars['loss'].values, r.findings, r.problems, r.counts
    >>> r.to_pandas()
    """
    return _open_run(folder)
