"""Points of many dimensions as points of two, over steps, so that pictures of one step after the
other do not jump.
"""

import struct
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

import numpy as np

from torchlens._monitor.films.tsne import WarmTSNE
from torchlens._monitor.store.frames import Frame, frame_bytes, read_frames

_KIND = 1
_HEADER = struct.Struct(
    "<qIBf"
)  # step, points, dimensions, the share of the variance that they show
_ENDING = ".points"
ProjectedStep = tuple[int, np.ndarray, float]


class Projector(Protocol):
    """Projects one array after the other, one row a point."""

    def project(self, array: np.ndarray) -> tuple[np.ndarray, float]:
        """The points, and the share of the variance that they show (NaN if that means nothing)."""


class PrincipalComponents:
    """Projects onto two directions.

    is_fixed: the directions are those in which the first array varies most. Otherwise they are
    found anew for each array and turned so that its points lie as near as they can to those of the
    array before; or, where rows stand for others than before (another batch), so that the
    directions do.
    """

    def __init__(self, is_fixed: bool) -> None:
        self._is_fixed = is_fixed
        self._basis: np.ndarray | None = None
        self._mean: np.ndarray | None = None
        self._last: np.ndarray | None = None

    def project(self, array: np.ndarray) -> tuple[np.ndarray, float]:
        """The points, and the share of the variance that they show."""
        points = _rows_of(array)
        last_basis = self._basis
        if last_basis is None or not self._is_fixed or points.shape[1] != len(last_basis):
            self._mean = points.mean(0)
            self._basis = _directions(points - self._mean)
        assert self._mean is not None
        assert self._basis is not None
        centred = points - self._mean
        found = centred @ self._basis
        if not self._is_fixed and last_basis is not None and len(last_basis) == len(self._basis):
            self._basis = self._basis @ self._turn(found, last_basis)
            found = centred @ self._basis
        self._last = found
        total = float((centred**2).sum())
        return found, float((found**2).sum()) / total if total else 1.0

    def _turn(self, found: np.ndarray, last_basis: np.ndarray) -> np.ndarray:
        """How the new points are turned. Rows that stand for others than before are told by lying
        nowhere near them.
        """
        assert self._basis is not None
        if self._last is not None and self._last.shape == found.shape:
            turn = _turn(found, self._last)
            if ((found @ turn - self._last) ** 2).sum() < 0.5 * (self._last**2).sum():
                return turn
        return _turn(self._basis, last_basis)


class NeighbourEmbedding:
    """Projects by t-SNE, each array beginning where the last one ended."""

    def __init__(self) -> None:
        self._tsne = WarmTSNE()

    def project(self, array: np.ndarray) -> tuple[np.ndarray, float]:
        """The points; they show no share of the variance."""
        return self._tsne.project(_rows_of(array)), float("nan")


class PointsJob:
    """The worker's job that projects arrays and writes the points to a file. options: `method`,
    `basis`.
    """

    def __init__(self, folder: Path, name: str, options: dict[str, Any]) -> None:
        self._path = projection_path(folder, name)
        is_fixed = options.get("basis", "aligned") == "fixed"
        self._projector: Projector = (
            NeighbourEmbedding()
            if options.get("method") == "tsne"
            else PrincipalComponents(is_fixed)
        )

    def add(self, step: int, array: np.ndarray) -> None:
        """Projects it, and writes the points to the file."""
        found, share = self._projector.project(array)
        payload = (
            _HEADER.pack(step, len(found), found.shape[1], share) + found.astype("<f4").tobytes()
        )
        with self._path.open("ab") as file:
            file.write(frame_bytes(_KIND, payload))

    def finish(self) -> None:
        """Everything is written already."""


def _rows_of(array: np.ndarray) -> np.ndarray:
    """One row a point, of finite numbers."""
    points = array.reshape(len(array), -1).astype(np.float64)
    return np.nan_to_num(points, nan=0.0, posinf=0.0, neginf=0.0)


def _turn(points: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """The rotation (or reflection) that brings points nearest to others: orthogonal Procrustes."""
    left, _, right = np.linalg.svd(points.T @ goal)
    found: np.ndarray = left @ right
    return found


def _directions(centred: np.ndarray) -> np.ndarray:
    """Two orthonormal directions, those of most variance; their signs as their largest entries have
    them.
    """
    width = centred.shape[1]
    if len(centred) < 2 or width < 2:
        found = np.eye(width, 2)
    else:
        _, _, right = np.linalg.svd(centred, full_matrices=False)
        found = np.zeros((width, 2))
        found[:, : min(2, len(right))] = right[:2].T
    largest = found[np.abs(found).argmax(0), [0, 1]]
    return found * np.where(largest < 0, -1.0, 1.0)


def projection_path(folder: Path, name: str) -> Path:
    """Where the points under a name are written, whatever characters it has."""
    return folder / f"{quote(name, safe='')}{_ENDING}"


def projections_in(folder: Path) -> list[str]:
    """The names under which points were written."""
    return sorted(unquote(path.name.removesuffix(_ENDING)) for path in folder.glob(f"*{_ENDING}"))


def read_projection(folder: Path, name: str) -> list[ProjectedStep]:
    """(step, points, share of the variance) for each step, as far as the file is good."""
    found = []
    for frame in read_frames(projection_path(folder, name).read_bytes()):
        if not isinstance(frame, Frame) or frame.kind != _KIND or len(frame.payload) < _HEADER.size:
            continue
        step, count, width, share = _HEADER.unpack_from(frame.payload)
        if len(frame.payload) == _HEADER.size + 4 * count * width:
            points = np.frombuffer(frame.payload, "<f4", count * width, _HEADER.size).reshape(
                count, width
            )
            found.append((step, points, share))
    return found
