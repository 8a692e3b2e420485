"""The public functions that record a training run and read it again: check the options, then the monitoring room."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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
    graph: str = "operations",
    compiled: str = "boundary",
    evaluation: bool = False,
    sinks: Sink | Sequence[Sink] = (),
    **foreign: Any,
) -> Run:
    """Records the distributions of what a model's modules compute over a training run, at almost no cost.

    >>> run = torchlens.monitor(model, 'runs/a', every=10)
    >>> for x, y in batches:                       # the training loop, unchanged
    ...     loss = loss_of(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()
    ...     run.log(loss=loss)
    >>> run.finish()                               # or `with`; also at exit
    >>> r = torchlens.open_run('runs/a')           # while it is written, or later

    Losses and weights are bit for bit what they are without it. A step ends with the step of an optimizer that holds the
    model's parameters; where there is none, call `run.step()`. A folder that holds a run already is continued.

    every: record every so many steps.
    log: what to record: 'inputs', 'outputs', 'gradients' (of outputs), 'parameters', 'parameter_gradients', 'updates'.
    modules: record only modules with these addresses; '*' stands for anything ('layer1.*').
    seconds: record for so long, then let the training go on alone.
    step: the number of the first step, where a training goes on from a checkpoint: it supersedes what was recorded there.
    budget: bytes that the files may take for each process. Beyond, the oldest steps are merged pairwise.
    graph: 'operations' logs the first recorded call for the graph, 'modules' only notes who called whom.
    compiled: what torch.compile made is seen from outside ('boundary'), or runs as its source in recorded steps ('eager'),
        whose numbers may differ in the last bits from those of compiled code.
    evaluation: also record calls in eval mode without gradients.
    sinks: where to send it, too: torchlens.sinks.TensorBoard('tb/a'), Wandb(), Trackio('project'), MLflow().

    Options of `torchexplorer.watch`, `wandb.watch` and pytorch_inspector that mean the same are taken (`log_freq=`,
    `log=['io', 'params']`); of the others, an error says what to do.
    """
    if isinstance(model, list | tuple | dict) and model:
        raise TypeError(
            f"model must be a torch.nn.Module, got {got(model)}. Several models: one run for each, "
            "monitor(a, 'runs/a') and monitor(b, 'runs/b'), or one for torch.nn.ModuleList([a, b])."
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
    """The run that is being recorded, from any place in the program; of several, the one that was begun last.

    >>> torchlens.current_run().watch('latent', z)
    >>> torchlens.current_run().video('layer1', 'layer1.mp4', seconds=60)
    """
    run = last_run()
    if run is None:
        raise RuntimeError("No run is being recorded. Begin one with torchlens.monitor(model, 'runs/a').")
    return run


def open_run(folder: Any) -> RunReader:
    """Opens a run that `monitor` recorded, or is recording.

    >>> r = torchlens.open_run('runs/a')
    >>> r['layer1.0.conv1'].outputs.histogram()
    >>> r.scalars['loss'].values, r.findings, r.problems, r.counts
    >>> r.to_pandas()
    """
    return _open_run(folder)
