"""Samples parameters, their gradients, and their changes in an optimizer step."""

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch

from torchlens._capture.model_parts import named_modules
from torchlens._monitor.record.collector import Collector
from torchlens._monitor.record.monitor_options import MonitorOptions
from torchlens._monitor.record.samples import Sample


class _Known:
    """A parameter under its first address, with the numbers of its series (-1: not assigned
    yet).
    """

    __slots__ = (
        "before",
        "gradient_number",
        "is_wanted",
        "module",
        "name",
        "number",
        "reference",
        "update_number",
    )

    def __init__(
        self, module: str, name: str, parameter: torch.nn.Parameter, is_wanted: bool
    ) -> None:
        self.module, self.name, self.is_wanted = module, name, is_wanted
        # A weak reference: an unfinished run must not keep the model alive.
        self.reference = weakref.ref(parameter)
        self.number = self.gradient_number = self.update_number = -1
        self.before: Sample | None = None  # taken before the optimizer's step


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
        last = self._parameters
        found: dict[int, _Known] = {}
        for address, module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in found:
                    continue
                known = last.get(id(parameter))
                if (
                    known is None
                    or known.module != address
                    or known.name != name
                    or known.reference() is not parameter
                ):
                    known = _Known(address, name, parameter, self._options.wants(address))
                found[id(parameter)] = known
        self._parameters = found
        self._strangers.clear()

    def forget(self) -> None:
        """Drops all references to parameters."""
        self._parameters = {}

    def is_in(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
        """Whether an optimizer holds a parameter of the model."""
        if any(id(parameter) in self._parameters for parameter in _held_by(optimizer)):
            return True
        count = sum(1 for _ in _held_by(optimizer))
        if self._strangers.get(id(optimizer)) == count:
            return False
        # Parameters may have been replaced since the last refresh, as by FSDP.
        self.refresh(named_modules(model))
        if any(id(parameter) in self._parameters for parameter in _held_by(optimizer)):
            return True
        self._strangers[id(optimizer)] = count
        return False

    def note_before(self, optimizer: torch.optim.Optimizer, has_gradients: bool = True) -> None:
        """Samples parameters and gradients before a step of the optimizer. Call it under
        `call_unseen`.

        `has_gradients` is False if the step itself computes the gradients: those present before it
        belong to another step.
        """
        take, names, pending = (
            self._collector.sampler.take,
            self._collector.names,
            self._collector.pending,
        )
        self._clear()
        for known, parameter in self._of(optimizer):
            if self._has_parameters or self._has_updates:
                sample = take(parameter, self._has_parameters)
                if sample is None:
                    continue
                if self._has_parameters:
                    if known.number < 0:
                        known.number = names.number(
                            known.module, "parameters", known.name, parameter
                        )
                    pending.append((known.number, sample, None))
                if self._has_updates:
                    known.before = sample
            if has_gradients:
                self._note_gradient(known, parameter)

    def remember(self) -> None:
        """Samples all parameters before a step, for `note_by_hand`. Call it under `call_unseen`."""
        self._clear()
        if self._has_parameters or self._has_updates:
            for known, parameter in self._of(None):
                known.before = self._collector.sampler.take(parameter, self._has_parameters)

    def note_by_hand(self) -> None:
        """After a step without an optimizer: records all parameters as sampled by `remember`, their
        gradients and changes. Call it under `call_unseen`.
        """
        names, pending = self._collector.names, self._collector.pending
        for known, parameter in self._of(None):
            if known.before is not None and self._has_parameters:
                if known.number < 0:
                    known.number = names.number(known.module, "parameters", known.name, parameter)
                pending.append((known.number, known.before, None))
        self.note_after(None, has_gradients=True)

    def note_after(
        self, optimizer: torch.optim.Optimizer | None, has_gradients: bool = False
    ) -> None:
        """Samples the changes since `note_before`, and with `has_gradients` the gradients. Call it
        under `call_unseen`.
        """
        collector = self._collector
        for known, parameter in self._of(optimizer):
            if has_gradients:
                self._note_gradient(known, parameter)
            before = known.before
            if before is not None and self._has_updates:
                after = collector.sampler.take(parameter, False)
                if after is not None and after.plan is before.plan:
                    if known.update_number < 0:
                        known.update_number = collector.names.number(
                            known.module, "updates", known.name, parameter
                        )
                    collector.pending.append((known.update_number, after, before))
        self._clear()

    def _note_gradient(self, known: _Known, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is not None and self._has_gradients:
            collector = self._collector
            sample = collector.sampler.take(gradient)
            if sample is not None:
                if known.gradient_number < 0:
                    known.gradient_number = collector.names.number(
                        known.module, "parameter_gradients", known.name, gradient
                    )
                collector.pending.append((known.gradient_number, sample, None))

    def _clear(self) -> None:
        for known in self._parameters.values():
            known.before = None

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
