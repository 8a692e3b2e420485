"""What an extraction will take, from one batch: bytes, files, time."""

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from torchlens._extract.data import Items
from torchlens._extract.extraction import Extraction, ExtractOptions
from torchlens._text.error_wording import check_count
from torchlens._text.numbers import bytes_text, seconds_text
from torchlens.errors import FeaturesError

_HEADER = 128  # bytes of a .npy file before its data


@dataclass(frozen=True, slots=True)
class Forecast:
    """What an extraction will take. Ragged text is taken to be as long as that of the sample."""

    num_inputs: int
    row_bytes: dict[str, float]  # layer → bytes of one input
    num_shards: int
    seconds: float  # of this process, with its start, without reading the data

    @property
    def num_bytes(self) -> int:
        """The size of all arrays on disk."""
        data = sum(self.row_bytes.values()) * self.num_inputs
        return round(data) + _HEADER * self.num_shards * len(self.row_bytes)

    @property
    def shard_bytes(self) -> float:
        """The size of the largest file."""
        return max(self.row_bytes.values()) * self.num_inputs / self.num_shards

    def __str__(self) -> str:
        shards = f"{self.num_shards:,} shards of {len(self.row_bytes)} files"
        size, time = bytes_text(self.num_bytes), seconds_text(self.seconds)
        lines = [f"{self.num_inputs:,} inputs: {size} in {shards}, {time} on this device"]
        for name, own in self.row_bytes.items():
            whole = bytes_text(own * self.num_inputs)
            lines.append(f"  {name}: {bytes_text(own)} an input, {whole}")
        return "\n".join(lines)


def forecast(
    model: Any, sample: Any, layers: Any, num_inputs: int, *, num_runs: int = 5, **options: Any
) -> Forecast:
    """Measures the first batch of a sample of the data, and says what `num_inputs` will take.

    The options are those of `extract`, which is given a batch of the same size.

    >>> print(forecast(model, images[:64], ['layer4'], num_inputs=1_000_000, dtype='float16'))
    """
    check_count("num_inputs", num_inputs, 1)
    extraction = Extraction(model, sample, layers, ExtractOptions(**options))
    source, pipeline = extraction.source, extraction.pipeline
    if getattr(pipeline.reduce, "is_fitted", True) is False:
        raise ValueError("A forecast needs a reduction that is fitted; forecast without reduce=.")
    if isinstance(source, Items):
        numbers = [range(min(extraction.batch_size, source.num))]
        inputs = next(iter(source.batches(numbers, pipeline.skips)))
    else:
        inputs = source.peek()
    times = []
    with pipeline.running():
        start = perf_counter()
        batch = pipeline.first(inputs)
        seconds_of_first = perf_counter() - start
        if not batch.ids:
            raise FeaturesError(f"No input of the sample could be read: {batch.skipped[0][1]}.")
        for _ in range(num_runs):
            start = perf_counter()
            pipeline.process(inputs)
            times.append(perf_counter() - start)
    row_bytes = {}
    for name, rows in batch.rows.items():
        lengths = np.zeros(0) if rows.lengths is None else rows.lengths
        row_bytes[name] = (rows.values.nbytes + lengths.nbytes) / len(batch.ids)
    shards = -(-num_inputs // extraction.options.shard_size)
    seconds = seconds_of_first + median(times) * num_inputs / len(inputs.ids)
    return Forecast(num_inputs, row_bytes, shards, seconds)
