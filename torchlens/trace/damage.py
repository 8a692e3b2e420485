"""What reading data that somebody made up may raise, told as one error."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchlens.errors import TraceError
from torchlens.trace.plain_text import printable, shown

__all__ = ["told_as_damage"]

# Beside what is checked; torch raises RuntimeError at what no tensor can be.
_BROKEN = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError, RuntimeError)


@contextmanager
def told_as_damage(path: Path) -> Iterator[None]:
    """Around the reading of what stands in the file `path`."""
    try:
        yield
    except TraceError as error:
        if str(error).startswith(printable(str(path))):
            raise
        raise TraceError(f"{printable(str(path))} is damaged, or was made to mislead: {error}") from None
    except _BROKEN as error:
        reason = shown(f"{type(error).__name__}: {error}")
        raise TraceError(f"{printable(str(path))} is damaged, or was made to mislead ({reason}).") from None
