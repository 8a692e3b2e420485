"""Hands saved values on while the model is still running, so that a log may be larger than memory.

From time to time the recorder looks how much it holds. Beyond a limit the values go to whoever takes them, and what that
gives back stands in their place. Where only outputs of some modules are wanted, the other values are held until then, as
long as they are few; afterwards, they are not saved in the first place.
"""

import threading
import weakref
from collections.abc import Container, Mapping, Sequence
from time import perf_counter
from typing import Protocol

import torch

from torchlens.capture.memory import Memory
from torchlens.capture.recorder import Recorder
from torchlens.capture.stored import StoredValue

__all__ = ["Outflow", "OutflowWatch"]

_INTERVAL = 0.005  # seconds between two looks


class Outflow(Protocol):
    """Whoever takes the values."""

    @property
    def limit(self) -> int:
        """How many bytes of values to hold before they are handed over."""

    def take(self, numbers: Sequence[int]) -> Mapping[int, StoredValue]:
        """Takes the values of these rows of the running log; returns what is to stand in place of those it took."""


class OutflowWatch:
    """Stands where a `MemoryWatch` may stand, and is asked as often."""

    interval = _INTERVAL

    def __init__(self, recorder: Recorder, memory: Memory, outflow: Outflow, wanted: Container[int] | None = None) -> None:
        self._recorder = weakref.ref(recorder)  # which holds this
        self._memory = memory
        self._outflow = outflow
        self._wanted = wanted  # grows as the modules return
        self._thread = threading.get_ident()
        self._num_seen = 0
        self._bytes = 0
        self._held: list[int] = []

    def look(self, outside: Sequence[torch.Tensor]) -> float:
        """Hands values over if there are enough of them; returns when to look again."""
        if threading.get_ident() == self._thread:
            with torch._C.DisableTorchFunction():
                self._count()
                if self._bytes >= self._outflow.limit:
                    self._hand_over()
        return perf_counter() + _INTERVAL

    def _count(self) -> None:
        values = self._memory.values
        for number in range(self._num_seen, len(values)):
            value = values[number]
            if type(value) is torch.Tensor and number not in self._memory.unfinished:
                self._bytes += value.numel() * value.element_size()
                self._held.append(number)
        self._num_seen = len(values)

    def _hand_over(self) -> None:
        recorder = self._recorder()
        if recorder is None:
            return
        recorder.expect_values_to_leave(stops_saving=self._wanted is not None)
        held = [number for number in self._held if self._wanted is None or number in self._wanted]
        gone: dict[int, StoredValue | None] = dict.fromkeys(self._held) if self._wanted is not None else {}
        self._memory.let_go(gone | dict(self._outflow.take(held)))
        self._bytes, self._held = 0, []
