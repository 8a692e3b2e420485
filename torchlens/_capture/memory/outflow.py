"""Hands saved values on while the model runs, so that a log may be larger than memory.

Values beyond a limit go to a receiver, and what it gives back replaces them. If only outputs of
some modules are wanted, the other values are held as long as they are few; after that, they are not
saved in the first place.
"""

import threading
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Protocol

import torch

from torchlens._capture.memory.saved_values import Memory
from torchlens._capture.recorder import Recorder
from torchlens._recording.stored import StoredValue
from torchlens._recording.unseen import NoTorchFunction

_INTERVAL = 0.005  # seconds between two checks
_FEW = 4 * 2**20  # bytes of values that are held but not wanted: freeing each one takes longer


class Outflow(Protocol):
    """Receives saved values during a pass."""

    @property
    def limit(self) -> int:
        """How many bytes of values to hold before they are handed over."""

    def take(self, numbers: Sequence[int]) -> Mapping[int, StoredValue]:
        """Takes the values of these rows; returns their replacements, for those it took."""


class OutflowWatch:
    """Checks periodically how much is saved, and hands values over to an `Outflow`."""

    interval = _INTERVAL

    def __init__(
        self,
        recorder: Recorder,
        memory: Memory,
        outflow: Outflow,
        wanted: Container[int] | None = None,
    ) -> None:
        self._recorder = weakref.ref(recorder)  # which holds this
        self._memory = memory
        self._outflow = outflow
        self._wanted = wanted  # grows as the modules return
        self._thread = threading.get_ident()
        self._num_seen = 0
        self._bytes = 0
        self._held: list[int] = []

    def look(self, outside: Iterable[torch.Tensor]) -> float:
        """Hands values over if there are enough; returns the time of the next check."""
        if threading.get_ident() == self._thread:
            with NoTorchFunction():
                self._count()
                if self._wanted is not None and self._bytes >= min(_FEW, self._outflow.limit):
                    self._forget_unwanted(self._wanted)
                if self._bytes >= self._outflow.limit:
                    self._hand_over()
        return perf_counter() + _INTERVAL

    def _count(self) -> None:
        values = self._memory.values
        for number in range(self._num_seen, len(values)):
            value = values[number]
            if type(value) is torch.Tensor and number not in self._memory.unfinished:
                self._bytes += _bytes_of(value)
                self._held.append(number)
        self._num_seen = len(values)

    def _forget_unwanted(self, wanted: Container[int]) -> None:
        """Discards values that no module has returned so far; `_save_output` saves them if one does
        later.
        """
        recorder = self._recorder()
        if recorder is not None:
            recorder.expect_values_to_leave(stops_saving=True)
            self._memory.let_go({number: None for number in self._held if number not in wanted})
            self._held = [number for number in self._held if number in wanted]
            self._bytes = sum(_bytes_of(self._memory.values[number]) for number in self._held)

    def _hand_over(self) -> None:
        recorder = self._recorder()
        if recorder is not None:
            recorder.expect_values_to_leave()
            self._memory.let_go(self._outflow.take(self._held))
            self._bytes, self._held = 0, []


def _bytes_of(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()
