"""Checks, while the model runs, how much the log has saved.

It warns of a log that takes more than half of the memory that was free when it began, or hands
values on, so that a log may be larger than memory.

Counting what is saved costs something for each tensor, so the warning first reads how much the
whole process has grown, which is cheap. Only if that is as much as the limit are the saved tensors
counted.

Where values are handed on (`Outflow`), those beyond a limit go to a receiver, and what it gives
back replaces them. If only outputs of some modules are wanted, the other values are held as long as
they are few; after that, they are not saved in the first place.
"""

import math
import threading
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch

from torchlens._capture.memory.saved_values import Memory
from torchlens._capture.recorder import Recorder
from torchlens._recording.process_memory import free_bytes, held_bytes
from torchlens._recording.stored import StoredValue
from torchlens._recording.trees import plain_tensors
from torchlens._recording.user_code import warn_log_caller
from torchlens._recording.wrappers import inner_of

_INTERVAL = 0.005  # seconds between two checks
# Until the process has grown by this much, `free_bytes` is not read: it takes as long as hundreds
# of operations.
_NEGLIGIBLE_BYTES = 32 * 2**20
_CURE = (
    "Save less: layers_to_save=[...] with the layers or modules you need, or 'none' for a log "
    "without values. Or make the batch smaller, or put model and inputs on torch.device('meta') "
    "if shapes are enough"
)


class MemoryWatch:
    """Compares what a log has saved with the memory that was free when it began."""

    interval = _INTERVAL

    def __init__(
        self, values: Sequence[Any], saved_args: dict[int, Any], keeps_gradients: bool
    ) -> None:
        self._values = values
        self._saved_args = saved_args
        self._times = 2 if keeps_gradients else 1  # a gradient for each value comes later
        self._held_before = {device: _held(device) for device in _devices()}
        # By device: free memory at the start, and the growth at which to count saved tensors.
        self._free: dict[torch.device, float] = {}
        self._count_at: dict[torch.device, float] = {}
        self._is_over = False

    def look(self, outside: Iterable[torch.Tensor]) -> float:
        """Warns once if the log has saved too much; returns the time of the next check."""
        for device, before in self._held_before.items():
            grown = _held(device) - before
            if grown >= self._count_at.get(device, _NEGLIGIBLE_BYTES) and not self._is_over:
                self._compare(device, grown, outside)
        return math.inf if self._is_over else perf_counter() + self.interval

    def _compare(self, device: torch.device, grown: int, outside: Iterable[torch.Tensor]) -> None:
        if device not in self._free:
            free = free_bytes(device)
            self._free[device] = math.inf if free is None else free + grown
        limit = self._free[device] / 2 / self._times
        if grown >= limit:
            with torch._C.DisableTorchFunctionSubclass():
                saved = _bytes_kept_alive(self._tensors(), device, outside)
            if saved >= limit:
                self._is_over = True  # also for other threads
                self._warn(saved, device)
        self._count_at[device] = max(limit, grown + limit / 8)

    def _tensors(self) -> Iterable[torch.Tensor]:
        yield from (value for value in self._values if isinstance(value, torch.Tensor))
        yield from (tensor for _, tensor in plain_tensors(list(self._saved_args.values())))

    def _warn(self, saved: int, device: torch.device) -> None:
        where = "" if device.type == "cpu" else f" on {device}"
        gradients = (
            ", and a backward pass will save as much again for the gradients"
            if self._times > 1
            else ""
        )
        warn_log_caller(
            f"torchlens: this log has saved {_text(saved)} so far, and the model is still running"
            f"{gradients}: more than half of the {_text(self._free[device])} that were free{where} "
            f"when it began. {_CURE}."
        )


def _devices() -> list[torch.device]:
    """The devices that this process uses."""
    used = [module for module in (torch.cuda, torch.xpu) if module.is_initialized()]
    return [
        torch.device("cpu"),
        *(
            torch.device(module.__name__.rpartition(".")[2], number)
            for module in used
            for number in range(module.device_count())
        ),
    ]


def _held(device: torch.device) -> int:
    return held_bytes(device) or 0


def _bytes_kept_alive(
    tensors: Iterable[torch.Tensor], device: torch.device, outside: Iterable[torch.Tensor]
) -> int:
    """The bytes of a device that `tensors` keep alive, without the storages of `outside`."""
    seen = {storage._cdata for storage in map(_storage, outside) if storage is not None}
    total = 0
    for storage in map(_storage, tensors):
        if storage is not None and storage.device == device and storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def _storage(tensor: torch.Tensor) -> Any:
    while (inner := inner_of(tensor)) is not None:
        tensor = inner
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse and nested tensors have none
        return None


def _text(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MB"


_FEW = 4 * 2**20  # bytes of values that are held but not wanted: freeing each one takes longer


class Outflow(Protocol):
    """Receives saved values during a pass."""

    @property
    def limit(self) -> int:
        """How many bytes of values to hold before they are handed over."""

    def take(self, numbers: Sequence[int]) -> Mapping[int, StoredValue]:
        """Takes the values of these rows; returns their replacements, for those it took."""


class OutflowWatch:
    """Alternative to `MemoryWatch`: hands values over to an `Outflow`."""

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

    def look(self, outside: Sequence[torch.Tensor]) -> float:
        """Hands values over if there are enough; returns the time of the next check."""
        if threading.get_ident() == self._thread:
            with torch._C.DisableTorchFunction():
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
