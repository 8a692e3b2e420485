"""What reading data that somebody made up may raise, told as one error."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchlens._text.plain_text import printable, shown
from torchlens.errors import TraceError

# Beside what is checked; torch raises RuntimeError at what no tensor can be.
_BROKEN = (
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
    RuntimeError,
)


@contextmanager
def told_as_damage(path: Path) -> Iterator[None]:
    """Around the reading of what stands in the file `path`."""
    try:
        yield
    except TraceError as error:
        if str(error).startswith(printable(str(path))):
            raise
        raise TraceError(
            f"{printable(str(path))} is damaged, or was made to mislead: {error}"
        ) from None
    except _BROKEN as error:
        reason = shown(f"{type(error).__name__}: {error}")
        raise TraceError(
            f"{printable(str(path))} is damaged, or was made to mislead ({reason})."
        ) from None
