"""Opening a trace by its name, whether it was closed or not."""

import os
from pathlib import Path

from torchlens.trace.files import INDEX_SUFFIX, TraceFiles, open_finished
from torchlens.trace.journal import journal_path, open_unfinished

__all__ = ["open_trace"]


def open_trace(path: str | os.PathLike[str]) -> TraceFiles:
    """Opens a file of one's own or of a stranger's; of one that was not closed, what its journal speaks of."""
    target = Path(path).expanduser()
    for ending in (".partial", ".journal"):
        if target.name.endswith(ending):
            target = target.with_name(target.name.removesuffix(ending))
    journal = Path(journal_path(target))
    if journal.is_file() and not _is_newer(target, journal):
        return open_unfinished(target)
    return open_finished(target)


def _is_newer(target: Path, journal: Path) -> bool:
    """Whether the trace of that name was closed after the journal was last written to."""
    for closed in (target, target.with_name(target.name + INDEX_SUFFIX)):
        if closed.exists() and closed.stat().st_mtime_ns >= journal.stat().st_mtime_ns:
            return True
    return False
