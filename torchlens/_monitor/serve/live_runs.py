"""Finds the runs below a folder, and reads what is added to them while a page is open."""

import os
import threading
from pathlib import Path
from time import monotonic, time_ns
from typing import Any

from torchlens._monitor.read.reader import RunReader
from torchlens._monitor.read.run_tables import RunTables
from torchlens._monitor.serve.graph_page import graph_page
from torchlens._monitor.store.folder import is_run

# Seconds between two checks of the files, and between two searches of the folder for new runs.
_EVERY, _SEARCH_EVERY = 0.2, 0.6
_DEEPEST = 4
_MOST_RUNS = 500


def find_runs(root: Path) -> list[Path]:
    """The runs in a folder, and in folders inside it, by name. Links are not followed."""
    found: list[Path] = []
    pending = [(root, 0)]
    while pending and len(found) < _MOST_RUNS:
        folder, depth = pending.pop()
        try:
            if is_run(folder):
                found.append(folder)
            elif depth < _DEEPEST:
                pending += [(each, depth + 1) for each in _folders_in(folder)]
        except OSError:  # it was removed meanwhile, or may not be read
            continue
    return sorted(found)


def _folders_in(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
        ]


class LiveRun:
    """One run. Hold its lock while you read its tables."""

    def __init__(self, number: int, folder: Path, name: str) -> None:
        self.number, self.name = number, name
        self.lock = threading.Lock()
        self.problem = ""  # why the run cannot be read
        self.reader = RunReader(folder)
        self.tables = RunTables(self.reader)
        self._graph_state = self._graph_status()
        # The page of the graph, with the state of the file for which it was made.
        self._graph_page: tuple[int, dict[str, Any]] | None = None
        # A restarted server begins with a higher revision than the one before, so that an open
        # page requests everything.
        self.revision = time_ns() // 1000
        # Revisions, each with the first place that it changed.
        self._history: list[tuple[int, int]] = []
        self._forgotten = self.revision - 1  # older revisions are unknown: all data is sent

    def refresh(self) -> bool:
        """Reads what was added; returns whether there was anything. If the run cannot be read,
        `problem` says why, and the other runs are still read.
        """
        with self.lock:
            is_changed, last, self.problem = False, self.problem, ""
            try:
                is_changed = self._read_on()
            except OSError as error:  # its folder was removed: what was read of it is kept
                self.problem = f"This run cannot be read: {error}"
            except Exception as error:
                self.problem = f"This run cannot be read: {error}"
                self.reader = RunReader(self.reader.folder)
                self.tables = RunTables(self.reader)
            if self.problem != last:
                is_changed = True
                self._changed_from(-1)
            return is_changed

    def _read_on(self) -> bool:
        is_changed = self.reader.refresh()
        status = self._graph_status()
        if not is_changed and status == self._graph_state:
            return False
        self._graph_state = status
        self._changed_from(self.tables.update())
        return True

    def _changed_from(self, place: int) -> None:
        """Begins a revision: all data from a place on is new; all data, if the place is
        negative.
        """
        self.revision += 1
        if place < 0 or len(self._history) > 5000:
            self._forgotten, self._history = self.revision - 1, []
        else:
            self._history.append((self.revision, place))

    def summary(self, have: int, num_series: int, num_findings: int) -> dict[str, Any]:
        """The data since a revision, without the series and findings that the page has; all data if
        the revision is unknown.
        """
        with self.lock:
            is_other = not self._forgotten < have <= self.revision or num_findings > len(
                self.reader.findings
            )
            if is_other:
                told = self.tables.summary()
            else:
                places = [place for revision, place in self._history if revision > have]
                told = self.tables.summary(
                    min([*places, len(self.tables.steps)]), num_series, num_findings
                )
            problems = [self.problem, *told["problems"]] if self.problem else told["problems"]
            return {**told, "problems": problems, "revision": self.revision, "isOther": is_other}

    def graph_page(self) -> dict[str, Any]:
        """The page of the run's graph (see `graph_page`). Making it takes a while, so it is
        cached.
        """
        state, known = self._graph_status(), self._graph_page
        if known is None or known[0] != state:
            known = self._graph_page = state, graph_page(self.reader.graph)
        return known[1]

    def _graph_status(self) -> int:
        try:
            return (self.reader.folder / "graph.json").stat().st_mtime_ns
        except OSError:
            return 0


class LiveRuns:
    """All runs of a folder. Files are read only while a page waits for changes, or requests
    data.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: list[LiveRun] = []
        self._known: set[Path] = set()
        self._changed = threading.Condition()
        self._state = 0
        self._looking = threading.Lock()
        self._looked_at = self._searched_at = -1e9
        self.look()

    def look(self) -> None:
        """Reads what was added, unless another thread has just done so."""
        with self._looking:
            now = monotonic()
            if now - self._looked_at < _EVERY:
                return
            is_changed = False
            if now - self._searched_at >= _SEARCH_EVERY:
                is_changed = self._search()
                self._searched_at = monotonic()
            for run in self.runs:
                is_changed = run.refresh() or is_changed
            # Slow reads are made less often: reading must not take processor time from the
            # training.
            self._looked_at = max(monotonic(), now + 3 * (monotonic() - now) - _EVERY)
        if is_changed:
            with self._changed:
                self._state += 1
                self._changed.notify_all()

    def wait(self, state: int, seconds: float) -> int:
        """Waits until the state differs from this one, checking the files meanwhile; returns the
        new state.
        """
        end = monotonic() + seconds
        while self._state == state and monotonic() < end:
            with self._changed:
                self._changed.wait(_EVERY)
            self.look()
        return self._state

    def revisions(self) -> dict[int, int]:
        """The revision of each run, by number."""
        return {run.number: run.revision for run in self.runs}

    def _search(self) -> bool:
        is_changed = False
        for folder in find_runs(self.root):
            if folder not in self._known and len(self.runs) < _MOST_RUNS:
                name = (
                    folder.name if folder == self.root else folder.relative_to(self.root).as_posix()
                )
                self._known.add(folder)
                self.runs.append(LiveRun(len(self.runs), folder, name))
                is_changed = True
        return is_changed
