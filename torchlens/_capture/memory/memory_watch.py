"""Warns, as early as possible, of a log that will take more than half of the memory that was free
when it began.

Counting what is saved costs something for each tensor, so the system is asked first: as long as the
process has not grown by as much, no log can have taken it. Of the memory of devices the system
knows nothing; there, shapes are added up.
"""

import math
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch

from torchlens._recording.recording import Recording, Row
from torchlens._recording.system_memory import free_bytes, resident_bytes
from torchlens._recording.trees import plain_tensors
from torchlens._recording.user_code import warn_log_caller
from torchlens._recording.wrappers import inner_of

_CPU = torch.device("cpu")
# Seconds between two looks. What runs on a device is called much faster than it is computed.
_INTERVAL = 0.005
_DEVICE_INTERVAL = 0.00025
# Below this, nobody is asked what is free: it takes as long as hundreds of operations.
_NEGLIGIBLE_BYTES = 32 * 2**20
# How often it is looked ahead, at most, before a log has taken what is worth a warning.
_LOOKS_AHEAD = 8
_CURE = (
    "Save less: layers_to_save=[...] with the layers or modules you need, or 'none' for a log "
    "without values. Or make the batch smaller, or put model and inputs on torch.device('meta') "
    "if shapes are enough"
)


class Look(Protocol):
    """Whoever is to look from time to time at what a log has saved so far."""

    interval: float

    def look(self, outside: Sequence[torch.Tensor]) -> float:
        """Looks, and returns when to look again. `outside` are tensors that live anyway."""


class Foresight(Protocol):
    """Whoever knows what a log is still going to save."""

    def bytes_to_come(self, saved: dict[int, int]) -> int:
        """How many bytes, at least, given how many each entry has saved so far."""


