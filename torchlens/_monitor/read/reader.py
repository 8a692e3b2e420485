"""Reads the files of a run, finished or still being written, and tolerates damaged files.

    r = torchlens.open_run('runs/a')
    r.modules                            # addresses by first call; watched tensors by name
    r['layer1.0.conv1'].outputs          # a SeriesMap; also .inputs, .gradients,
                                         # .parameters['weight'], .updates['bias'] ...
    r['layer1.0.conv1'].outputs.rms      # an array over .steps; also low, high, mean, std, zero,
                                         # dead, nonfinite ...
    r['layer1.0.conv1'].outputs.histogram()  # of the last step; histogram(step=100), heat_map()
    r.scalars['loss']                    # .steps, .values
    r.projections['layer1']              # of run.embed: (step, points, share of variance) by step
    r.steps                              # recorded steps; the last of each merged group
    r.findings, r.problems, r.counts, r.drops, r.damage, r.is_finished, r.info, r.graph
    r.refresh()                          # reads new data; returns whether there was any
    r.to_pandas()

All ranks are read and joined: counts add up, ranges widen. Damaged lines are skipped and listed in
`damage`.
"""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchlens._health.finding import RunFinding
from torchlens._history.receipt import Receipt
from torchlens._monitor.films.film_process import (
    ProjectedStep,
    projections_in,
    read_projection,
)
from torchlens._monitor.read.views import ModuleView, Scalars, Series, SeriesMap
from torchlens._monitor.serve.graph_page import graph_structure
from torchlens._monitor.serve.run_page import explore_runs
from torchlens._monitor.sinks.sink import Sink, send
from torchlens._monitor.sinks.trackers import TensorBoard
from torchlens._monitor.store.columns import (
    SeriesKey,
    Step,
    as_one,
    empty_columns,
    merged,
)
from torchlens._monitor.store.folder import (
    GRAPH_FILE,
    RUN_FILE,
    files_of_ranks,
    is_run,
    read_json_file,
)
from torchlens._monitor.store.lines import ScalarRow
from torchlens._monitor.store.rank_files import Counts, RankContents
from torchlens._page.page import Exploration
from torchlens._text.error_wording import checked_file, got

if TYPE_CHECKING:
    import pandas


# Retries if a file vanishes between listing and reading, because the writer has merged it.
_MAX_TRIES = 10


class Drop(NamedTuple):
    """Observations dropped before a step, because they came faster than they were written."""

    rank: int
    step: int
    observations: int


