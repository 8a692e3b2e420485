"""What a read or a write through a view means for the views it was made from.

autograd knows views by their base alone: a write through a view leads from the base after it to the base before it, and a
view whose base was written since is read as if it had been cut from the base just now. Either way leads past the views in
between, whose values were read nevertheless. Here is which views those are, and which part of each was still its own:
memory that was written since the view was made holds the writer's value.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

__all__ = ["Layout", "Share", "Slice", "ViewTree", "layout_of"]

# More writes than this between a view and a read of it are not sorted out.
_MOST_WRITES = 1_000
_TOO_MANY_WRITES = f"its memory was written more than {_MOST_WRITES:,} times before it was read again"
_OVERLAPS = "several of its elements lie in the same memory, which was written or read through another view"
_READ_AGAIN = "it is a view that was read again after its memory was written; log with save_gradients=True"
_OTHER_TYPE = "its memory was written or read as another data type"


class Layout(NamedTuple):
    """Where in its memory a tensor lies, in items."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """One past the last item."""
        if 0 in self.size:
            return self.offset
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    @property
    def overlaps_itself(self) -> bool:
        """Whether two elements may lie in one place; True for some odd layouts that do not."""
        reach = 0
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size > 1:
                if stride <= reach:
                    return True
                reach += (size - 1) * stride
        return False

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The part of `memory`, one dimension of items, that lies here."""
        return memory.as_strided(self.size, self.stride, self.offset)


def layout_of(tensor: torch.Tensor) -> Layout:
    """Where in its memory a tensor lies; one without strides (sparse, nested) is taken as one whole."""
    try:
        return Layout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
    except (NotImplementedError, RuntimeError, ValueError):
        return Layout((1,), (1,), 0, tensor.dtype)


class Slice(NamedTuple):
    """A write in place to a view: entry `entry` turned what `before` was into something else, at `node` of its base."""

    entry: int
    before: int | None
    node: Any
    layout: Layout
    base: Layout

    def cut(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the view, out of that of its base."""
        base, own = self.base, self.layout
        laid_out = gradient.new_empty_strided(base.size, base.stride).copy_(gradient)
        memory = laid_out.as_strided((base.end - base.offset,), (1,))
        offset = base.offset
        if own.dtype.is_complex and not memory.is_complex():  # view_as_complex
            memory, offset = torch.view_as_complex(memory[: len(memory) // 2 * 2].view(-1, 2)), offset // 2
        elif memory.is_complex() and not own.dtype.is_complex:  # view_as_real
            memory, offset = torch.view_as_real(memory).view(-1), offset * 2
        return own._replace(offset=own.offset - offset).within(memory)


class Share(NamedTuple):
    """What the gradient of `read` means for view `entry`, which was made before and lies at `layout`.

    Of what `read` and the view have in common, the places in `written` hold somebody else's value. `part` is where the
    gradient of `read` has to be cut from, if it comes with that of a base.
    """

    entry: int
    layout: Layout
    read: Layout
    written: tuple[Layout, ...]
    part: Slice | None = None

    def cut(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the view, out of the one that came."""
        if self.part is not None:
            gradient = self.part.cut(gradient)
        num_items = max(layout.end for layout in (self.layout, self.read, *self.written))
        memory = gradient.new_zeros(num_items)
        if self.read.overlaps_itself:
            places = self.read.within(torch.arange(num_items, device=gradient.device)).reshape(-1)
            memory.index_add_(0, places, gradient.reshape(-1))
        else:
            self.read.within(memory).copy_(gradient)
        for layout in self.written:
            layout.within(memory).zero_()
        return self.layout.within(memory).clone()

    def is_any_left(self) -> bool:
        """Whether any of the view's own values was read."""
        return bool(self._replace(part=None).cut(torch.ones(self.read.size)).any())


class _View(NamedTuple):
    parent: int | None  # the entry it was made from
    memory: int
    layout: Layout


class ViewTree:
    """The entries that are views, what each was made from, and the writes to the memory that they look at.

    Entries are told in the order of their numbers, which is that of time.
    """

    def __init__(self) -> None:
        # Why an entry has no gradient although one arrived.
        self.missing: dict[int, str] = {}
        self._views: dict[int, _View] = {}
        # By memory: the entries that wrote there, in order, and where.
        self._writes: dict[int, tuple[list[int], list[Layout]]] = {}

    def add(self, entry: int, parent: int | None, memory: int, layout: Layout) -> None:
        """Entry `entry` is a view, made from entry `parent`, of what `memory` stands for."""
        self._views[entry] = _View(parent, memory, layout)

    def note_write(self, entry: int, memory: int, layout: Layout) -> None:
        """Entry `entry` wrote there."""
        writers, layouts = self._writes.setdefault(memory, ([], []))
        writers.append(entry)
        layouts.append(layout)

    def shares(self, entry: int, time: int, part: Slice | None = None) -> Iterator[Share]:
        """What a read of `entry` just before entry `time` was made means for it and the views it was made from."""
        current: int | None = entry
        while current is not None and current in self._views:
            read, view = self._views[entry].layout, self._views[current]
            written = self._written_between(view.memory, current, time)
            reason = None
            if len(written) > _MOST_WRITES:
                reason = _TOO_MANY_WRITES
            elif any(layout.dtype != read.dtype for layout in (view.layout, *written)):
                reason = _OTHER_TYPE
            elif view.layout.overlaps_itself and (current != entry or written):
                reason = _OVERLAPS
            if reason is not None:
                self.missing.setdefault(current, reason)
            elif read not in written:
                yield Share(current, view.layout, read, tuple(written), part)
            current = view.parent

    def note_unheard_read(self, entry: int, time: int) -> None:
        """A read of `entry` just before entry `time` was made cannot be heard: those that have a share in it lack it."""
        for share in self.shares(entry, time):
            if share.is_any_left():
                self.missing.setdefault(share.entry, _READ_AGAIN)

    def is_view(self, entry: int) -> bool:
        """Whether `entry` is one of the views."""
        return entry in self._views

    def is_written_between(self, entry: int, time: int) -> bool:
        """Whether the memory of view `entry` was written, wherever, since it was made and before entry `time`."""
        return bool(self._written_between(self._views[entry].memory, entry, time))

    def _written_between(self, memory: int, after: int, before: int) -> dict[Layout, None]:
        writers, layouts = self._writes.get(memory, ((), ()))
        return dict.fromkeys(layouts[bisect_right(writers, after) : bisect_left(writers, before)])
