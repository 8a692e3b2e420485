"""The entries of a history by number: rows, values, edges, weights, modules, and lines of code."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from torchlens._history.log import Log
from torchlens._recording.operation_kinds import DROPOUTS, RANDOM
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import Row
from torchlens._recording.stored import opened_params
from torchlens._recording.tolerance import dense, epsilon_of

Tensor = torch.Tensor


class Weight(NamedTuple):
    """A parameter, or a buffer that is read; without a value where the history has none."""

    name: str
    value: Tensor | None
    shape: tuple[int, ...]
    is_buffer: bool


class Entries:
    """The entries of one history, by number.

    `values` replace saved ones, after a run with other values.
    """

    def __init__(self, log: Log, values: dict[int, Tensor | None] | None = None) -> None:
        self.log = log
        self.graph = log.graph
        self.size = len(log.graph.recorded)
        self.rows: list[Row] = log.rows(range(self.size))
        self.parents = log.graph.parents
        self.children = log.graph.children
        self._replaced = values or {}

    def value(self, entry: int) -> Tensor | None:
        """The value as a plain tensor on the CPU; None if none was saved."""
        return dense(self.raw(entry))

    def raw(self, entry: int) -> Any:
        """The value as it was saved or replaced."""
        return self._replaced[entry] if entry in self._replaced else self.log.value(entry)

    def is_replaced(self, entry: int) -> bool:
        """True if the value is not the saved one."""
        return entry in self._replaced

    @cached_property
    def dtype(self) -> torch.dtype:
        """The floating type that the model computes in: the coarsest that at least a quarter of its
        results have.
        """
        dtypes = Counter(
            row.dtype
            for entry, row in enumerate(self.rows)
            if row.dtype.is_floating_point and self.is_operation(entry)
        )
        total = sum(dtypes.values())
        return max(
            (dtype for dtype, count in dtypes.items() if 4 * count >= total),
            key=epsilon_of,
            default=torch.float32,
        )

    @property
    def epsilon(self) -> float:
        """The unit of rounding of that type."""
        return epsilon_of(self.dtype)

    def is_operation(self, entry: int) -> bool:
        return self.rows[entry].operation not in (INPUT, BUFFER, OUTPUT)

    def type_of(self, entry: int) -> str:
        return self.rows[entry].operation.layer_type

    def label(self, entry: int) -> str:
        return self.log.label(entry)

    # -- weights
    # ----------------------------------------------------------------------------------------------

    @cached_property
    def weights(self) -> list[Weight]:
        recording = self.log.recording
        found = [
            Weight(name, dense(param), tuple(param.shape), False)
            for name, param in zip(
                recording.param_addresses, opened_params(recording.params), strict=True
            )
        ]
        names = self.log.boundary_addresses
        for entry in self.graph.buffers:
            name, shape = names.get(entry, ["?"])[0], tuple(self.rows[entry].shape)
            found.append(Weight(name, self.value(entry), shape, True))
        return found

    @cached_property
    def own_weights(self) -> list[tuple[int, ...]]:
        """The numbers of the weights that each entry reads itself."""
        first = len(self.log.recording.params)
        place = {entry: first + number for number, entry in enumerate(self.graph.buffers)}
        return [
            (*own, *(place[parent] for parent in parents if parent in place))
            for own, parents in zip(self.graph.params, self.parents, strict=True)
        ]

    # -- modules and lines
    # ----------------------------------------------------------------------------------------------

    def module_of(self, entry: int) -> str:
        """The innermost module that returns the entry, or else the one that computes it."""
        calls = self.log.recording.module_calls
        exited = self.graph.modules_exited.get(entry, ())
        addresses = [calls[call].address for call in exited if calls[call].address]
        if addresses:
            return max(addresses, key=len)
        chain = self.log.module_chain(entry)
        return calls[chain[-1]].address if chain else ""

    def exits(self, entry: int) -> bool:
        """True if a module returned it."""
        return bool(self.graph.modules_exited.get(entry))

    def place_of(self, entry: int) -> str:
        """`port.py:21 in Layer.forward`, with the file's name alone; "" if unknown."""
        stack = self.log.call_stack(entry)
        if not stack:
            return ""
        line = stack[0]
        name = line.file.replace("\\", "/").rpartition("/")[2]
        return f"{name}:{line.line} in {line.function.replace('<locals>.', '')}"

    # -- ancestors
    # ----------------------------------------------------------------------------------------------

    def is_random(self, entry: int) -> bool:
        """True if each run gives another result: an active dropout, a `randn`."""
        row = self.rows[entry]
        kind = row.operation.layer_type
        if kind in DROPOUTS:
            given = [*row.args, *(row.kwargs or {}).values()]
            return True in given and not self._is_unchanged(entry)
        return kind in RANDOM

    def _is_unchanged(self, entry: int) -> bool:
        mine, parents = self.value(entry), self.parents[entry]
        theirs = self.value(parents[0]) if parents else None
        return mine is not None and theirs is not None and torch.equal(mine, theirs)

    def above(self, entry: int, stops: Sequence[bool]) -> tuple[list[int], list[int]]:
        """The nearest ancestors for which `stops` is true, or that have no parents; and the entries
        between, with the entry itself.
        """
        ends: dict[int, None] = {}
        passed = {entry: None}
        waiting = list(self.parents[entry])
        while waiting:
            parent = waiting.pop()
            if stops[parent] or not self.parents[parent]:
                if parent not in self.buffers:
                    ends[parent] = None
                if not stops[parent]:
                    passed[parent] = None
            elif parent not in passed:
                passed[parent] = None
                waiting.extend(self.parents[parent])
        return sorted(ends), sorted(passed)

    @cached_property
    def buffers(self) -> frozenset[int]:
        return frozenset(self.graph.buffers)
