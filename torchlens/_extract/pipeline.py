"""From a batch of data to the rows of the chosen layers: model, rows, pool, reduction."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchlens._extract.calls import Call, Caller, as_rows, check_rows
from torchlens._extract.data import Inputs, named_ids, reason_of
from torchlens._extract.engine import Engine, LayersError, evaluating
from torchlens._extract.pools import LayerRows, Pool, described_pool, pooled, to_rows
from torchlens._recording.user_code import warn_caller
from torchlens._text.error_wording import did_you_mean, got


@dataclass(slots=True)
class Processed:
    """The rows of one batch, and what was skipped."""

    rows: dict[str, LayerRows]
    ids: list[Any]
    skipped: list[tuple[Any, str]]


def about_arrays(batch: Processed) -> dict[str, Any]:
    """The shape and dtype of a row of each layer, as the manifest has them."""
    return {
        name: {
            "shape": list(rows.values.shape[1:]),
            "dtype": "bfloat16" if rows.values.dtype == np.uint16 else rows.values.dtype.name,
            "ragged": rows.lengths is not None,
        }
        for name, rows in batch.rows.items()
    }


class Pipeline:
    """One model or several, the chosen layers, and what is made of their values."""

    def __init__(
        self,
        model: Any,
        layers: Any,
        pool: Pool = None,
        reduce: Any = None,
        dtype: str | None = None,
        skips: bool = False,
        compiles: bool = False,
    ) -> None:
        self.engines = dict(_engines(model, layers, compiles))
        self._callers = {engine.model: Caller(engine.model) for engine in self.engines.values()}
        self.compiles = compiles
        self.pool = pool
        self.reduce = reduce
        self.dtype = dtype
        self.skips = skips

    @contextmanager
    def running(self) -> Iterator[None]:
        """The context in which batches are processed: evaluation mode, no gradients."""
        with ExitStack() as stack:
            for engine in self.engines.values():
                stack.enter_context(evaluating(engine.model))
            yield

    def process(self, inputs: Inputs) -> Processed:
        """The rows of a batch. An exception of the model names the inputs."""
        if not inputs.ids:
            return Processed({}, [], inputs.failed)
        try:
            return Processed(self._rows(inputs), inputs.ids, inputs.failed)
        except LayersError:
            raise
        except Exception as error:
            if not self.skips:
                error.add_note(f"torchlens: raised for {named_ids(inputs.ids)}.")
                raise
        return self._one_by_one(inputs)

    def _one_by_one(self, inputs: Inputs) -> Processed:
        """The rows of a batch with an input for which the model raises."""
        found: list[dict[str, LayerRows]] = []
        ids, failed = [], list(inputs.failed)
        for place, one in enumerate(inputs.ids):
            try:
                found.append(self._rows(inputs, [place]))
                ids.append(one)
            except Exception as error:
                failed.append((one, reason_of(error)))
        if not ids and len(inputs.ids) > 1:
            raise RuntimeError(
                f"Every input of the batch ({named_ids(inputs.ids)}) failed, the last one with "
                f"{failed[-1][1]}. This is not an unusual input but the call."
            )
        names = list(found[0]) if found else []
        return Processed(
            {name: _joined([own[name] for own in found]) for name in names}, ids, failed
        )

    def _rows(self, inputs: Inputs, places: Sequence[int] | None = None) -> dict[str, LayerRows]:
        rows: dict[str, LayerRows] = {}
        for prefix, engine in self.engines.items():
            call = self._callers[engine.model](inputs.data, len(inputs.ids))
            ids = inputs.ids
            if places is not None:
                call, ids = call.rows(places), [ids[place] for place in places]
            for name, value in self._values(engine, call, named_ids(ids)).items():
                rows[prefix + name] = self._finished(prefix + name, value, call)
        return rows

    def _values(self, engine: Engine, call: Call, who: str) -> dict[str, torch.Tensor]:
        values = engine.run(call.args, call.kwargs, who)
        return {name: as_rows(name, value, call, who) for name, value in values.items()}

    def _finished(self, name: str, value: torch.Tensor, call: Call) -> LayerRows:
        value, mask = pooled(name, value, self.pool, call.mask)
        if self.reduce is None:
            return to_rows(name, value, mask, self.dtype)
        rows = to_rows(name, value.float(), mask, None)
        reduced = torch.from_numpy(self.reduce.transform(name, rows.values))
        return LayerRows(to_rows(name, reduced, None, self.dtype).values, rows.lengths)

    def first(self, inputs: Inputs) -> Processed:
        """Processes the first batch, and checks that rows do not depend on the rest of it."""
        processed = self.process(inputs)
        if isinstance(self.pool, Mapping) and processed.ids:
            wrong = [name for name in self.pool if name not in processed.rows]
            if wrong:
                hint = did_you_mean(wrong[0], processed.rows)
                raise ValueError(f"pool names {wrong[0]!r}, which is none of the layers. {hint}")
        if 1 < len(processed.ids) == len(inputs.ids):
            for engine in self.engines.values():
                self._check_rows(engine, inputs)
        return processed

    def _check_rows(self, engine: Engine, inputs: Inputs) -> None:
        if engine.changes_state:  # one more run would change later rows
            return
        call = self._callers[engine.model](inputs.data, len(inputs.ids))
        numbers = _subset(call)
        part = call.rows(numbers)
        try:
            values = self._values(engine, part, "a part of the first batch")
        except (RuntimeError, IndexError, TypeError) as error:
            warn_caller(
                f"torchlens: the model cannot run on a part of a batch ({error}), so rows "
                "could not be checked against a smaller batch."
            )
            return
        whole = self._values(engine, call, "the first batch")
        check_rows(whole, values, numbers, call.mask, part.mask)

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the options."""
        return {
            "pool": described_pool(self.pool),
            "reduce": None if self.reduce is None else self.reduce.describe(),
            "dtype": self.dtype,
            "compile": self.compiles,
        }


def _engines(model: Any, layers: Any, compiles: bool) -> Iterator[tuple[str, Engine]]:
    if not isinstance(model, Mapping):
        yield "", Engine(model, layers, compiles)
        return
    for name, own in model.items():
        if isinstance(layers, Mapping) and name not in layers:
            raise ValueError(f"layers has no layers for the model {name!r}, got {got(layers)}.")
        own_layers = layers[name] if isinstance(layers, Mapping) else layers
        yield f"{name}/", Engine(own, own_layers, compiles)


def _subset(call: Call) -> list[int]:
    """Some of the inputs of a batch: the first half; of ragged text, the shortest one."""
    if call.mask is not None:
        return [int(call.mask.sum(1).argmin())]
    return list(range(max(1, call.size // 2)))


def _joined(rows: Sequence[LayerRows]) -> LayerRows:
    values = np.concatenate([own.values for own in rows])
    if rows[0].lengths is None:
        return LayerRows(values)
    return LayerRows(
        values, np.concatenate([own.lengths for own in rows if own.lengths is not None])
    )
