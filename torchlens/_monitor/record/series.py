"""The series of a run: which tensor of which module, over the steps; and the names that the file
knows them by.
"""

import threading
from typing import Any, NamedTuple

import torch

from torchlens._monitor.record.units import Units

# What may be asked for with `log=`, and beside them what `run.watch` adds.
KINDS = ("inputs", "outputs", "gradients", "parameters", "parameter_gradients", "updates")
WATCHED = "watched"


class SeriesName(NamedTuple):
    """Which tensors: of a module, of what kind, and which of several ('weight', '1', 'logits'; ''
    for the only one).
    """

    number: int
    module: str
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str


class SeriesNames:
    """Gives each series its number, as it comes up. Only ever grows."""

    def __init__(self) -> None:
        self.rows: list[SeriesName] = []
        # Limits of bounded activations, and the units of what modules return, for the statistics.
        self.limits: dict[int, tuple[float, float]] = {}
        self.units: dict[int, Units] = {}
        self._numbers: dict[tuple[str, str, str], int] = {}
        self._lock = threading.Lock()

    def number(self, module: str, kind: str, name: str, tensor: torch.Tensor) -> int:
        """The number of a series; `tensor` is the first that it is about."""
        key = (module, kind, name)
        found = self._numbers.get(key)
        if found is None:
            with self._lock:
                if key not in self._numbers:
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    found = len(self.rows)
                    self.rows.append(
                        SeriesName(found, module, kind, name, tuple(map(int, tensor.shape)), dtype)
                    )
                    self._numbers[key] = found
                found = self._numbers[key]
        return found

    def as_json(self, start: int = 0) -> list[list[Any]]:
        """What a NAMES frame says of the series from `start` on."""
        return [[*row[:4], list(row.shape), row.dtype] for row in self.rows[start:]]
