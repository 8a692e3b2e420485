"""Sends a run to TensorBoard's event files."""

import os
from collections.abc import Mapping
from math import isfinite, nan
from pathlib import Path
from typing import Any

from torchlens._monitor.sinks.sink import Sink, needed
from torchlens._monitor.sinks.step_record import SeriesRecord, StepRecord
from torchlens._text.wording import got


class TensorBoard(Sink):
    """Writes histograms, statistics, scalars and findings for TensorBoard.

    >>> run = torchlens.monitor(model, 'runs/a', sinks=[torchlens.sinks.TensorBoard('tb/a')])
    >>> torchlens.open_run('runs/a').to_tensorboard('tb/a')  # a run that is recorded already

    The histograms have the bins of the run's own (two an octave), not bins of equal width. The
    other options are those of `Sink`.
    """

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(f"folder must name a folder, such as 'tb/a', got {got(folder)}.")
        self._make = needed("torch.utils.tensorboard", "tensorboard", "TensorBoard").SummaryWriter
        self._folder = Path(folder).expanduser()
        self._writer: Any = None

    def open(self, info: Mapping[str, Any]) -> None:
        """Begins an event file."""
        self._writer = self._make(str(self._folder))

    def write(self, record: StepRecord) -> None:
        """Adds what was recorded."""
        writer = self._writer
        for name, step, value in record.scalars:
            writer.add_scalar(name, value, step, walltime=record.time)
        for series in record.series:
            for tag, value in self.numbers(series):
                writer.add_scalar(tag, value, record.step, walltime=record.time)
            if self.histograms:
                self._add_histogram(series, record)
        for finding in record.findings:
            writer.add_text("findings", str(finding), finding.step, walltime=record.time)
        writer.flush()

    def close(self) -> None:
        """Ends the file."""
        if self._writer is not None:
            self._writer.close()

    def _add_histogram(self, series: SeriesRecord, record: StepRecord) -> None:
        bins = series.bins
        if bins is None:
            return
        low, high = series.statistics.get("low", nan), series.statistics.get("high", nan)
        # The first bucket of an event reaches down to the smallest float: an empty one in front
        # keeps ours as it is.
        self._writer.add_histogram_raw(
            self.tag(series),
            min=low if isfinite(low) else float(bins.edges[0]),
            max=high if isfinite(high) else float(bins.edges[-1]),
            num=int(bins.counts.sum()),
            sum=series.total,
            sum_squares=series.squares,
            bucket_limits=bins.edges.tolist(),
            bucket_counts=[0, *bins.counts.tolist()],
            global_step=record.step,
            walltime=record.time,
        )
