"""A file that is written is there whole: on a full disk, the one before stays as it was."""

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._structure.structure_file import write_structure
from torchlens._text.whole_files import whole_file, write_whole

WRITERS: dict[str, Callable[[tl.ModelHistory, Path], Any]] = {
    "page.html": lambda history, path: history.explore(path),
    "graph.json": lambda history, path: history.to_json(path),
    "graph.gv": lambda history, path: history.render_graph(vis_opt="unrolled").save(path),
    "structure.json": write_structure,
    "table.parquet": lambda history, path: history.to_parquet(path),
    "edits.safetensors": lambda _, path: tl.edits.save({"linear_1": torch.zeros(64)}, path),
}


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may be longer than 100 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_file_before_and_nothing_beside_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    history = tl.get_model_metadata(nn.Linear(2, 2), torch.ones(1, 2))
    write, path = WRITERS[name], tmp_path / name
    write(history, path)
    whole = path.read_bytes()
    files = set(tmp_path.iterdir())
    with full_disk(), pytest.raises(Exception, match="File too large"):
        write(history, path)
    assert path.read_bytes() == whole
    assert set(tmp_path.iterdir()) == files


def test_a_link_leads_to_the_file_that_is_written_and_a_device_is_not_replaced(
    tmp_path: Path,
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    with whole_file(Path("/dev/null")) as beside:
        assert beside == Path("/dev/null")


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with whole_file(tmp_path / "new" / "file") as beside:
            beside.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list((tmp_path / "new").iterdir()) == []
