"""Takes note of parameters, their gradients and what a step of the optimizer does to them."""

import itertools
import weakref
from collections.abc import Iterator

import torch

from torchlens.capture.parts import named_modules
from torchlens.monitoring.collector import Collector
from torchlens.monitoring.options import MonitorOptions
from torchlens.monitoring.samples import Sample
from torchlens.monitoring.statistics import Observation

__all__ = ["ParameterWatch"]


class ParameterWatch:
    """Knows the parameters of a model by their ids, each by the first of its addresses."""

    def __init__(self, options: MonitorOptions, collector: Collector) -> None:
        self._options = options
        self._collector = collector
        # By id, weakly: a run that nobody finishes does not keep the model.
        self._parameters: dict[int, tuple[str, str, weakref.ref[torch.nn.Parameter]]] = {}
        self._before: dict[int, Sample] = {}
        # Optimizers that hold none of the parameters, with the number of theirs, as they were when that was found out.
        self._strangers: dict[int, int] = {}

    def refresh(self, model: torch.nn.Module) -> None:
        """Looks at the model as it is now."""
        found: dict[int, tuple[str, str, weakref.ref[torch.nn.Parameter]]] = {}
        for address, module in named_modules(model):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found.setdefault(id(parameter), (address, name, weakref.ref(parameter)))
        self._parameters = found
        self._strangers.clear()

    def forget(self) -> None:
        """Lets go of the model."""
        self._parameters, self._before = {}, {}

    def is_in(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
        """Whether an optimizer holds a parameter of the model."""
        if any(id(parameter) in self._parameters for parameter in _held_by(optimizer)):
            return True
        count = sum(1 for _ in _held_by(optimizer))
        if self._strangers.get(id(optimizer)) == count:
            return False
        self.refresh(model)  # the parameters may be others by now: FSDP puts its own in their places
        if any(id(parameter) in self._parameters for parameter in _held_by(optimizer)):
            return True
        self._strangers[id(optimizer)] = count
        return False

    def note_before(self, optimizer: torch.optim.Optimizer | None, has_gradients: bool = True) -> None:
        """Samples parameters and gradients before a step of the optimizer; of all, if there is none. Call it quietly.

        Where the step itself computes the gradients, those that are there now are of another step.
        """
        log, collector = self._options.log, self._collector
        self._before.clear()
        for module, name, parameter in self._of(optimizer):
            if "parameters" in log or "updates" in log:
                sample = collector.sampler.take(parameter, "parameters" in log)
                if sample is None:
                    continue
                if "parameters" in log:
                    number = collector.names.number(module, "parameters", name, parameter)
                    collector.pending.append(Observation(number, sample))
                if "updates" in log:
                    self._before[id(parameter)] = sample
            if has_gradients:
                self._note_gradient(module, name, parameter)

    def remember(self) -> None:
        """Keeps samples of all parameters, from which `note_after` tells the changes. Call it quietly."""
        self._before.clear()
        if "updates" in self._options.log:
            for _, _, parameter in self._of(None):
                sample = self._collector.sampler.take(parameter, False)
                if sample is not None:
                    self._before[id(parameter)] = sample

    def note_after(self, optimizer: torch.optim.Optimizer | None, has_gradients: bool = False) -> None:
        """Samples what changed since `note_before`, and gradients that came since. Call it quietly."""
        collector = self._collector
        for module, name, parameter in self._of(optimizer):
            if has_gradients:
                self._note_gradient(module, name, parameter)
            before = self._before.pop(id(parameter), None)
            if before is not None:
                after = collector.sampler.take(parameter, False)
                if after is not None and after.plan is before.plan:
                    number = collector.names.number(module, "updates", name, parameter)
                    collector.pending.append(Observation(number, after, before))
        self._before.clear()

    def _note_gradient(self, module: str, name: str, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is not None and "parameter_gradients" in self._options.log:
            sample = self._collector.sampler.take(gradient)
            if sample is not None:
                number = self._collector.names.number(module, "parameter_gradients", name, gradient)
                self._collector.pending.append(Observation(number, sample))

    def _of(self, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
        wants, known = self._options.wants, self._parameters
        for number in list(known) if optimizer is None else map(id, _held_by(optimizer)):
            named = known.get(number)
            if named is not None and wants(named[0]) and (parameter := named[2]()) is not None:
                yield named[0], named[1], parameter


def _held_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
