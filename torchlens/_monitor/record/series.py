"""The series of a run: which tensor of which module, and its number in the files."""

import threading
from collections.abc import Mapping

import torch

from torchlens._monitor.record.units import Units
from torchlens._monitor.store.columns import SeriesKey

# What may be asked for with `log=`, and beside them what `run.watch` adds.
KINDS = ("inputs", "outputs", "gradients", "parameters", "parameter_gradients", "updates")
WATCHED = "watched"


class SeriesNames:
    """Gives each series a number when its first tensor is sampled."""

    def __init__(self) -> None:
        self.rows: list[SeriesKey] = []  # by number; only grows
        # Limits of bounded activations, and the units of what modules return, for the statistics.
        self.limits: dict[int, tuple[float, float]] = {}
        self.units: dict[int, Units] = {}
        self._numbers: dict[tuple[str, str, str], int] = {}
        self._lock = threading.Lock()

    def go_on(self, known: Mapping[int, SeriesKey]) -> None:
        """Keeps the numbers of earlier sessions. Call it before any series has a number."""
        for number in range(max(known, default=-1) + 1):
            key = known.get(number, SeriesKey("", "", "", (), ""))  # its line was damaged
            self.rows.append(key)
            if key.kind:
                self._numbers[key[:3]] = number

    def number(self, module: str, kind: str, name: str, tensor: torch.Tensor) -> int:
        """The number of a series; `tensor` is the first that it is about."""
        key = (module, kind, name)
        found = self._numbers.get(key)
        if found is None:
            with self._lock:
                found = self._numbers.setdefault(key, len(self.rows))
                if found == len(self.rows):
                    shape = tuple(map(int, tensor.shape))
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    self.rows.append(SeriesKey(*key, shape, dtype))
        return found
