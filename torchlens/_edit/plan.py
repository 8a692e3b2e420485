"""From edits as the user writes them to places in a history, checked before anything runs."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from torchlens._capture.exchange import Spot, spot_of
from torchlens._edit.changes import ACCEPTED, Edited, check_edit
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._history.sites import Place, Site, Sites
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import Recording
from torchlens._text.error_wording import got
from torchlens.errors import EditError


class Target(NamedTuple):
    """One edit at one place of a history."""

    edited: Edited
    recording: Recording
    number: int  # of the row
    input_path: tuple[Any, ...] | None  # of an input of the model

    @property
    def spot(self) -> Spot:
        """The call that makes the value."""
        return spot_of(self.recording, self.number)

    @property
    def output_index(self) -> int:
        """The place of the value among the results of its call."""
        return self.recording.rows[self.number].output_index or 0


def pairs_of(edits: Any) -> list[tuple[Site, Any]]:
    """The sites with their edits, each checked."""
    if not isinstance(edits, Mapping):
        raise TypeError(
            "edits must be a dict of sites and edits, such as {'relu_3': 0.0}, got "
            f"{got(edits)}. A site is a key, an entry or torchlens.edits.site(...); an edit is "
            f"{ACCEPTED}."
        )
    pairs = [(key if isinstance(key, Site) else Site(key), edit) for key, edit in edits.items()]
    if not pairs:
        raise ValueError("edits is empty. Give at least one, such as {'relu_3': 0.0}.")
    for site, edit in pairs:
        check_edit(site, edit)
    return pairs


def history_of(edits: Any) -> Log | None:
    """The log whose entries are keys among the edits."""
    keys = [key.key if isinstance(key, Site) else key for key in edits]
    return next((key._log for key in keys if isinstance(key, LayerEntry)), None)


def targets_of(log: Log, sites: Sites, edits: Any) -> list[Target]:
    """The targets of edits in a history; raises where an edit can have no effect."""
    return [target_of(log, sites.place(site), edit) for site, edit in pairs_of(edits)]


def target_of(log: Log, place: Place, edit: Any) -> Target:
    number = log.graph.recorded[place.entry]
    _check_editable(log, place)
    row = log.recording.rows[number]
    path = None
    if row.operation is INPUT:
        path = next(path for path, own in log.recording.inputs if own == number)
    edited = Edited(place, edit, partial(_recorded, log, place.entry))
    return Target(edited, log.recording, number, path)


def _recorded(log: Log, entry: int) -> torch.Tensor:
    value = log.value(entry)
    if not isinstance(value, torch.Tensor):
        raise EditError(
            f"The value of {log.label(entry)!r} was not saved, and this edit needs it. Log the "
            "model with layers_to_save='all'."
        )
    return value.detach()


def _check_editable(log: Log, place: Place) -> None:
    """Raises for an entry that no call made, that is never read, or that shares written memory."""
    entry, site = place.entry, place.site
    operation, label = log.row(entry).operation, log.label(entry)
    if operation is BUFFER:
        raise EditError(
            f"{site} is the buffer {label!r}, which no call makes. Edit the operations that read "
            f"it: {_labels(log, log.graph.children[entry])}."
        )
    if operation is OUTPUT:
        raise EditError(
            f"{site} is an output of the model. Edit the operation that makes it: "
            f"{_labels(log, log.graph.parents[entry])}."
        )
    number = log.graph.recorded[entry]
    is_read = number in log.recording.reads or number in log.recording.booleans
    if not log.graph.children[entry] and not is_read:
        raise EditError(f"{site} is {label!r}, which is never read: an edit has no effect.")
    writer = later_write(log, entry)
    if writer is not None:
        shared = _labels(log, log.graph.parents[entry])
        raise EditError(
            f"{site} is {label!r}, which shares memory with {shared}, and"
            f" {log.label(writer)!r} writes to it later. Edit one of those instead."
        )


def _labels(log: Log, entries: Iterable[int]) -> str:
    return ", ".join([repr(log.label(entry)) for entry in list(entries)[:4]]) or "none"


def later_write(log: Log, entry: int) -> int | None:
    """The entry that writes to memory which `entry` shares with its parents, after it was made;
    None if there is none. A new value in place of `entry` does not share that memory.
    """
    recording, number = log.recording, log.graph.recorded[entry]
    if not recording.writes or log.row(entry).operation.is_inplace:
        return None
    storage = recording.storages[number]
    shared = [log.graph.recorded[parent] for parent in log.graph.parents[entry]]
    if all(recording.storages[parent] != storage for parent in shared):
        return None
    for write in recording.writes:
        if write.storage == storage and write.entry > number:
            return log.graph.entry_of.get(write.entry, entry)
    return None