class RunReader:
    """A run that was recorded, or is being recorded. Empty until `refresh` reads its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ranks: dict[int, RankContents] = {}
        self._joined: _Joined | None = None
        self._file_problems: list[str] = []

    def refresh(self) -> bool:
        """Reads the data written since the last refresh. Returns whether there was any."""
        is_changed = False
        for _ in range(_MAX_TRIES):
            files = files_of_ranks(self.folder)
            self._ranks = {
                rank: self._ranks.get(rank) or RankContents(self.folder, rank) for rank in files
            }
            try:
                for rank, own in files.items():
                    is_changed |= self._ranks[rank].read_on(own)
            except FileNotFoundError:
                is_changed = True
                continue
            finally:
                if is_changed:
                    self._joined = None
            return is_changed
        raise FileNotFoundError(f"Files of the run in {str(self.folder)!r} are missing.")

    # -- contents ----------------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, Any]:
        """The contents of run.json: class of the model, time, versions, options. Empty if the file
        does not exist yet.
        """
        return self._json(RUN_FILE)

    @property
    def graph(self) -> dict[str, Any]:
        """The graph of the model (see torchlens/_monitor/record/graph.py). Empty if the file does
        not exist yet.
        """
        return self._json(GRAPH_FILE)

    @property
    def ranks(self) -> list[int]:
        """The ranks of the processes that wrote the run."""
        return list(self._ranks)

    @property
    def sessions(self) -> list[dict[str, Any]]:
        """The processes that recorded, each with its first step and options, by start time."""
        found = [session for rank in self._ranks.values() for session in rank.events(dict)]
        return sorted(found, key=lambda each: each["time"])

    @property
    def steps(self) -> list[int]:
        """The recorded steps; of merged steps, the last."""
        return [step.last for step in self._join().steps]

    @property
    def step_groups(self) -> list[tuple[int, int, int]]:
        """(first, last, count) for each of `steps`; count is the number of recorded steps merged
        into it.
        """
        return [(step.first, step.last, step.count) for step in self._join().steps]

    @property
    def modules(self) -> list[str]:
        """The addresses of the recorded modules ('' is the model itself), and the names of watched
        tensors.
        """
        return list(self._join().by_module)

    @property
    def is_finished(self) -> bool:
        """Whether every rank has finished the run properly."""
        return bool(self._ranks) and all(rank.is_finished for rank in self._ranks.values())

    @property
    def counts(self) -> Counts:
        """The number of sampled tensors of all ranks, as far as the files go: offered = recorded +
        dropped.
        """
        every = [rank.counts for rank in self._ranks.values()]
        recorded, dropped = (
            sum(getattr(each, name) for each in every) for name in ("recorded", "dropped")
        )
        return Counts(recorded + dropped, recorded, dropped)

    @property
    def drops(self) -> list[Drop]:
        """Observations that came faster than they were written, each with the next recorded
        step.
        """
        return [Drop(rank.rank, *each) for rank in self._ranks.values() for each in rank.drops()]

    @property
    def findings(self) -> list[RunFinding]:
        """Health findings: what is wrong, where, when it appeared and when it ended. A finding of
        several ranks is listed once.
        """
        found: dict[tuple[Any, ...], RunFinding] = {}
        for rank in self._ranks.values():
            for each in rank.events(RunFinding):
                found.setdefault((each.step, each.kind, each.finding.where, each.is_over), each)
        return sorted(found.values(), key=lambda each: each.step)

    @property
    def problems(self) -> list[str]:
        """Errors while recording, and damage to the files."""
        told = [text for rank in self._ranks.values() for text in rank.events(str)]
        return list(dict.fromkeys([*told, *self._file_problems, *self.damage]))

    @property
    def damage(self) -> list[str]:
        """Unreadable lines of the files. While a run is being written, its last line may be
        incomplete.
        """
        return [text for rank in self._ranks.values() for text in rank.damage]

    @property
    def projections(self) -> dict[str, list[ProjectedStep]]:
        """The results of `run.embed` by address: (step, points, share of the variance explained)
        for each step.
        """
        return {name: read_projection(self.folder, name) for name in projections_in(self.folder)}

    @property
    def scalars(self) -> dict[str, Scalars]:
        """The numbers given to `run.log`, by name."""
        return self._join().scalars

    def __getitem__(self, address: str) -> ModuleView:
        """The records of a module by address ('' is the model itself), or of a watched tensor by
        name.
        """
        by_module = self._join().by_module
        if address not in by_module:
            close = difflib.get_close_matches(str(address), by_module, n=1)
            raise KeyError(
                f"Nothing was recorded of {address!r}."
                + (f" Closest: {close[0]!r}." if close else "")
            )
        return ModuleView(
            address, {kind: SeriesMap(own) for kind, own in by_module[address].items()}
        )

    def __iter__(self) -> Iterator[ModuleView]:
        return (self[address] for address in self.modules)

    def __contains__(self, address: object) -> bool:
        return address in self._join().by_module

    def __len__(self) -> int:
        return len(self._join().by_module)

    def __repr__(self) -> str:
        steps, state = self.steps, "finished" if self.is_finished else "being written, or cut short"
        span = f"{len(steps)} recorded steps up to {steps[-1]}" if steps else "no step yet"
        return f"<RunReader {str(self.folder)!r}: {len(self)} modules, {span}, {state}>"

    def series(self) -> list[Series]:
        """All recorded series."""
        return [
            series
            for kinds in self._join().by_module.values()
            for own in kinds.values()
            for series in own.values()
        ]

    def recorded(self) -> tuple[list[SeriesKey], list[Step]]:
        """All data as stored: the keys of the series by number, and the steps with their
        columns.
        """
        joined = self._join()
        return joined.keys, joined.steps

    def to_pandas(self) -> "pandas.DataFrame":
        """A table with one row for each series and step."""
        import pandas

        tables = [series.to_pandas() for series in self.series()]
        table = pandas.concat(tables, ignore_index=True) if tables else pandas.DataFrame()
        table.attrs["receipt"] = self._receipt().to_dict()
        return table

    def _receipt(self) -> Receipt:
        """What made the run. Its weights change with each step, so it has no digest of them."""
        info = self.info
        structure = graph_structure(self.graph)
        return Receipt(str(info.get("model")), structure, None, None, info.get("versions", {}))

    def send_to(self, sink: Sink) -> None:
        """Sends the recorded run to a sink: `r.send_to(torchlens.sinks.Wandb(mode='offline'))`."""
        if not isinstance(sink, Sink):
            raise TypeError(f"sink must be one of torchlens.sinks, got {got(sink)}.")
        joined, info = self._join(), self.info
        about = {
            "name": self.folder.name, "folder": str(self.folder), "model": info.get("model"),
            "options": info.get("options", {}),
        }  # fmt: skip
        send(sink, about, joined.steps, joined.keys, joined.scalars, self.findings)

    def to_tensorboard(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Writes the recorded run for TensorBoard. The options are those of
        `torchlens.sinks.TensorBoard`.
        """
        self.send_to(TensorBoard(folder, **options))

    def explore(
        self,
        path: str | os.PathLike[str] | None = "run.html",
        *,
        compare: "Iterable[RunReader | str | os.PathLike[str]]" = (),
        title: str | None = None,
    ) -> Exploration:
        """Writes one HTML file in which you can explore the run; it needs neither a network nor
        other files.

        `compare` takes other runs (or their folders) to show beside this one. A file has two
        megabytes at most; for long runs it holds fewer points. With `path=None`, nothing is
        written; in a notebook the page is shown.

        >>> r.explore('run.html', compare=['runs/b'])
        """
        if isinstance(compare, str | os.PathLike | RunReader):
            compare = [compare]
        others = [each if isinstance(each, RunReader) else open_run(each) for each in compare]
        target = None if path is None else checked_file("path", path, "run.html")
        return explore_runs([self, *others], target, title)

    # -- files -------------------------------------------------------------------------------------

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return read_json_file(self.folder / name)
        except ValueError as error:
            if str(error) not in self._file_problems:
                self._file_problems.append(str(error))
            return {}

    def _join(self) -> "_Joined":
        if self._joined is None:
            self._joined = _Joined(list(self._ranks.values()))
        return self._joined


