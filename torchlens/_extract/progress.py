"""A line that says how far an extraction is: on a terminal only, by tqdm if that is there."""

import sys
import time
from importlib import import_module
from typing import Any

from torchlens._text.numbers import seconds_text


class Progress:
    """Counts inputs; `total` is None where it is not known."""

    def __init__(self, total: int | None, done: int, shows: bool | None) -> None:
        self._shows = sys.stderr.isatty() if shows is None else shows
        self._total = total
        self._done = self._before = done
        self._started = self._said = time.monotonic()
        self._bar: Any = None
        if self._shows:
            try:
                bars = import_module("tqdm.auto")
                self._bar = bars.tqdm(total=total, initial=done, unit=" inputs", smoothing=0.05)
            except ImportError:
                pass

    def add(self, count: int) -> None:
        """Some more inputs are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._shows and (now := time.monotonic()) - self._said > 0.5:
            self._said = now
            print(f"\r{self.line(now)}", end="\x1b[K", file=sys.stderr, flush=True)  # noqa: T201

    def line(self, now: float) -> str:
        """`1,024 of 50,000 inputs, 812/s, 1.0 min left`"""
        rate = (self._done - self._before) / max(now - self._started, 1e-9)
        if self._total is None:
            return f"{self._done:,} inputs, {rate:,.0f}/s"
        left = (self._total - self._done) / max(rate, 1e-9)
        return f"{self._done:,} of {self._total:,} inputs, {rate:,.0f}/s, {seconds_text(left)} left"

    def close(self) -> None:
        """Ends the line."""
        if self._bar is not None:
            self._bar.close()
        elif self._shows:
            print(file=sys.stderr)  # noqa: T201
