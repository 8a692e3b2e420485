"""Gradients of views whose memory is read or written through other views.

autograd only links a view to its base: a write through a view goes from the base before it to the
base after it, and a view whose base was written since is regenerated from the base. Both bypass the
views in between, although their values were read. This module finds those views, and the part of
each that still held its own value: memory written after the view was made holds the writer's value.
"""

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from torchlens._recording.cells import cells_of
from torchlens._recording.regions import Region

# With more writes than this between a view and a read of it, its gradient is not resolved.
_MOST_WRITES = 1_000
_TOO_MANY_WRITES = (
    f"its memory was written more than {_MOST_WRITES:,} times before it was read again"
)
_OVERLAPS = (
    "several of its elements lie in the same memory, which was written or read through another view"
)
_READ_AGAIN = (
    "it is a view that was read again after its memory was written; log with save_gradients=True"
)
_WRITTEN_SINCE = (
    "it is a view of memory that was written after it was made; log with save_gradients=True"
)
_WRITTEN_TOGETHER = "one call wrote to several views, among them this one or a view made from it"
_OTHER_TYPE = "its memory was written or read as another data type"


class Slice(NamedTuple):
    """An in-place write to a view: it turned entry `before` into entry `entry`, at `node` of its
    base.
    """

    entry: int
    before: int | None
    node: Any
    region: Region
    base: Region
    # is_base_known: False if no entry is the base, so the first entry in its memory is a view too.
    is_base_known: bool = True

    def cut(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the view, cut from the gradient of its base."""
        base, own = self.base, self.region
        laid_out = gradient.new_empty_strided(base.shape, base.strides).copy_(gradient)
        memory = laid_out.as_strided(((base.end - base.start) // base.item_bytes,), (1,))
        if own.item_bytes > base.item_bytes:  # view_as_complex
            memory = torch.view_as_complex(memory[: len(memory) // 2 * 2].view(-1, 2))
        elif own.item_bytes < base.item_bytes:  # view_as_real
            memory = torch.view_as_real(memory).view(-1)
        return _within(memory, own._replace(offset=own.offset - base.start // own.item_bytes))


class Share(NamedTuple):
    """The part of the gradient of `read` that belongs to `entry`, an earlier view of `region`.

    The regions in `written`, within the overlap of `read` and the view, hold the value of another
    entry. If the gradient arrives at the base of `read`, `part` cuts out that of `read`.
    """

    entry: int
    region: Region
    read: Region
    written: tuple[Region, ...]
    part: Slice | None = None

    def cut(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the view, from the gradient that arrived."""
        if self.part is not None:
            gradient = self.part.cut(gradient)
        num_items = (
            max(region.end for region in (self.region, self.read, *self.written))
            // self.read.item_bytes
        )
        memory = gradient.new_zeros(num_items)
        if self.read.overlaps_itself:
            places = _within(torch.arange(num_items, device=gradient.device), self.read).reshape(-1)
            memory.index_add_(0, places, gradient.reshape(-1))
        else:
            _within(memory, self.read).copy_(gradient)
        for region in self.written:
            _within(memory, region).zero_()
        return _within(memory, self.region).clone()

    def is_any_left(self) -> bool:
        """True if any of the view's own values was read, or if the regions are too irregular to
        tell.

        This uses the regions alone, so the cost does not depend on their size.
        """
        cells = cells_of(list(dict.fromkeys([self.region, self.read, *self.written])))
        if cells.inexact:
            return True
        is_own, is_read = np.zeros(cells.shape, dtype=bool), np.zeros(cells.shape, dtype=bool)
        for region, mark in ((self.region, is_own), (self.read, is_read)):
            for part in cells.parts[region]:
                mark[part] = True
        for region in self.written:
            for part in cells.parts[region]:
                is_own[part] = False
        return bool((is_own & is_read).any())


def _within(memory: torch.Tensor, region: Region) -> torch.Tensor:
    """The elements of `memory`, a one-dimensional tensor, that lie in `region`."""
    return memory.as_strided(region.shape, region.strides, region.offset)


class _View(NamedTuple):
    parent: int | None  # the entry it was made from
    memory: int
    region: Region


class ViewTree:
    """The entries that are views, their parents, and the writes to their memory.

    Writes must be added in ascending order of entry numbers, which is the order of time.
    """

    def __init__(self) -> None:
        # Why an entry has no gradient although one arrived.
        self.missing: dict[int, str] = {}
        self._views: dict[int, _View] = {}
        # By memory: the entries that wrote there, in order, and where.
        self._writes: dict[int, tuple[list[int], list[Region]]] = {}

    def add(self, entry: int, parent: int | None, memory: int, region: Region) -> None:
        """Adds view `entry` of `region` in storage `memory`, made from entry `parent`."""
        self._views[entry] = _View(parent, memory, region)

    def note_write(self, entry: int, memory: int, region: Region) -> None:
        """Adds a write by `entry` to `region` of storage `memory`."""
        writers, regions = self._writes.setdefault(memory, ([], []))
        writers.append(entry)
        regions.append(region)

    def shares(self, entry: int, time: int, part: Slice | None = None) -> Iterator[Share]:
        """The shares of `entry` and its parent views in a read of `entry` before entry `time`."""
        current: int | None = entry
        while current is not None and current in self._views:
            read, view = self._views[entry].region, self._views[current]
            written = self._written_between(view.memory, current, time)
            reason = _why_unknown(view.region, read, written, current == entry)
            if reason is not None:
                self.missing.setdefault(current, reason)
            elif read not in written:
                yield Share(current, view.region, read, tuple(written), part)
            current = view.parent

    def note_missed_read(self, entry: int, time: int) -> None:
        """Marks as missing the gradients that lack their share in a read that cannot be hooked.

        The read is one of `entry`, before entry `time`.
        """
        for share in self.shares(entry, time):
            if share.is_any_left():
                self.missing.setdefault(share.entry, _READ_AGAIN)

    def note_lost(self, entry: int) -> None:
        """Marks the gradient of view `entry` as missing if its memory was written after it was
        made.

        autograd replaced the node of such a view, so the node cannot be hooked.
        """
        if self.is_written_between(entry, sys.maxsize):
            self.missing.setdefault(entry, _WRITTEN_SINCE)

    def note_written_together(self, entry: int) -> None:
        """Marks the gradients of `entry` and its parent views as missing.

        One call wrote to several views, and autograd does not show which node belongs to which
        write.
        """
        self.missing[entry] = _WRITTEN_TOGETHER  # replaces any earlier reason
        parent = self._views[entry].parent if entry in self._views else None
        if parent in self._views:
            self.note_written_together(parent)

    def is_view(self, entry: int) -> bool:
        """True if `entry` is a view."""
        return entry in self._views

    def is_written_between(self, entry: int, time: int) -> bool:
        """True if the storage of view `entry` was written after it was made and before entry
        `time`.
        """
        return bool(self._written_between(self._views[entry].memory, entry, time))

    def _written_between(self, memory: int, after: int, before: int) -> dict[Region, None]:
        writers, regions = self._writes.get(memory, ((), ()))
        return dict.fromkeys(regions[bisect_right(writers, after) : bisect_left(writers, before)])


def _why_unknown(
    view: Region, read: Region, written: Collection[Region], is_itself: bool
) -> str | None:
    """Why the share of a view in a read is not known; None if it is."""
    if len(written) > _MOST_WRITES:
        return _TOO_MANY_WRITES
    if any(region.item_bytes != read.item_bytes for region in (view, *written)):
        return _OTHER_TYPE
    return _OVERLAPS if view.overlaps_itself and (not is_itself or written) else None