class MemoryWatch:
    """Compares what a log has saved with what was free when it began."""

    def __init__(
        self,
        values: Sequence[Any],
        saved_args: dict[int, Any],
        keeps_gradients: bool,
        foresight: Foresight | None = None,
    ) -> None:
        self._values = values
        self._saved_args = saved_args
        self._foresight = foresight
        self._times = 2 if keeps_gradients else 1  # a gradient for each value is still to come
        self._resident = resident_bytes()
        self._asks_system = self._resident is not None and not _has_devices()
        # Beside the system: the bytes of the values so far, by device, whether they share memory or
        # not.
        self._num_added = 0
        self._added: dict[torch.device, int] = {}
        # By device, what was free at the start, and at how much it is time to count.
        self._free: dict[torch.device, float] = {}
        self._count_at: dict[torch.device, float] = {}
        self._is_over = False
        self.interval = _INTERVAL if self._asks_system else _DEVICE_INTERVAL

    def look(self, outside: Iterable[torch.Tensor]) -> float:
        """Warns if it is time to, once; returns when to look again. `outside` are tensors that live
        anyway.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for device, taken in self._taken().items():
                if taken >= self._count_at.get(device, _NEGLIGIBLE_BYTES) and not self._is_over:
                    self._compare(device, taken, outside)
        if self._is_over:
            return math.inf
        return perf_counter() + self.interval

    def _compare(self, device: torch.device, taken: int, outside: Iterable[torch.Tensor]) -> None:
        """Counts what is saved on a device, if what may be amounts to too much; says when to do so
        again.
        """
        if device not in self._free:
            free = free_bytes(device)
            self._free[device] = math.inf if free is None else free + taken
        limit = self._free[device] / 2 / self._times
        step = limit / _LOOKS_AHEAD
        if taken < step:
            self._count_at[device] = step
            return
        self._count_at[device] = min(taken + step, limit) if taken < limit else taken + step
        own = _bytes_of_entries(self._tensors(), device, outside)
        saved = sum(own.values())
        to_come = (
            0 if self._foresight is None or saved >= limit else self._foresight.bytes_to_come(own)
        )
        if saved + to_come >= limit:
            self._is_over = True  # also for threads that look meanwhile
            what = f"has saved {_text(saved)} so far, and the model is still running"
            if to_come:
                total = _text(saved + to_come)
                what = (
                    f"will save about {total}, judging by the first {_text(saved)} and by the "
                    "parts of the model to come"
                )
            _warn(what, device, self._free[device], self._times)

    def _taken(self) -> dict[torch.device, int]:
        """At least what the log has taken so far, by device."""
        if self._asks_system:
            resident = resident_bytes()
            return {_CPU: max(0, (resident or 0) - (self._resident or 0))}
        first, self._num_added = self._num_added, len(self._values)
        for value in self._values[first:]:
            if isinstance(value, torch.Tensor):
                self._added[value.device] = (
                    self._added.get(value.device, 0) + value.numel() * value.element_size()
                )
        return self._added

    def _tensors(self) -> Iterable[tuple[int, torch.Tensor]]:
        """What is saved, each with its entry."""
        yield from (
            (entry, value)
            for entry, value in enumerate(self._values)
            if isinstance(value, torch.Tensor)
        )
        for entry, args in list(self._saved_args.items()):
            yield from ((entry, tensor) for _, tensor in plain_tensors(args))


def _has_devices() -> bool:
    """Whether this process computes on devices with a memory of their own."""
    return torch.cuda.is_initialized() or torch.xpu.is_initialized()


def _bytes_of_entries(
    tensors: Iterable[tuple[int, torch.Tensor]],
    device: torch.device,
    outside: Iterable[torch.Tensor],
) -> dict[int, int]:
    """The memory of a device that entries keep alive: of each storage once, and not of those that
    live anyway.
    """
    seen = {storage._cdata for storage in map(_storage, outside) if storage is not None}
    found: dict[int, int] = {}
    for entry, tensor in tensors:
        storage = _storage(tensor)
        if storage is not None and storage.device == device and storage._cdata not in seen:
            seen.add(storage._cdata)
            found[entry] = found.get(entry, 0) + storage.nbytes()
    return found


def _storage(tensor: torch.Tensor) -> Any:
    while (inner := inner_of(tensor)) is not None:
        tensor = inner
    try:
        return tensor.untyped_storage()
    except (
        NotImplementedError,
        RuntimeError,
        ValueError,
    ):  # sparse, nested: they have none of their own
        return None


def expected_bytes(recording: Recording, saves: Iterable[int]) -> int:
    """What a second run like the recorded one would keep alive by saving these entries, from their
    shapes.

    Entries that look at one memory keep it once, and the whole of it.
    """
    written = {write.entry for write in recording.writes}
    sources = {
        number for _, number in (*recording.inputs, *recording.buffers)
    }  # what looks at these is copied in the end
    owners = {_owner(recording, entry, written, sources) for entry in saves}
    return sum(_num_bytes(recording.rows[entry]) for entry in owners)


def _owner(recording: Recording, entry: int, written: set[int], sources: set[int]) -> int:
    """The entry that made the memory which this one looks at, or wrote to it last."""
    while entry not in written:
        references, storage = recording.rows[entry].references, recording.storages[entry]
        given = references.values() if isinstance(references, dict) else references
        parent = next(
            (n for n in given if n is not None and n >= 0 and recording.storages[n] == storage),
            None,
        )
        if parent is None or parent in sources:
            return entry
        entry = parent
    return entry


def _num_bytes(row: Row) -> int:
    is_told = all(
        type(size) is int and size >= 0 for size in row.shape
    )  # else it is symbolic, or nested
    return math.prod(row.shape) * row.dtype.itemsize if is_told else 0


def warn_of_size(num_bytes: int, device: torch.device, keeps_gradients: bool) -> bool:
    """Warns if a log that is about to save `num_bytes` would take more than half of what is free;
    whether it did.
    """
    free = free_bytes(device)
    times = 2 if keeps_gradients else 1
    if free is None or num_bytes * times <= free / 2:
        return False
    _warn(f"is about to save {_text(num_bytes)}", device, free, times)
    return True


def _warn(what: str, device: torch.device, free: float, times: int) -> None:
    where = "" if device.type == "cpu" else f" on {device}"
    gradients = (
        ", and a backward pass will save as much again for the gradients" if times > 1 else ""
    )
    warn_log_caller(
        f"torchlens: this log {what}{gradients}: more than half of the {_text(free)} that were "
        f"free{where} when it began. {_CURE}."
    )


def _text(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MB"
