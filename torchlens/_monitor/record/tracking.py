"""What is followed tensor by tensor: for which module or watched tensor, how often, how long, and
for what.
"""

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeAlias, get_args

from torchlens._monitor.films.pictures import shown_as
from torchlens._text.wording import check_choice, check_count, checked_file, did_you_mean, got

Basis: TypeAlias = Literal["aligned", "fixed"]
Method: TypeAlias = Literal["pca", "tsne"]
Show: TypeAlias = Literal["auto", "images", "histogram", "pca", "tsne"]


class Track:
    """Follows what modules return, or tensors that are watched, from step to step. Can be paused,
    resumed and stopped.

    >>> film = run.video('layer1', 'layer1.mp4', every=10, seconds=60)
    >>> film.pause(); film.resume(); film.stop()
    """

    def __init__(
        self, job: str, options: dict[str, dict[str, Any]], rows: int, every: int,
        seconds: float | None,
        step_of: Callable[[], int],
    ) -> None:  # fmt: skip
        check_count("rows", rows, 1, "the first so many of a tensor")
        check_count("every", every, 1, "1 takes every recorded step")
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0
        ):
            raise ValueError(
                f"seconds must be a number above 0, or None for no limit, got {got(seconds)}."
            )
        self.job = job
        self.options = options  # of the job, by address
        self.rows = rows
        self.num_taken = 0
        self._every = every
        self._end = None if seconds is None else monotonic() + seconds
        self._step_of = step_of
        self._last: dict[str, int] = {}
        self._is_on, self._is_stopped = True, False

    @property
    def is_on(self) -> bool:
        """Whether it takes what comes."""
        return (
            self._is_on and not self._is_stopped and (self._end is None or monotonic() < self._end)
        )

    def pause(self) -> None:
        """Takes nothing until `resume`."""
        self._is_on = False

    def resume(self) -> None:
        """Goes on."""
        self._is_on = True

    def stop(self) -> None:
        """Takes nothing any more."""
        self._is_stopped = True

    def takes(self, address: str) -> bool:
        """Whether what comes now is wanted; of several calls in a step, the first is."""
        step = self._step_of()
        if not self.is_on or step - self._last.get(address, -self._every) < self._every:
            return False
        self._last[address] = step
        self.num_taken += 1
        return True

    def rows_of(self, address: str, shape: Sequence[int]) -> int:
        """How many rows of a tensor are wanted: of images, the channels of the first are shown (see
        pictures.py).
        """
        show = self.options[address].get("show")
        how = shown_as(shape) if show == "auto" else show
        return 1 if how == "images" and len(shape) >= 4 else self.rows

    def __repr__(self) -> str:
        state = "stopped" if self._is_stopped else "on" if self.is_on else "off"
        return (
            f"<Track {self.job} of {', '.join(map(repr, self.options)) or 'nothing'}: {state}, "
            f"{self.num_taken} taken>"
        )


def all_tracks(tracks: Mapping[str, Mapping[str, list[Track]]]) -> list[Track]:
    """Each once, of all that follow something, by what and by address."""
    by_address = (own for each in tracks.values() for own in each.values())
    return list({id(each): each for own in by_address for each in own}.values())


def unseen_names(tracks: Iterable[Track], known: Iterable[str]) -> list[str]:
    """Sentences about names that nothing came under: they may be mistaken."""
    found, addresses = [], set(known)
    for track in tracks:
        if not track.num_taken and not addresses.issuperset(track.options):
            name = next(each for each in track.options if each not in addresses)
            hint = did_you_mean(name, addresses)
            found.append(
                f"Nothing was seen of {name!r}: no module has this address, nor was it watched. "
                f"{hint}".rstrip()
            )
    return found


def embed_options(
    address: Any, known: Iterable[str], method: Any, basis: Any, name: Any, tracks: Iterable[Track]
) -> dict[str, dict[str, Any]]:
    """The options of the job that projects, by address, after seeing that they make sense."""
    check_choice("method", method, get_args(Method))
    check_choice("basis", basis, get_args(Basis))
    found = matching(address, known)
    if name is not None and len(found) > 1:
        raise ValueError(
            f"name must be None for several modules: each has its address, got {got(name)}."
        )
    used = {own.get("name") for track in tracks for own in track.options.values()}
    options = {each: {"name": name or each, "method": method, "basis": basis} for each in found}
    for own in options.values():
        if own["name"] in used:
            raise ValueError(
                f"{own['name']!r} is embedded already: say name=, such as '{own['name']} {method}'."
            )
    return options


def matching(address: Any, known: Iterable[str]) -> list[str]:
    """The addresses that are meant: with '*' all that match; otherwise the one, which may be that
    of a watched tensor.
    """
    if not isinstance(address, str):
        raise TypeError(
            "address must be that of a module, such as 'layer1', or a pattern, 'layer1.*', got "
            f"{got(address)}."
        )
    if "*" not in address:
        return [address]
    pattern = re.escape(address).replace(r"\*", ".*")
    found = [each for each in known if re.fullmatch(pattern, each)]
    if not found:
        raise ValueError(
            f"No module has an address like {address!r}. {did_you_mean(address, known)}".rstrip()
        )
    return found


def video_options(
    address: Any,
    path: Any,
    known: Iterable[str],
    show: Any,
    fps: Any,
    size: Any,
    basis: Any,
    is_resumed: bool,
) -> dict[str, dict[str, Any]]:
    """The options of the job that makes videos, by address, after seeing that they make sense."""
    check_choice("show", show, get_args(Show))
    check_choice("basis", basis, get_args(Basis))
    check_count("fps", fps, 1, "pictures a second")
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise TypeError(f"size must be (width, height), such as (640, 480), got {got(size)}.")
    for name, length in zip(("width", "height"), size, strict=True):
        check_count(name, length, 64, "in pixels")
    if importlib.util.find_spec("av") is None:
        raise ImportError(
            "PyAV, which writes videos, is not installed. Run: pip install 'torchlens[video]'."
        )
    addresses = matching(address, known)
    if len(addresses) > 1 and "{module}" not in str(path):
        raise ValueError(
            f"path must have {{module}} in it for several modules, as in 'videos/{{module}}.mp4', "
            f"got {got(path)}."
        )
    width, height = (int(each) // 2 * 2 for each in size)  # videos have even sides
    return {
        each: {
            "path": _path(path, each, is_resumed), "show": show, "fps": int(fps), "width": width,
            "height": height,
            "basis": basis,
        }
        for each in addresses
    }  # fmt: skip


def _path(path: Any, address: str, is_resumed: bool) -> str:
    """Where a video goes. A run that goes on does not write over what was filmed before: it begins
    'layer1-2.mp4'.
    """
    target = checked_file(
        "path", str(path).replace("{module}", address or "model"), "layer1.mp4"
    ).absolute()
    if target.suffix.lower() not in (".mp4", ".m4v", ".mov"):
        raise ValueError(f"path must end in .mp4, got {got(str(path))}.")
    number, found = 2, target
    while is_resumed and found.exists():
        found = Path(target.with_name(f"{target.stem}-{number}{target.suffix}"))
        number += 1
    return str(found)
