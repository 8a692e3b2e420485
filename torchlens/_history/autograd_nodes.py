"""Finding the nodes of autograd's graph that saved values came from, for a backward pass through an
ordinary log.

A saved value is the tensor that an entry made, or a copy taken while it still was: either leads to
the node. Where memory was written in place and looked at through several views, it may lead to
another; such entries are left out.
"""

from typing import Any

import torch

from torchlens._capture.gradients.backward_hooks import node_of, sequence_of
from torchlens._capture.gradients.entry_gradients import GradientHooks, Gradients
from torchlens._recording.operations import BUFFER, INPUT
from torchlens._recording.recording import Recording, Row
from torchlens._recording.view_tree import ViewTree


def gradients_of_saved(recording: Recording) -> Gradients:
    """Gradients of every entry whose node can be found; they are paused."""
    hooks = GradientHooks()
    gradients = hooks.gradients
    gradients.watch.is_paused = True
    for number, parameter in enumerate(recording.params):
        hooks.watch_source(-1 - number, parameter)
    for number, stand_in in recording.param_stand_ins:
        hooks.watch_source(-1 - number, stand_in)
    slices = {part.entry: part for part in recording.slices}
    _plant_views(recording, hooks.views)
    hidden = recording.hidden_writes
    found: set[int] = set()
    has_gap = False  # whether there are entries, after the last that was found, that were not
    for number, row in enumerate(recording.rows):
        if number in hidden and row.output_index is not None:
            hooks.note_written_together(number, _references(row))
        part = slices.get(number)
        place = (
            (part.node, 0)
            if part is not None
            else None
            if number in hidden
            else _place_of(recording, number, row)
        )
        if place is None:
            has_gap = has_gap or row.gradfunc is not None
            if row.gradfunc is not None and hooks.views.is_view(number):
                hooks.views.note_lost(number)
            continue
        found.add(number)
        node, output = place
        if row.operation in (INPUT, BUFFER):
            hooks.watch_end(number, node, output)
            continue
        num_owned = len(gradients.owners)
        if part is not None:
            hooks.watch_write(part if part.before in found else part._replace(before=None))
        else:
            hooks.watch_at(number, node, output)
        if has_gap and len(gradients.owners) > num_owned + 1:
            gradients.uncertain.add(number)
        has_gap = False
        if not recording.branches:  # each thread counts for itself
            hooks.owning_from = max(hooks.owning_from, sequence_of(node) + 1)
    return gradients


def _place_of(recording: Recording, number: int, row: Row) -> tuple[Any, int] | None:
    """The node that made a saved value, and which of its outputs it is."""
    value = recording.values[number]
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return None
    node, output = node_of(value), value.output_nr
    if node is None:  # a leaf tells the node that accumulates its gradient only to a reader
        with torch.enable_grad():
            node, output = value.view_as(value).grad_fn.next_functions[0]  # type: ignore[union-attr]
    elif number in recording.copies:
        node, output = node.next_functions[0]
    if node is None or (sequence_of(node) >= 0 and type(node).__name__ != row.gradfunc):
        return None
    return node, output


def _plant_views(recording: Recording, views: ViewTree) -> None:
    """Tells which entries are views, in a recording with writes, and which reads of them cannot be
    watched.

    autograd gives a view another node when it is read after its memory was written, and that node
    is not to be found.
    """
    if not recording.writes:
        return
    for write in recording.writes:
        views.note_write(write.entry, write.storage, write.region)
    writers = {(write.entry, write.storage) for write in recording.writes}
    first_on: dict[int, int] = dict.fromkeys(recording.outside_storages, -1)
    first_on.update(
        {recording.storages[part.entry]: -1 for part in recording.slices if not part.is_base_known}
    )
    for number, row in enumerate(recording.rows):
        storage, region = recording.storages[number], recording.regions.get(number)
        is_first = first_on.setdefault(storage, number) == number
        for read in _references(row):
            # A write through the view itself is collected at its base.
            is_collected = (number, storage) in writers and recording.storages[read] == storage
            if not is_collected and views.is_view(read) and views.is_written_between(read, number):
                views.note_missed_read(read, number)
        if region is not None and not is_first and (number, storage) not in writers:
            parent = next((n for n in _references(row) if recording.storages[n] == storage), None)
            views.add(number, parent, storage, region)


def _references(row: Row) -> list[int]:
    references = row.references.values() if isinstance(row.references, dict) else row.references
    return [number for number in references if number is not None and number >= 0]
