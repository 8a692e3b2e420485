"""Reads a run, while it is written or later, and trusts nothing that it finds.

    r = torchlens.open_run('runs/a')
    r.modules                                 # addresses, in the order of first calls; watched tensors by their names
    r['layer1.0.conv1'].outputs               # a Series; also .inputs .gradients .parameters['weight'] .updates['bias'] ...
    r['layer1.0.conv1'].outputs.histogram()   # of the last recorded step; histogram(step=100); heat_map() over all steps
    r['layer1.0.conv1'].outputs.rms           # an array over .steps; also low, high, mean, std, zero, dead, nonfinite ...
    r.scalars['loss']                         # .steps, .values
    r.projections['layer1']                   # what run.embed asked for: (step, points, share of variance) by step
    r.findings, r.problems, r.counts, r.drops, r.damage, r.is_finished, r.info, r.graph
    r.steps                                   # recorded steps; where the oldest were merged, the last of each group
    r.to_pandas(); r.refresh()                # refresh() reads what was written since, and says whether there was anything

All ranks are read and joined: counts add up, ranges widen. Of sessions that overlap (training went on from a checkpoint),
the later one counts. A file with a torn or damaged end is read as far as it is good, and `damage` says so.
"""

import difflib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens.monitoring.columns import Columns, merged
from torchlens.monitoring.folder import GRAPH_FILE, RUN_FILE, SegmentFile, is_run, read_json_file, segment_files
from torchlens.monitoring.frames import Damage, Frame, Kind, Step, parse_json, read_frames, unpack_step
from torchlens.monitoring.health import RunFinding
from torchlens.monitoring.projection import ProjectedStep, projections_in, read_projection
from torchlens.monitoring.run_page import explore_runs
from torchlens.monitoring.sinks.export import send
from torchlens.monitoring.sinks.sink import Sink
from torchlens.monitoring.sinks.tensorboard_sink import TensorBoard
from torchlens.monitoring.views import ModuleView, Scalars, Series, SeriesKey, SeriesMap
from torchlens.monitoring.writer import Counts
from torchlens.viewer.page import Exploration
from torchlens.wording import checked_file, got

if TYPE_CHECKING:
    import pandas

__all__ = ["RunReader", "last_step_of", "open_run"]

# A file that a merged one takes the place of may vanish between looking and reading.
_MOST_TRIES = 10
_MOST_SERIES = 1 << 20


class Drop(NamedTuple):
    """Tensors that came too fast to be written."""

    rank: int
    step: int
    observations: int


