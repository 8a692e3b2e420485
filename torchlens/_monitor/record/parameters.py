"""Samples parameters, their gradients, and their changes in an optimizer step."""

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from torchlens._capture.model_parts import named_modules
from torchlens._monitor.record.collector import Collector
from torchlens._monitor.record.monitor_options import MonitorOptions
from torchlens._monitor.record.samples import Sample


@dataclass(slots=True, eq=False)
class _Known:
    """A parameter under its first address."""

    module: str
    name: str
    is_wanted: bool
    # A weak reference: an unfinished run must not keep the model alive.
    reference: "weakref.ref[torch.nn.Parameter]"
    before: Sample | None = None  # taken before the optimizer's step


class ParameterWatch:
    """The parameters of a model, by id."""

    def __init__(self, options: MonitorOptions, collector: Collector) -> None:
        self._options = options
        self._collector = collector
        self._has_parameters, self._has_updates = (
            "parameters" in options.log,
            "updates" in options.log,
        )
        self._has_gradients = "parameter_gradients" in options.log
        self._parameters: dict[int, _Known] = {}
        # Optimizers without any of the parameters: their number of parameters when checked, by id.
        self._strangers: dict[int, int] = {}

    def refresh(self, modules: Sequence[tuple[str, torch.nn.Module]]) -> None:
        """Updates the known parameters to those of the current modules."""
        last, self._parameters = self._parameters, {}
        for address, module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in self._parameters:
                    continue
                known = last.get(id(parameter))
                if known is None or known.reference() is not parameter:
                    wanted = self._options.wants(address)
                    known = _Known(address, name, wanted, weakref.ref(parameter))
                self._parameters[id(parameter)] = known
        self._strangers.clear()

    def forget(self) -> None:
        """Drops all references to parameters."""
        self._parameters = {}

    def is_in(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
        """Whether an optimizer holds a parameter of the model."""
        if self._has_any_of(optimizer):
            return True
        count = sum(1 for _ in _held_by(optimizer))
        if self._strangers.get(id(optimizer)) == count:
            return False
        # Parameters may have been replaced since the last refresh, as by FSDP.
        self.refresh(named_modules(model))
        self._strangers[id(optimizer)] = count
        return self._has_any_of(optimizer)

    def _has_any_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(parameter) in self._parameters for parameter in _held_by(optimizer))

    def note_before(self, optimizer: torch.optim.Optimizer, has_gradients: bool = True) -> None:
        """Samples parameters and gradients before a step of the optimizer. Call it under
        `call_unseen`.

        `has_gradients` is False if the step itself computes the gradients: those present before it
        belong to another step.
        """
        self.remember(optimizer)
        for known, parameter in self._of(optimizer):
            if self._has_parameters:
                self._note("parameters", known, parameter, known.before)
            if has_gradients:
                self._note_gradient(known, parameter)

    def remember(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Samples the parameters before a step. Call it under `call_unseen`."""
        for known in self._parameters.values():
            known.before = None
        if self._has_parameters or self._has_updates:
            for known, parameter in self._of(optimizer):
                known.before = self._collector.sampler.take(parameter, self._has_parameters)

    def note_by_hand(self) -> None:
        """After a step without an optimizer: records all parameters as sampled by `remember`, their
        gradients and changes. Call it under `call_unseen`.
        """
        if self._has_parameters:
            for known, parameter in self._of(None):
                self._note("parameters", known, parameter, known.before)
        self.note_after(None, has_gradients=True)

    def note_after(
        self, optimizer: torch.optim.Optimizer | None, has_gradients: bool = False
    ) -> None:
        """Samples the changes since `note_before`, and with `has_gradients` the gradients. Call it
        under `call_unseen`.
        """
        for known, parameter in self._of(optimizer):
            if has_gradients:
                self._note_gradient(known, parameter)
            before, known.before = known.before, None
            if before is not None and self._has_updates:
                after = self._collector.sampler.take(parameter, False)
                if after is not None and after.plan is before.plan:
                    self._note("updates", known, parameter, after, before)

    def _note_gradient(self, known: _Known, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is not None and self._has_gradients:
            sample = self._collector.sampler.take(gradient)
            self._note("parameter_gradients", known, gradient, sample)

    def _note(
        self, kind: str, known: _Known, tensor: torch.Tensor, sample: Sample | None,
        before: Sample | None = None,
    ) -> None:  # fmt: skip
        if sample is None:
            return
        number = self._collector.names.number(known.module, kind, known.name, tensor)
        self._collector.pending.append((number, sample, before))

    def _of(
        self, optimizer: torch.optim.Optimizer | None
    ) -> Iterator[tuple[_Known, torch.nn.Parameter]]:
        all_known = self._parameters
        numbers: Iterable[int] = (
            list(all_known) if optimizer is None else map(id, _held_by(optimizer))
        )
        for number in numbers:
            known = all_known.get(number)
            if (
                known is not None
                and known.is_wanted
                and (parameter := known.reference()) is not None
            ):
                yield known, parameter


def _held_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
