"""Many edits, replayed one by one or stacked: a table of what each does."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchlens._edit.batches import Batch, batches_of
from torchlens._edit.certificate import Certificate
from torchlens._edit.changes import Control
from torchlens._edit.plan import Target
from torchlens._edit.replayer import Replayer, Task, listed
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.lookup import Lookup
from torchlens._history.model_history import ModelHistory
from torchlens._history.receipt import exported_receipt
from torchlens._history.sites import Site, Sites
from torchlens._recording.tolerance import relative_error
from torchlens._text.error_wording import got
from torchlens.errors import NotReplayableError

if TYPE_CHECKING:
    import pandas

Tensor = torch.Tensor
Metric = Callable[[Any], Any]
_MOST_IN_A_BATCH = 32


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of a sweep. `value` is what the metric returned; None if the edit was refused, for
    the reason in the certificate. `num_calls` is how many calls ran again for it.
    """

    site: Site
    edit: str
    value: Any
    certificate: Certificate
    num_calls: int
    seconds: float


class Sweep(Sequence[Measurement]):
    """The results of a sweep, in the order of the sites. Print it, or make a table of it.

    >>> grid = history.sweep(history.sites('head'), 0.0, metric)
    >>> grid.to_pandas(), grid.values, grid[0].certificate
    """

    def __init__(self, rows: Sequence[Measurement], receipt: dict[str, Any]) -> None:
        self._rows = list(rows)
        self._receipt = receipt

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        return self._rows[number]

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self._rows)

    @property
    def values(self) -> list[Any]:
        """What the metric returned, for each row."""
        return [row.value for row in self._rows]

    @property
    def certificates(self) -> dict[str, int]:
        """How many rows have each kind of certificate."""
        return dict(Counter(row.certificate.kind for row in self._rows))

    def to_pandas(self) -> "pandas.DataFrame":
        """A table: site, entry and its part, edit, what the metric returned, certificate, cost."""
        import pandas as pd

        table = pd.DataFrame(
            {
                "site": str(row.site),
                "key": _key_text(row.site),
                "part": row.site.parts_text,
                "edit": row.edit,
                **(row.value if isinstance(row.value, Mapping) else {"metric": row.value}),
                "certificate": row.certificate.kind,
                "reason": row.certificate.reason,
                "calls": row.num_calls,
                "seconds": row.seconds,
            }
            for row in self._rows
        )
        table.attrs["receipt"] = self._receipt
        return table

    def __repr__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.certificates.items())
        return f"<Sweep of {len(self)} edits: {kinds}>"


def _key_text(site: Site) -> str:
    return site.key.layer_label if isinstance(site.key, LayerEntry) else str(site.key)


def sweep(
    replayer: Replayer,
    sites: Any,
    edit: Any,
    metric: Metric | None,
    outputs: Any,
    hold: Any,
    batched: bool | int,
) -> Sweep:
    """The table of all sites with all edits."""
    if isinstance(sites, Mapping):
        raise TypeError(f"sites must be a list of sites or keys, got {got(sites)}.")
    chosen = [each if isinstance(each, Site) else Site(each) for each in listed(sites)]
    if not chosen:
        raise ValueError("sites is empty. Give at least one, such as history.sites('head').")
    edits = edit if isinstance(edit, list | tuple) else [edit]
    if metric is not None and not callable(metric):
        raise TypeError(f"metric must be a function of the output, or None, got {got(metric)}.")
    pairs = [(site, own, edit_at(replayer, site, own)) for own in edits for site in chosen]
    run = _Run(replayer, metric, outputs, hold)
    targets = [replayer.target(site, resolved) for site, _, resolved in pairs]
    done = run.batched(targets, _batch_size(batched)) if batched else run.singly(targets)
    rows = [
        Measurement(site, _name_of(own), *measured)
        for (site, own, _), measured in zip(pairs, done, strict=True)
    ]
    if all(row.certificate.kind == "refused" for row in rows):
        raise NotReplayableError(f"No edit can be replayed. {rows[0].certificate.reason}")
    return Sweep(rows, exported_receipt(replayer.log).to_dict())