@dataclass(slots=True, eq=False)
class _Segment:
    """What is known of one file."""

    rank: int
    identity: tuple[int, int] = (0, 0)  # device and inode: a file that was written anew is another
    offset: int = 0
    session: str = ""
    names: dict[int, SeriesKey] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    scalars: list[list[Any]] = field(default_factory=list)
    findings: list[RunFinding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    damage: Damage | None = None
    bad: list[str] = field(default_factory=list)  # frames that are whole but make no sense


class RunReader:
    """A run that was recorded, or is being recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._segments: dict[tuple[int, int, int], _Segment] = {}
        self._order: list[tuple[int, int, int]] = []
        self._version = 0
        self._joined: _Joined | None = None
        self._file_problems: list[str] = []
        self.refresh()

    def refresh(self) -> bool:
        """Reads what was written since the last time. Whether there was anything."""
        for _ in range(_MOST_TRIES):
            try:
                files = segment_files(self.folder)
                changed = [self._read(each) for each in files]
                break
            except FileNotFoundError:
                continue
        else:
            raise FileNotFoundError(f"The files of the run in {str(self.folder)!r} vanish while they are read.")
        order = [(each.rank, each.first, each.number) for each in files]
        is_changed = any(changed) or order != self._order
        self._segments = {key: self._segments[key] for key in order}
        self._order = order
        if is_changed:
            self._version += 1
            self._joined = None
        return is_changed

    # -- what there is ---------------------------------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, Any]:
        """What run.json says: the model's class, when, versions, options. Empty if there is none yet."""
        return self._json(RUN_FILE)

    @property
    def graph(self) -> dict[str, Any]:
        """The graph of the model, see torchlens/monitoring/graph.py. Empty if there is none yet."""
        return self._json(GRAPH_FILE)

    @property
    def ranks(self) -> list[int]:
        """The processes that wrote."""
        return sorted({each.rank for each in self._segments.values()})

    @property
    def sessions(self) -> list[dict[str, Any]]:
        """Each process that recorded, with its first step and options, in order."""
        found = [session for key in self._order for session in self._segments[key].sessions]
        return sorted(found, key=lambda each: each["time"])

    @property
    def steps(self) -> list[int]:
        """The recorded steps; where several were merged, the last of them."""
        return [step.last for step in self._join().steps]

    @property
    def step_groups(self) -> list[tuple[int, int, int]]:
        """(first, last, count) for each of `steps`: count is how many recorded steps were merged into it."""
        return [(step.first, step.last, step.count) for step in self._join().steps]

    @property
    def modules(self) -> list[str]:
        """The addresses of what was recorded: modules, the model itself (''), and watched tensors by their names."""
        return list(self._join().by_module)

    @property
    def is_finished(self) -> bool:
        """Whether every rank has ended in good order."""
        last: dict[int, _Segment] = {}
        for key in self._order:
            last[key[0]] = self._segments[key]
        return bool(last) and all(each.end is not None for each in last.values())

    @property
    def counts(self) -> Counts:
        """Tensors that were looked at in all sessions and ranks: recorded + dropped = offered, as far as the files go."""
        last: dict[tuple[int, str], tuple[int, int]] = {}
        for key in self._order:
            segment = self._segments[key]
            own = (segment.rank, segment.session)
            for step in segment.steps:
                last[own] = max(last.get(own, (0, 0)), (step.offered, step.dropped))
            if segment.end is not None:
                last[own] = segment.end["offered"], segment.end["dropped"]
        offered, dropped = (sum(each[place] for each in last.values()) for place in (0, 1))
        return Counts(offered, offered - dropped, dropped)

    @property
    def drops(self) -> list[Drop]:
        """What came too fast to be written, by step."""
        return [drop for key in self._order for drop in self._segments[key].drops]

    @property
    def findings(self) -> list[RunFinding]:
        """What looked wrong, with step and module, as it came up and as it was over. Of several ranks, each thing once."""
        found: dict[tuple[Any, ...], RunFinding] = {}
        for key in self._order:
            for each in self._segments[key].findings:
                found.setdefault((each.step, each.kind, each.finding.where, each.is_over), each)
        return sorted(found.values(), key=lambda each: each.step)

    @property
    def problems(self) -> list[str]:
        """What could not be recorded, and what is wrong with the files."""
        told = [text for key in self._order for text in self._segments[key].problems]
        bad = [text for key in self._order for text in self._segments[key].bad]
        return list(dict.fromkeys([*told, *self._file_problems, *bad, *self.damage]))

    @property
    def damage(self) -> list[str]:
        """Files that could be read in part only. The last one of a run that is being written may end within a frame."""
        found = []
        for place, key in enumerate(self._order):
            damage = self._segments[key].damage
            is_open = damage is not None and damage.is_torn and self._is_last(place) and not self.is_finished
            if damage is not None:
                state = " (it may be being written)" if is_open else ""
                found.append(f"rank{key[0]}, segment {key[2]}: cut at byte {damage.offset:,}: {damage.reason}{state}")
        return found

    @property
    def projections(self) -> dict[str, list[ProjectedStep]]:
        """What `run.embed` asked for, by address: (step, points, share of the variance that they show) for each step."""
        return {name: read_projection(self.folder, name) for name in projections_in(self.folder)}

    @property
    def scalars(self) -> dict[str, Scalars]:
        """What `run.log` was given, by name."""
        return self._join().scalars

    def __getitem__(self, address: str) -> ModuleView:
        """What was recorded of a module, by its address; of a watched tensor, by its name; '' is the model itself."""
        by_module = self._join().by_module
        if address not in by_module:
            close = difflib.get_close_matches(str(address), by_module, n=1)
            raise KeyError(f"Nothing was recorded of {address!r}." + (f" Closest: {close[0]!r}." if close else ""))
        return ModuleView(address, {kind: SeriesMap(own) for kind, own in by_module[address].items()})

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
        """Everything that was recorded over the steps."""
        return [series for kinds in self._join().by_module.values() for own in kinds.values() for series in own.values()]

    def recorded(self) -> tuple[list[SeriesKey], list[Step]]:
        """Everything as it lies in the files: what the series are called, by number, and the steps with their columns."""
        joined = self._join()
        return joined.keys, joined.steps

    def to_pandas(self) -> "pandas.DataFrame":
        """A table with one row for each series and step."""
        import pandas

        tables = [series.to_pandas() for series in self.series()]
        if not tables:
            return pandas.DataFrame()
        return pandas.concat(tables, ignore_index=True)

    def send_to(self, sink: Sink) -> None:
        """Sends what is recorded to a sink: `r.send_to(torchlens.sinks.Wandb(mode='offline'))`."""
        if not isinstance(sink, Sink):
            raise TypeError(f"sink must be one of torchlens.sinks, got {got(sink)}.")
        joined, info = self._join(), self.info
        about = {
            "name": self.folder.name, "folder": str(self.folder), "model": info.get("model"),
            "options": info.get("options", {}),
        }  # fmt: skip
        send(sink, about, joined.steps, joined.key_of, joined.scalars, self.findings)

    def to_tensorboard(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Writes what is recorded for TensorBoard. The options are those of `torchlens.sinks.TensorBoard`."""
        self.send_to(TensorBoard(folder, **options))

    def explore(
        self,
        path: str | os.PathLike[str] | None = "run.html",
        *,
        compare: "Iterable[RunReader | str | os.PathLike[str]]" = (),
        title: str | None = None,
    ) -> Exploration:
        """Writes one HTML file in which the run can be looked through; it needs no network and no other file.

        `compare` are other runs (or their folders), shown beside this one. A file is two megabytes at most: of long runs it
        carries fewer points. With `path=None` nothing is written; in a notebook the page is shown.

        >>> r.explore('run.html', compare=['runs/b'])
        """
        if isinstance(compare, str | os.PathLike | RunReader):
            compare = [compare]
        others = [each if isinstance(each, RunReader) else open_run(each) for each in compare]
        target = None if path is None else checked_file("path", path, "run.html")
        return explore_runs([self, *others], target, title)

    # -- files -----------------------------------------------------------------------------------------------------------

    def _is_last(self, place: int) -> bool:
        return place + 1 == len(self._order) or self._order[place + 1][0] != self._order[place][0]

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return read_json_file(self.folder / name)
        except ValueError as error:
            if str(error) not in self._file_problems:
                self._file_problems.append(str(error))
            return {}

    def _read(self, file: SegmentFile) -> bool:
        key = (file.rank, file.first, file.number)
        known = self._segments.get(key)
        with file.path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            identity = (status.st_dev, status.st_ino)
            if known is None or known.identity != identity or status.st_size < known.offset:
                known = self._segments[key] = _Segment(file.rank, identity)
            elif status.st_size == known.offset or (known.damage is not None and not known.damage.is_torn):
                return False
            stream.seek(known.offset)
            data = stream.read()
        before = known.offset
        known.damage = None
        for frame in read_frames(data):
            if isinstance(frame, Damage):
                known.damage = Damage(before + frame.offset, frame.reason, frame.is_torn)
                break
            known.offset = before + frame.end
            try:
                _add(known, frame)
            except (ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError) as error:
                if len(known.bad) < 20:
                    known.bad.append(f"rank{file.rank}, segment {file.number}: a frame makes no sense: {error}")
        return known.offset > before or not before

    # -- joining ranks and sessions --------------------------------------------------------------------------------------

    def _join(self) -> "_Joined":
        if self._joined is None:
            self._joined = _Joined([self._segments[key] for key in self._order], self._superseded())
        return self._joined

    def _superseded(self) -> dict[tuple[int, str], int]:
        """For each session of a rank, the step from which on a later one counts."""
        limits: dict[tuple[int, str], int] = {}
        for rank in self.ranks:
            own = [each for key in self._order if key[0] == rank for each in self._segments[key].sessions]
            own.sort(key=lambda each: each["time"])
            limit = 1 << 62
            for session in reversed(own):
                limits[rank, session["session"]] = limit
                limit = min(limit, session["first_step"])
        return limits


def _add(segment: _Segment, frame: Frame) -> None:
    """Takes note of what a frame says. Raises one of the errors of wrong data if it says nothing sensible."""
    kind, payload, _ = frame
    if kind == Kind.SEGMENT:
        segment.session = str(parse_json(payload, dict)["session"])
    elif kind == Kind.SESSION:
        value = parse_json(payload, dict)
        segment.sessions.append(
            {
                **value,
                "session": str(value["session"]),
                "first_step": int(value["first_step"]),
                "time": float(value["time"]),
            }
        )
    elif kind == Kind.NAMES:
        for row in parse_json(payload, list):
            number, module, series_kind, name, shape, dtype = row
            if len(segment.names) < _MOST_SERIES:
                segment.names[int(number)] = SeriesKey(
                    str(module), str(series_kind), str(name), tuple(map(int, shape)), str(dtype)
                )
    elif kind == Kind.STEP:
        segment.steps.append(unpack_step(payload))
    elif kind == Kind.SCALARS:
        for name, step, mean, low, high, count in parse_json(payload, list):
            segment.scalars.append([str(name), int(step), float(mean), float(low), float(high), int(count)])
    elif kind == Kind.FINDING:
        segment.findings.append(RunFinding.from_json(parse_json(payload, dict)))
    elif kind == Kind.PROBLEM:
        segment.problems.append(str(parse_json(payload, dict)["text"]))
    elif kind == Kind.DROPPED:
        value = parse_json(payload, dict)
        segment.drops.append(Drop(segment.rank, int(value["step"]), int(value["observations"])))
    elif kind == Kind.END:
        value = parse_json(payload, dict)
        segment.end = {name: int(value[name]) for name in ("offered", "recorded", "dropped")}


class _Joined:
    """Everything by series and step, whoever wrote it."""

    def __init__(self, segments: list[_Segment], limits: dict[tuple[int, str], int]) -> None:
        self.by_module: dict[str, dict[str, dict[str, Series]]] = {}
        self.scalars: dict[str, Scalars] = {}
        self._numbers: dict[tuple[str, str, str], int] = {}
        self.keys: list[SeriesKey] = []
        groups: dict[tuple[int, int], list[Step]] = {}
        rows: dict[str, dict[int, list[Any]]] = {}
        for segment in segments:
            limit = limits.get((segment.rank, segment.session), 1 << 62)
            numbers = {own: self._number(key) for own, key in segment.names.items()}
            num_same = next((own for own in range(len(numbers)) if numbers.get(own) != own), len(numbers))
            for step in segment.steps:
                if step.first < limit:
                    groups.setdefault((step.first, step.last), []).append(_renumbered(step, numbers, num_same))
            for row in segment.scalars:
                if row[1] < limit and segment.rank == min(each.rank for each in segments):
                    rows.setdefault(row[0], {})[row[1]] = row
        self.steps = [_together(groups[key]) for key in sorted(groups, key=lambda key: (key[1], key[0]))]
        for key, (module, kind, name) in zip(self.keys, self._numbers, strict=True):
            series = Series(key, self._numbers[module, kind, name], self.steps)
            self.by_module.setdefault(module, {}).setdefault(kind, {})[name] = series
        for name, own in rows.items():
            self.scalars[name] = Scalars(name, [own[step] for step in sorted(own)])

    def key_of(self, number: int) -> SeriesKey:
        """What a series is about."""
        return self.keys[number]

    def _number(self, key: SeriesKey) -> int:
        """One number for the series of that name in all files."""
        short = key[:3]
        if short not in self._numbers:
            self._numbers[short] = len(self.keys)
            self.keys.append(key)
        return self._numbers[short]


def _renumbered(step: Step, numbers: dict[int, int], num_same: int) -> Step:
    """With the numbers that series have in all files. The first `num_same` have those already."""
    columns = step.columns
    if len(columns) and columns.series[-1] < num_same:  # series are in order
        return step
    unknown = [number for number in columns.series.tolist() if number not in numbers]
    if unknown or not len(columns):
        # A file that does not tell its names is damaged in a way that no checksum shows.
        return Step(step.first, step.last, step.count, step.time, step.offered, step.dropped, merged([]))
    new = [numbers[number] for number in columns.series.tolist()]
    if new == columns.series.tolist():
        return step
    changed = Columns(**{name: getattr(columns, name) for name in Columns.__slots__})
    changed.series = columns.series.copy()
    changed.series[:] = new
    if new != sorted(new):
        changed = merged([changed, merged([])]) if len(set(new)) == len(new) else merged([changed])
    return Step(step.first, step.last, step.count, step.time, step.offered, step.dropped, changed)


def _together(steps: list[Step]) -> Step:
    """The same step, of several ranks, or in several parts."""
    if len(steps) == 1:
        return steps[0]
    first = steps[0]
    columns = merged([step.columns for step in steps])
    return Step(first.first, first.last, first.count, first.time, first.offered, first.dropped, columns)


def open_run(folder: Any) -> RunReader:
    """Opens a run that `torchlens.monitor` recorded, or is recording: see RunReader."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder must be the folder of a run, such as 'runs/a', got {got(folder)}.")
    path = Path(folder).expanduser()
    if not is_run(path):
        inside = [each.name for each in sorted(path.iterdir()) if is_run(each)] if path.is_dir() else []
        hint = f" There are runs inside: {', '.join(inside[:10])}." if inside else ""
        raise FileNotFoundError(f"There is no run in {str(path)!r}.{hint}")
    return RunReader(path)


def last_step_of(folder: Path) -> int:
    """The last step that any rank has recorded; -1 if there is none."""
    return max((step.last for segment in RunReader(folder)._segments.values() for step in segment.steps), default=-1)
