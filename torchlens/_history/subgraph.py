"""The log of some of a history's entries."""

from collections.abc import Sequence
from copy import copy

from torchlens._graph.restricted import restricted_graph
from torchlens._history.log import Log


def restricted(log: Log, entries: Sequence[int]) -> Log:
    """The log of these entries, which shares the saved values."""
    part = copy(log)
    part._graph = restricted_graph(log.recording, log.graph, sorted(set(entries)))
    return part
