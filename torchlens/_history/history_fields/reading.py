"""A history as a log, and how its fields are read from it."""

from collections.abc import Iterable

from torchlens._history.log import Log


class HistoryReading:
    """The log that a history is of."""

    _log: Log

    def _labels(self, entries: Iterable[int]) -> list[str]:
        return self._log.labels(list(entries))

    @property
    def _everything(self) -> range:
        """All entries, whether listed or not."""
        return range(len(self._log.graph.recorded))