# -- joining the ranks -----------------------------------------------------------------------------


class _Joined:
    """The joined data of all ranks. The number of a series is its index in `keys`. Ranks may have
    merged their oldest steps differently (see `in_blocks`): overlapping steps are merged.
    """

    def __init__(self, ranks: Sequence[RankContents]) -> None:
        self.keys: list[SeriesKey] = []
        self._numbers: dict[tuple[str, str, str], int] = {}
        steps: list[tuple[int, Step]] = []
        for rank in ranks:
            numbers = {own: self._number(key) for own, key in rank.series.items()}
            steps += [(rank.rank, _renumbered(step, numbers)) for step in rank.steps]
        self.steps = [_together(group) for group in _overlapping(steps)]
        self.by_module: dict[str, dict[str, dict[str, Series]]] = {}
        for number, key in enumerate(self.keys):
            series = Series(key, number, self.steps)
            self.by_module.setdefault(key.module, {}).setdefault(key.kind, {})[key.name] = series
        rows: dict[str, dict[int, ScalarRow]] = {}
        lists = ranks[0].records(list) if ranks else []  # all ranks log the same
        for row in chain.from_iterable(lists):
            rows.setdefault(row.name, {})[row.step] = row
        self.scalars = {
            name: Scalars(name, [own[step] for step in sorted(own)]) for name, own in rows.items()
        }

    def _number(self, key: SeriesKey) -> int:
        short = key[:3]
        if short not in self._numbers:
            self._numbers[short] = len(self.keys)
            self.keys.append(key)
        return self._numbers[short]


def _renumbered(step: Step, numbers: Mapping[int, int]) -> Step:
    """The step with the joined numbers of its series. It has no rows if a number has no key,
    because the line that defines the key is damaged.
    """
    columns = step.columns
    old = columns.series.tolist()
    if any(number not in numbers for number in old):
        return replace(step, columns=empty_columns())
    new = [numbers[number] for number in old]
    if new == old:
        return step
    changed = replace(columns, series=np.array(new, columns.series.dtype))
    return replace(step, columns=merged([changed]))


def _overlapping(steps: Iterable[tuple[int, Step]]) -> Iterable[list[tuple[int, Step]]]:
    """Groups of (rank, step) whose ranges of steps overlap, in order."""
    group: list[tuple[int, Step]] = []
    end = -1
    for rank, step in sorted(steps, key=lambda each: (each[1].first, each[1].last)):
        if group and step.first > end:
            yield group
            group = []
        group.append((rank, step))
        end = max(end, step.last)
    if group:
        yield group


def _together(group: Sequence[tuple[int, Step]]) -> Step:
    """Merges the steps of a group: first within each rank, then across ranks."""
    if len(group) == 1:
        return group[0][1]
    by_rank: dict[int, list[Step]] = {}
    for rank, step in group:
        by_rank.setdefault(rank, []).append(step)
    ranks = [as_one(own) for own in by_rank.values()]
    return replace(
        ranks[0],
        first=min(step.first for step in ranks),
        last=max(step.last for step in ranks),
        count=max(step.count for step in ranks),
        columns=merged([step.columns for step in ranks]),
    )


def open_run(folder: Any) -> RunReader:
    """Opens a run that `torchlens.monitor` has recorded or is still recording (see RunReader)."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder must be the folder of a run, such as 'runs/a', got {got(folder)}.")
    path = Path(folder).expanduser()
    if not is_run(path):
        inside = (
            [each.name for each in sorted(path.iterdir()) if is_run(each)] if path.is_dir() else []
        )
        hint = f" There are runs inside: {', '.join(inside[:10])}." if inside else ""
        raise FileNotFoundError(f"There is no run in {str(path)!r}.{hint}")
    reader = RunReader(path)
    reader.refresh()
    return reader


def last_step_of(folder: Path) -> int:
    """The last step that any rank has recorded; -1 if there is none."""
    ranks = open_run(folder)._ranks.values()
    return max((step.last for rank in ranks for step in rank.steps), default=-1)
