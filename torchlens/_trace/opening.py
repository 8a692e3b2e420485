"""Opening a trace by its name, whether it was closed or not."""

import os
from pathlib import Path

from torchlens._text.plain_text import printable
from torchlens._text.wording import got
from torchlens._trace.files import INDEX_SUFFIX, TraceFiles, open_finished
from torchlens._trace.journal import journal_path, open_unfinished, tells_of_tensors
from torchlens.errors import TraceError


def open_trace(path: str | os.PathLike[str]) -> TraceFiles:
    """Opens a file of one's own or of a stranger's; of one that was not closed, what its journal
    speaks of.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must name a file, such as 'trace.safetensors', got {got(path)}.")
    target = Path(path).expanduser()
    if target.is_dir():
        raise TraceError(
            f"{printable(str(target))} is a folder; name a file in it, such as trace.safetensors."
        )
    for ending in (".partial", ".journal"):
        if target.name.endswith(ending):
            target = target.with_name(target.name.removesuffix(ending))
    journal = Path(journal_path(target))
    if journal.is_file() and not _is_closed_after(target, journal):
        return open_unfinished(target)
    return open_finished(target)


def _is_closed_after(target: Path, journal: Path) -> bool:
    """Whether there is a trace of that name that was closed later than the journal was written to,
    or the journal tells of nothing: then the one that it is of had only begun to take the place of
    an older one."""
    paths = (target, target.with_name(target.name + INDEX_SUFFIX))
    closed = [path.stat().st_mtime_ns for path in paths if path.exists()]
    return bool(closed) and (
        max(closed) >= journal.stat().st_mtime_ns or not tells_of_tensors(journal)
    )
