"""Points of many dimensions as points of two, over steps, so that pictures of one step after the other do not jump."""

import struct
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from torchlens.monitoring.frames import Frame, frame_bytes, read_frames

__all__ = ["PrincipalComponents", "ProjectedStep", "projection_path", "projections_in", "read_projection"]

_KIND = 1
_HEADER = struct.Struct("<qIBf")  # step, points, dimensions, the share of the variance that they show
_ENDING = ".points"
ProjectedStep = tuple[int, np.ndarray, float]


class PrincipalComponents:
    """A job that projects each array, one row a point, onto two directions.

    options: `basis` 'fixed' keeps the directions in which the first array varies most; 'aligned' finds them anew for each
    array and turns them so that its points lie as near as they can to those of the array before.
    """

    def __init__(self, folder: Path, name: str, options: dict[str, Any]) -> None:
        self._path = projection_path(folder, name)
        self._is_fixed = options.get("basis", "aligned") == "fixed"
        self._basis: np.ndarray | None = None
        self._mean: np.ndarray | None = None
        self._last: np.ndarray | None = None

    def add(self, step: int, array: np.ndarray) -> None:
        """Projects it, and writes the points to a file."""
        points = array.reshape(len(array), -1).astype(np.float64)
        points = np.nan_to_num(points, nan=0.0, posinf=0.0, neginf=0.0)
        if self._basis is None or not self._is_fixed or points.shape[1] != len(self._basis):
            self._mean = points.mean(0)
            self._basis = _directions(points - self._mean)
        assert self._mean is not None
        centred = points - self._mean
        found = centred @ self._basis
        if not self._is_fixed and self._last is not None and self._last.shape == found.shape:
            # The rotation (or reflection) that brings them nearest: orthogonal Procrustes.
            left, _, right = np.linalg.svd(found.T @ self._last)
            self._basis = self._basis @ (left @ right)
            found = centred @ self._basis
        self._last = found
        total = float((centred**2).sum())
        share = float((found**2).sum()) / total if total else 1.0
        payload = _HEADER.pack(step, len(found), found.shape[1], share) + found.astype("<f4").tobytes()
        with self._path.open("ab") as file:
            file.write(frame_bytes(_KIND, payload))

    def finish(self) -> None:
        """Everything is written already."""


def _directions(centred: np.ndarray) -> np.ndarray:
    """Two orthonormal directions, those of most variance; their signs as their largest entries have them."""
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
            points = np.frombuffer(frame.payload, "<f4", count * width, _HEADER.size).reshape(count, width)
            found.append((step, points, share))
    return found
