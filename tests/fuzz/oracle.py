"""What a program's log must say, worked out while the program runs plainly, from nothing but memory
addresses.

The rule: an operation that is given a tensor reads, of each element, the last operation that wrote
it since the tensor was made; and the operation that made the tensor, if an element is still as it
left it, or if it is a view. An operation that makes a view reads of the tensor it is given the
elements that the view looks at. What an in-place operation writes is the whole tensor it is given.
What is given as `out=` is written, not read. An operation that hands back the tensor it is given
has made it only as long as the module runs in which it did so, or after that if the module returns
the tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchlens._recording.trees import plain_tensors

Tensor = torch.Tensor
_NEVER = -1


@dataclass
class Expected:
    """One entry of the log: what it is called, its value when its operation ended, whom it reads,
    what it was given.
    """

    name: str
    value: Tensor
    parents: set[int]
    is_view: bool
    given: dict[Any, Tensor]


class Oracle:
    """Watches a plain run."""

    def __init__(self, inputs: list[Tensor], buffers: list[Tensor]) -> None:
        self.entries: list[Expected] = []
        self._made_by: dict[int, int] = {}
        self._alive: list[Any] = []
        self._writers: dict[int, Any] = {}
        # For each module that is running: tensors that were handed back in it, as which entry, and
        # which they were before.
        self._handed_back: list[list[tuple[Tensor, int, int]]] = []
        for name, tensors in (("input", inputs), ("buffer", buffers)):
            for tensor in tensors:
                self._add(name, tensor, set(), False, {})

    @property
    def num_entries(self) -> int:
        return len(self.entries)

    def call(
        self,
        name: str,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        written: tuple[Tensor, ...],
    ) -> Any:
        given = {path: tensor for tree in (args, kwargs) for path, tensor in plain_tensors(tree)}
        parents = {
            source
            for path, tensor in given.items()
            if path != ("out",)
            for source in self.read(tensor)
        }
        storages = {_address(tensor) for tensor in given.values()}
        values = {path: tensor.detach().clone() for path, tensor in given.items()}
        result = func(*args, **kwargs)
        outputs = [tensor for _, tensor in plain_tensors(result)] or list(written)
        first = len(self.entries)
        for output in outputs:
            is_written = any(output is target for target in written)
            is_view = not is_written and _address(output) in storages
            read = self._read_by_view(given, output) if is_view else parents
            self._add(name, output, read, is_view, values)
        for target in written:
            self._note_write(target, first)
        return result

    def _read_by_view(self, given: dict[Any, Tensor], view: Tensor) -> set[int]:
        found: set[int] = set()
        for tensor in given.values():
            found |= self.read(tensor, view if _address(tensor) == _address(view) else tensor)
        return found

    def enter_module(self) -> int:
        """A module begins to run. Returns how many entries there are."""
        self._handed_back.append([])
        return len(self.entries)

    def leave_module(self, tensors: list[Tensor], first: int) -> None:
        """A module returns tensors: each that was there before is an entry."""
        for tensor in tensors:
            if self._made_by[id(tensor)] < first:
                self._add(
                    "identity", tensor, self.read(tensor), True, {(0,): tensor.detach().clone()}
                )
        returned = set(map(id, tensors))
        handed_back = self._handed_back.pop()
        for tensor, number, before in reversed(handed_back):
            if id(tensor) not in returned and self._made_by[id(tensor)] == number:
                self._made_by[id(tensor)] = before
        if self._handed_back:
            self._handed_back[-1] += [own for own in handed_back if id(own[0]) in returned]

    def finish(self, outputs: tuple[Tensor, ...]) -> None:
        for tensor in outputs:
            self._add("output", tensor, self.read(tensor), True, {}, is_made=False)

    def read(self, tensor: Tensor, part: Tensor | None = None) -> set[int]:
        """Whom a reader of the tensor reads now, or of the part of it that another tensor looks
        at.
        """
        made_by = self._made_by.get(id(tensor))
        if made_by is None:  # a parameter, which is not written here
            return set()
        last = self._writers[_address(tensor)][_places(tensor if part is None else part)]
        sources = {int(writer) for writer in last if writer > made_by}
        if self.entries[made_by].is_view or not last.size or not (last > made_by).all():
            sources.add(made_by)
        return sources

    def connected(self) -> set[int]:
        """The entries that belong in the log: what input leads to, what leads to output, and
        whatever those come from.
        """
        reached = {number for number, entry in enumerate(self.entries) if entry.name == "input"}
        for number, entry in enumerate(self.entries):
            if entry.parents & reached:
                reached.add(number)
        reached |= {number for number, entry in enumerate(self.entries) if entry.name == "output"}
        for number in range(len(self.entries) - 1, -1, -1):
            if number in reached:
                reached |= self.entries[number].parents
        return reached

    def _add(
        self,
        name: str,
        tensor: Tensor,
        parents: set[int],
        is_view: bool,
        given: dict[Any, Tensor],
        is_made: bool = True,
    ) -> None:
        number = len(self.entries)
        self.entries.append(Expected(name, tensor.detach().clone(), set(parents), is_view, given))
        if is_made:
            before = self._made_by.get(id(tensor))
            if before is not None and is_view and self._handed_back:
                self._handed_back[-1].append((tensor, number, before))
            self._made_by[id(tensor)] = number
        self._alive.append((tensor, tensor.untyped_storage()))
        size = tensor.untyped_storage().nbytes()
        self._writers.setdefault(_address(tensor), np.full(size, _NEVER))

    def _note_write(self, tensor: Tensor, number: int) -> None:
        self._writers[_address(tensor)][_places(tensor)] = number


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _places(tensor: Tensor) -> Any:
    """The byte that each element begins at."""
    places = np.array([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + np.arange(size) * stride).reshape(-1)
    return places * tensor.element_size()
