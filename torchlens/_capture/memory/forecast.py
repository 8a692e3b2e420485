"""Estimates how much a running log will still save, from parts of the model that are alike.

A block that has not run yet will save what its twin has saved: one of the same class, with parts of
the same classes and parameters of the same shapes. Nothing is expected of what has no twin, so the
forecast is mostly too low; where twins are given smaller inputs, it is too high.
"""

import weakref
from collections.abc import Hashable

import torch

from torchlens._capture.model_parts import Parts
from torchlens._capture.recorder import Recorder


class Forecast:
    """Compares the modules that a recorder has seen with those that it has not."""

    def __init__(self, recorder: Recorder, model: torch.nn.Module, parts: Parts) -> None:
        self._recorder = weakref.ref(recorder)  # which holds who asks this
        self._model = model
        self._addresses = parts.addresses

    def bytes_to_come(self, saved: dict[int, int]) -> int:
        """What modules that were not called yet will save, given how many bytes each entry has
        saved so far.
        """
        recorder = self._recorder()
        if recorder is None:
            return 0
        recorder.complete()
        calls = recorder.module_calls
        inside = [0] * len(calls)
        for entry, num_bytes in saved.items():
            inside[recorder.rows[entry].module_call] += num_bytes
        for number in range(len(calls) - 1, 0, -1):  # a call comes after the one that it is in
            inside[calls[number].parent] += inside[number]
        running, number = {""}, recorder.module_call
        while number > 0:
            running.add(calls[number].address)
            number = calls[number].parent
        saved_by = {call.address: num_bytes for call, num_bytes in zip(calls, inside, strict=True)}
        twins: dict[Hashable, int] = {}
        for module in self._model.modules():
            address = self._addresses.get(id(module))
            if (
                address in saved_by
                and address not in running
                and (kind := _kind(module)) is not None
            ):
                twins[kind] = saved_by[address]
        return self._expected(self._model, running, saved_by, twins)

    def _expected(
        self,
        module: torch.nn.Module,
        running: set[str],
        saved_by: dict[str, int],
        twins: dict[Hashable, int],
    ) -> int:
        total = 0
        for child in module.children():
            address = self._addresses.get(id(child), "")
            if address in running:
                total += self._expected(child, running, saved_by, twins)
            elif address not in saved_by:
                known = twins.get(_kind(child))
                total += self._expected(child, running, saved_by, twins) if known is None else known
        return total


def _kind(module: torch.nn.Module) -> Hashable:
    """The same for modules that are alike. None for those without parameters: how much they save is
    up to their input.
    """
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    return (
        (type(module), tuple(type(part) for part in module.modules()), shapes) if shapes else None
    )
