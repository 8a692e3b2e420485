"""A recorder that measures its own time."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from torchlens._capture.arguments import PLAIN_TYPES
from torchlens._capture.own_time import LONGEST_HANDLING, SHORT, WHILE, OwnTime
from torchlens._capture.recorder import Recorder
from torchlens._recording.operations import Operation
from torchlens._recording.recording import MadeCall, References

_CELLS = frozenset({torch.lstm_cell, torch.gru_cell})


class TimedRecorder(Recorder):
    """Records as ever, and adds to `own_time` what handling a call took beside the call itself."""

    def __init__(self, own_time: OwnTime, *args: Any) -> None:
        super().__init__(*args)
        self._own_time = own_time
        self._seconds = 0.0  # of the call that was handled last
        self._last_runs: dict[int, int] = {}  # id of a function → the number of its last operation

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        enter = perf_counter()
        own = self._own_time
        num_rows, looked = len(self.rows), own.look_seconds
        self._seconds = 0.0
        result = super().__torch_function__(func, types, args, kwargs)
        if len(self.rows) > num_rows:
            if (
                not kwargs
                and type(result) is torch.Tensor
                and PLAIN_TYPES.issuperset(map(type, args))
            ):
                handling = perf_counter() - enter - self._seconds - (own.look_seconds - looked)
                own.handling_seconds += (
                    handling if handling < LONGEST_HANDLING else LONGEST_HANDLING
                )
                own.num_plain += 1
            number = own.num_operations
            own.num_operations = number + 1
            others = (
                number - self._last_runs.get(id(func), -1 - WHILE) - 1
            )  # that have run since it did
            self._last_runs[id(func)] = number
            own.coldness += others / WHILE if others < WHILE else 1.0
            own.short_seconds += self._seconds if self._seconds < SHORT else SHORT
            if func in _CELLS:
                own.num_cells += 1
        else:
            own.num_reads += 1
        own.seconds += perf_counter() - enter - self._seconds
        return result

    def append_results(
        self,
        call: MadeCall,
        result: Any,
        written: Sequence[torch.Tensor],
        is_finished: bool = True,
        is_end: bool = False,
        each_reads: Sequence[References] = (),
    ) -> None:
        """As in Recorder."""
        super().append_results(call, result, written, is_finished, is_end, each_reads)
        self._seconds = call.seconds

    def pass_through(
        self, operation: Operation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """As in Recorder."""
        seconds = 0.0

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal seconds
            start = perf_counter()
            result = func(*args, **kwargs)
            seconds = perf_counter() - start
            return result

        result = super().pass_through(operation, timed, args, kwargs)
        self._seconds = seconds
        return result
