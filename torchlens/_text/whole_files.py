"""Files that are there whole, or not at all: a full disk or a kill leaves no half of one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path, makes_folder: bool = True) -> Iterator[Path]:
    """The path to write to: beside the file, which takes its place at the end. Readers find the
    whole file, or the one before. Creates the folder, unless that would bring one back that was
    removed: `makes_folder=False`.

    >>> with whole_file(path) as beside:
    ...     figure.savefig(beside)
    """
    if makes_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    target = path.resolve()  # of a link, the file that it leads to
    if target.exists() and not target.is_file():  # a device or a pipe cannot be replaced
        yield target
        return
    beside = target.with_name(f"{target.stem}.{os.getpid()}.tmp{target.suffix}")
    try:
        yield beside
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes, makes_folder: bool = True) -> None:
    """Writes a file, whole."""
    with whole_file(path, makes_folder) as beside:
        beside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
