"""Which tensors `run.embed` and `run.video` follow."""

import importlib.util
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeAlias, get_args

import torch

from torchlens._monitor.films.film_process import shown_as
from torchlens._monitor.films.film_worker import Capture, FilmWorker
from torchlens._recording.wrappers import local_value, why_valueless
from torchlens._text.error_wording import (
    check_choice,
    check_count,
    check_seconds,
    checked_file,
    did_you_mean,
    got,
)

Basis: TypeAlias = Literal["aligned", "fixed"]
Method: TypeAlias = Literal["pca", "tsne"]
Show: TypeAlias = Literal["auto", "images", "histogram", "pca", "tsne"]

# The most elements of a copy.
_MOST_ELEMENTS = 1 << 20
# Packages that the film process needs: the extra that installs each, and what it is for.
_PACKAGES = {
    "av": ("video", "PyAV, which writes videos,"),
    "PIL": ("video", "Pillow, which writes the step into videos,"),
    "sklearn": ("tsne", "scikit-learn, which computes t-SNE,"),
}


class Track:
    """Follows outputs of modules, or watched tensors, from step to step.

    >>> film = run.video('layer1', 'layer1.mp4', every=10, seconds=60)
    >>> film.pause(); film.resume(); film.stop()
    """

    def __init__(
        self,
        job: str,
        options: dict[str, dict[str, Any]],
        rows: int,
        every: int,
        seconds: float | None,
    ) -> None:
        check_count("rows", rows, 1, "the first so many of a tensor")
        check_count("every", every, 1, "1 takes every recorded step")
        check_seconds(seconds)
        self.job = job
        self.options = options  # of the job, by address
        self.rows = rows
        self.num_taken = 0
        self._every = every
        self._end = None if seconds is None else monotonic() + seconds
        self._last: dict[str, int] = {}
        self._is_on, self._is_stopped = True, False

    @property
    def is_on(self) -> bool:
        """True while it takes tensors."""
        is_in_time = self._end is None or monotonic() < self._end
        return self._is_on and not self._is_stopped and is_in_time

    def pause(self) -> None:
        """Takes nothing until `resume`."""
        self._is_on = False

    def resume(self) -> None:
        """Takes tensors again."""
        self._is_on = True

    def stop(self) -> None:
        """Ends it."""
        self._is_stopped = True

    def takes(self, address: str, step: int) -> bool:
        """True if the tensor of this call is due: the first call in every n-th recorded step."""
        if not self.is_on or step - self._last.get(address, -self._every) < self._every:
            return False
        self._last[address] = step
        self.num_taken += 1
        return True

    def first_rows(self, address: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy of the rows that are shown; None if the tensor cannot be shown. Of a batch of
        images, only the first is shown.
        """
        own = local_value(tensor)
        is_dense = own.is_floating_point() and own.layout is torch.strided and own.dim() > 0
        if not is_dense or why_valueless(own) is not None:
            return None
        show = self.options[address].get("show")
        how = shown_as(own.shape) if show == "auto" else show
        num_rows = 1 if how == "images" and own.dim() >= 4 else self.rows
        part = own.detach()[:num_rows].to(torch.float32, copy=True)
        if part.numel() > _MOST_ELEMENTS:
            part = part[: max(_MOST_ELEMENTS // max(part[0].numel(), 1), 1)]
        return part

    def __repr__(self) -> str:
        state = "stopped" if self._is_stopped else "on" if self.is_on else "off"
        names = ", ".join(map(repr, self.options)) or "nothing"
        return f"<Track {self.job} of {names}: {state}, {self.num_taken} taken>"


class Films:
    """All tracks of a run, and the worker that they send copies to. `step_of` gives the running
    step.
    """

    def __init__(self, worker: FilmWorker, step_of: Callable[[], int]) -> None:
        self.tracks: list[Track] = []
        self.worker = worker
        self._step_of = step_of
        # By address of a module or name of a watched tensor.
        self.outputs: dict[str, list[Track]] = {}
        self.gradients: dict[str, list[Track]] = {}

    def add(self, track: Track, what: Literal["outputs", "gradients"]) -> None:
        """Follows what the track's addresses return, or its gradient."""
        self.tracks.append(track)
        by_address = self.outputs if what == "outputs" else self.gradients
        for address in track.options:
            by_address.setdefault(address, []).append(track)

    def capture(
        self, by_address: dict[str, list[Track]], address: str, tensor: torch.Tensor
    ) -> None:
        """Sends a copy of the first rows of a tensor for each track that follows it. Call it under
        `call_unseen`.
        """
        step = self._step_of()
        for track in by_address.get(address, ()):
            part = track.first_rows(address, tensor) if track.takes(address, step) else None
            if part is not None:
                options = track.options[address]
                name = options.get("path") or options.get("name") or address
                self.worker.offer(step, Capture(track.job, name, options, part))

    def unseen(self, known: Iterable[str]) -> list[str]:
        """A sentence for each name that never occurred: it may be mistyped."""
        found, addresses = [], set(known)
        for track in self.tracks:
            if not track.num_taken and not addresses.issuperset(track.options):
                name = next(each for each in track.options if each not in addresses)
                hint = did_you_mean(name, addresses)
                found.append(
                    f"Nothing was seen of {name!r}: no module has this address, nor was it "
                    f"watched. {hint}".rstrip()
                )
        return found


def embed_options(
    address: Any, known: Iterable[str], method: Any, basis: Any, name: Any, tracks: Iterable[Track]
) -> dict[str, dict[str, Any]]:
    """The options of the job 'points' by address, checked."""
    check_choice("method", method, get_args(Method))
    check_choice("basis", basis, get_args(Basis))
    found = _matching(address, known)
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
    if method == "tsne":
        _check_installed("sklearn")
    return options


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
    """The options of the job 'video' by address, checked."""
    check_choice("show", show, get_args(Show))
    check_choice("basis", basis, get_args(Basis))
    check_count("fps", fps, 1, "pictures a second")
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise TypeError(f"size must be (width, height), such as (640, 480), got {got(size)}.")
    for name, length in zip(("width", "height"), size, strict=True):
        check_count(name, length, 64, "in pixels")
    _check_installed("av", "PIL", *(["sklearn"] if show == "tsne" else []))
    addresses = _matching(address, known)
    if len(addresses) > 1 and "{module}" not in str(path):
        raise ValueError(
            f"path must have {{module}} in it for several modules, as in 'videos/{{module}}.mp4', "
            f"got {got(path)}."
        )
    width, height = (int(each) // 2 * 2 for each in size)  # videos have even sides
    shared = {"show": show, "fps": int(fps), "width": width, "height": height, "basis": basis}
    return {each: {"path": _path(path, each, is_resumed), **shared} for each in addresses}


def _check_installed(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            extra, what = _PACKAGES[package]
            raise ImportError(
                f"{what} is not installed. Run: pip install 'torchlens[{extra}]'.", name=package
            )


def _matching(address: Any, known: Iterable[str]) -> list[str]:
    """The addresses that match a pattern with '*'; otherwise the address, or name, itself."""
    if not isinstance(address, str):
        raise TypeError(
            "address must be that of a module, such as 'layer1', or a pattern, 'layer1.*', got "
            f"{got(address)}."
        )
    if "*" not in address:
        return [address]
    found = [each for each in known if fnmatchcase(each, address)]
    if not found:
        raise ValueError(
            f"No module has an address like {address!r}. {did_you_mean(address, known)}".rstrip()
        )
    return found


def _path(path: Any, address: str, is_resumed: bool) -> str:
    """The file of a video. A resumed run keeps earlier videos: it starts 'layer1-2.mp4'."""
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