def _batch_size(batched: bool | int) -> int:
    if batched is True:
        return _MOST_IN_A_BATCH
    if not isinstance(batched, int) or batched < 1:
        raise TypeError(f"batched must be True, False or how many edits, got {got(batched)}.")
    return batched


def edit_at(replayer: Replayer, site: Site, edit: Any) -> Any:
    """The edit at a site: of another history, its value there."""
    if isinstance(edit, Control):
        return Control(edit_at(replayer, site, edit.edit), edit.seed)
    if not isinstance(edit, ModelHistory):
        return edit
    log = edit._log
    key = site.key.layer_label if isinstance(site.key, LayerEntry) else site.key
    other = Site(key, site.part, site.head, site.neuron, site.channel, site.token, site.index)
    place = Sites(log, Lookup(log)).place(other)
    shapes = (tuple(log.row(place.entry).shape), _shape_at(replayer, site))
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{site} has the shape {shapes[1]} here and {shapes[0]} in the other history. Log both "
            "with inputs of one length."
        )
    return LayerEntry(log, place.entry)


def _shape_at(replayer: Replayer, site: Site) -> tuple[int, ...]:
    return tuple(replayer.log.row(replayer.sites.place(site).entry).shape)


def _name_of(edit: Any) -> str:
    """An edit in a word or two, for the table."""
    if isinstance(edit, Control):
        return f"control of {_name_of(edit.edit)}"
    if isinstance(edit, ModelHistory):
        return f"another {edit.model_name}"
    if isinstance(edit, LayerEntry):
        return edit.layer_label
    if isinstance(edit, Tensor):
        return f"tensor of shape {tuple(edit.shape)}"
    if callable(edit) or not isinstance(edit, str | int | float | complex):
        return getattr(edit, "__name__", type(edit).__name__)
    return str(edit)


_Measured = tuple[Any, Certificate, int, float]


class _Run:
    """Replays targets and measures their outputs."""

    def __init__(self, replayer: Replayer, metric: Metric | None, outputs: Any, hold: Any) -> None:
        self._replayer = replayer
        self._places = replayer.outputs_of(outputs)
        self._holds = replayer.held(hold)
        self._is_one = outputs is None or len(self._places) == 1
        self._metric = metric or self._distance
        self._recorded: list[Tensor] | None = None

    def singly(self, targets: Sequence[Target]) -> list[_Measured]:
        """One run for each target."""
        return [self._one(target) for target in targets]

    def batched(self, targets: Sequence[Target], size: int) -> list[_Measured]:
        """Targets of one entry in one run."""
        found: dict[int, _Measured] = {}
        for batch in batches_of(self._replayer, targets, self._holds, self._places, size):
            found |= self._batch(batch)
        return [found[number] for number in range(len(targets))]

    def _task(self, target: Target) -> Task:
        return self._replayer.task_of([target], self._holds, self._places)

    def _one(self, target: Target) -> _Measured:
        try:
            out = self._replayer.run(self._task(target))
        except NotReplayableError as error:
            return None, Certificate("refused", str(error)), 0, 0.0
        value = self._measured([*out.outputs.values()])
        return value, out.certificate, out.num_calls, out.seconds

    def _batch(self, batch: Batch) -> dict[int, _Measured]:
        try:
            rows = batch.run()
        except NotReplayableError as error:
            refused = None, Certificate("refused", str(error)), 0, 0.0
            return dict.fromkeys(batch.numbers, refused)
        share = len(batch.numbers)
        return {
            number: (
                self._measured(values), certificate, batch.num_calls, batch.seconds / share,
            )
            for number, values, certificate in rows
        }  # fmt: skip

    def _measured(self, values: list[Tensor]) -> Any:
        result = self._metric(values[0] if self._is_one else values)
        if isinstance(result, Mapping):
            return {name: _number(each) for name, each in result.items()}
        return _number(result)

    def _distance(self, values: Any) -> float:
        if self._recorded is None:
            self._recorded = [self._replayer.value_at(place, {}) for place in self._places.values()]
        values = [values] if self._is_one else values
        pairs = zip(self._recorded, values, strict=False)
        return max(relative_error(old, new) for old, new in pairs)


def _number(value: Any) -> Any:
    """A number for a tensor with one element; anything else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
