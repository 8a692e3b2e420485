"""The process that draws: projects tensors to points, paints pictures, encodes videos.

`film_worker.py` starts this file as a script, by its path: the process imports numpy, and av and
scikit-learn when it needs them, but neither torch nor the rest of torchlens. Standard input
carries pickled requests `(job, name, options, step, array)`, and None at the end; standard output
a pickled answer to each: "" or the sentence that describes a failure.
"""

import base64
import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

import numpy as np

ProjectedStep = tuple[int, np.ndarray, float]  # step, points, share of the variance that they show

# -- projections -----------------------------------------------------------------------------------


class Projector(Protocol):
    """Projects one array after the other to two dimensions, one row a point."""

    def project(self, array: np.ndarray) -> tuple[np.ndarray, float]:
        """The points, and the share of the variance that they show (NaN if that has no meaning)."""


class PrincipalComponents:
    """Projects onto two directions.

    is_fixed: keep the two directions of most variance of the first array. Otherwise, compute them
    for each array, and rotate them so that they lie as near as possible to the last ones.
    """

    def __init__(self, is_fixed: bool) -> None:
        self._is_fixed = is_fixed
        self._basis: np.ndarray | None = None
        self._mean: np.ndarray | None = None

    def project(self, array: np.ndarray) -> tuple[np.ndarray, float]:
        """The points, and the share of the variance that they show."""
        points = _rows_of(array)
        last_basis = self._basis
        if last_basis is None or not self._is_fixed or points.shape[1] != len(last_basis):
            self._mean = points.mean(0)
            self._basis = _directions(points - self._mean)
        assert self._mean is not None
        assert self._basis is not None
        if not self._is_fixed and last_basis is not None and len(last_basis) == len(self._basis):
            self._basis = self._basis @ _procrustes(self._basis, last_basis)
        centred = points - self._mean
        found = centred @ self._basis
        total = float((centred**2).sum())
        return found, float((found**2).sum()) / total if total else 1.0


class NeighbourEmbedding:
    """Projects by the t-SNE of scikit-learn, which starts from the result of the last array."""

    def __init__(self) -> None:
        self._features: np.ndarray | None = None
        self._points = np.zeros((0, 2))

    def project(self, array: np.ndarray) -> tuple[np.ndarray, float]:
        """The points; they show no share of the variance."""
        from sklearn.manifold import TSNE

        features = _rows_of(array)
        count = len(features)
        if count < 4:
            return np.zeros((count, 2)), float("nan")
        is_first = self._features is None or self._features.shape[1] != features.shape[1]
        start = _small_principal(features) if is_first else self._from_neighbours(features)
        tsne = TSNE(
            init=start.astype(np.float32),
            perplexity=min(30.0, (count - 1) / 3),
            early_exaggeration=12.0 if is_first else 1.0,
            learning_rate=max(count / 48, 50.0),
            max_iter=750 if is_first else 250,
            random_state=0,
        )
        points = tsne.fit_transform(features).astype(np.float64)
        if not is_first:
            centre = start.mean(0)
            points = points - points.mean(0)
            points = points @ _procrustes(points, start - centre) + centre
        self._features, self._points = features, points
        return points, float("nan")

    def _from_neighbours(self, features: np.ndarray) -> np.ndarray:
        """Starts each point at the weighted mean of the last points of the three rows most
        similar to its own.
        """
        from sklearn.neighbors import NearestNeighbors

        assert self._features is not None
        index = NearestNeighbors(n_neighbors=min(3, len(self._features))).fit(self._features)
        distances, nearest = index.kneighbors(features)
        spread = ((self._features - self._features.mean(0)) ** 2).sum(1).mean()
        weights = 1 / (distances**2 + 1e-6 * spread + 1e-12)
        weights /= weights.sum(1, keepdims=True)
        found: np.ndarray = np.einsum("ij,ijk->ik", weights, self._points[nearest])
        return found


def projector_of(method: str, basis: str) -> Projector:
    """The projector for 'pca' (with a basis that is 'aligned' or 'fixed') or 'tsne'."""
    return NeighbourEmbedding() if method == "tsne" else PrincipalComponents(basis == "fixed")


def _rows_of(array: np.ndarray) -> np.ndarray:
    """One row a point, of finite numbers."""
    points = array.reshape(len(array), -1).astype(np.float64)
    return np.nan_to_num(points, nan=0.0, posinf=0.0, neginf=0.0)


def _procrustes(points: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """The rotation (or reflection) that brings points nearest to others."""
    left, _, right = np.linalg.svd(points.T @ goal)
    found: np.ndarray = left @ right
    return found


def _directions(centred: np.ndarray) -> np.ndarray:
    """Two orthonormal directions of most variance; the largest entry of each is positive."""
    width = centred.shape[1]
    if len(centred) < 2 or width < 2:
        found = np.eye(width, 2)
    else:
        _, _, right = np.linalg.svd(centred, full_matrices=False)
        found = np.zeros((width, 2))
        found[:, : min(2, len(right))] = right[:2].T
    largest = found[np.abs(found).argmax(0), [0, 1]]
    return found * np.where(largest < 0, -1.0, 1.0)


def _small_principal(features: np.ndarray) -> np.ndarray:
    """Principal components, scaled down as the start of t-SNE; distinct even if all rows are
    equal.
    """
    centred = features - features.mean(0)
    found = centred @ _directions(centred)
    spread = found[:, 0].std()
    if spread:
        return found / spread * 1e-2
    return np.stack([np.arange(len(found)), np.zeros(len(found))], 1) * 1e-4


# -- the file of a projection ----------------------------------------------------------------------

_ENDING = ".points"


class Points:
    """Projects arrays and appends the points to a file, a line of JSON for each step.

    options: `method`, `basis`.
    """

    def __init__(self, folder: Path, name: str, options: dict[str, Any]) -> None:
        self._path = projection_path(folder, name)
        self._projector = projector_of(options["method"], options["basis"])

    def add(self, step: int, array: np.ndarray) -> None:
        """Projects an array and writes its points."""
        found, share = self._projector.project(array)
        data = base64.b64encode(found.astype("<f4").tobytes()).decode()
        line = {"step": step, "share": None if np.isnan(share) else share, "points": data}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def finish(self) -> None:
        """Does nothing: every step is written when it is projected."""


def projection_path(folder: Path, name: str) -> Path:
    """The file of the points under a name, whatever characters it has."""
    return folder / f"{quote(name, safe='')}{_ENDING}"


def projections_in(folder: Path) -> list[str]:
    """The names under which points were written."""
    return sorted(
        unquote(path.name.removesuffix(_ENDING))
        for path in folder.glob(f"*{_ENDING}")
        if path.is_file() and not path.is_symlink()
    )


def read_projection(folder: Path, name: str) -> list[ProjectedStep]:
    """The points of each step. Lines that cannot be read (the last may be torn) are left out."""
    found = []
    with projection_path(folder, name).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
                points = np.frombuffer(base64.b64decode(row["points"]), "<f4").reshape(-1, 2)
                share = float("nan") if row["share"] is None else float(row["share"])
                found.append((int(row["step"]), points, share))
            except (ValueError, KeyError, TypeError):
                continue
    return found


# -- pictures --------------------------------------------------------------------------------------

_BACKGROUND, _INK, _BAR = (18, 18, 24), (235, 235, 235), (96, 165, 250)
_NON_FINITE = (255, 0, 160)
_MOST_TILES = 64
_NUM_BARS = 64
_CAPTION = 24  # the height of the line with the step and the range
_SCALE_WIDTH = 64
# From dark to bright: viridis, at nine places.
_ANCHORS = [
    *((68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141)),
    *((39, 173, 129), (92, 200, 99), (170, 220, 50), (253, 231, 37)),
]
_COLOURS = np.stack(
    [np.interp(np.linspace(0, 8, 256), np.arange(9), each) for each in np.array(_ANCHORS).T], 1
).astype(np.uint8)


def shown_as(shape: Sequence[int]) -> str:
    """How show='auto' shows an array: as images if it has two dimensions."""
    return "images" if len(shape) >= 2 and min(shape[-2:]) > 1 else "histogram"


class Painter:
    """Paints arrays as 'images', 'histogram' or 'points' (arrays of two columns).

    A painter keeps the range of everything that it has painted and only ever widens it, so that
    colours and places mean the same in each picture, and a film does not flicker.
    """

    def __init__(self, how: str, width: int, height: int) -> None:
        paint: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
            "images": self._images,
            "histogram": self._histogram,
            "points": self._points,
        }
        self._how, self._paint = how, paint[how]
        self._width, self._height = width, height
        self._low: np.ndarray | None = None
        self._high: np.ndarray | None = None

    def picture(self, step: int, array: np.ndarray) -> np.ndarray:
        """The picture (height, width, RGB) of an array, under the step and the range."""
        found = np.full((self._height, self._width, 3), _BACKGROUND, np.uint8)
        self._paint(np.asarray(array, np.float64), found[_CAPTION:])
        found[:_CAPTION] = self._caption(step)
        return found

    def _caption(self, step: int) -> np.ndarray:
        """The step, and the numbers at both ends of the colours or bars if there is space."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (self._width, _CAPTION), _BACKGROUND)
        draw = ImageDraw.Draw(image)
        draw.text((6, 6), f"step {step}", _INK)
        if self._low is None or self._high is None or self._how == "points":
            return np.asarray(image)
        low, high = f"{float(self._low):.3g}", f"{float(self._high):.3g}"
        right = self._width - 12 - draw.textlength(high)
        left = int(right) - _SCALE_WIDTH
        start = left - 6 - draw.textlength(low)
        if start < 12 + draw.textlength(f"step {step}"):
            return np.asarray(image)
        draw.text((start, 6), low, _INK)
        draw.text((right + 6, 6), high, _INK)
        found = np.array(image)
        is_shaded = self._how == "images"
        shades = _COLOURS[np.linspace(0, 255, _SCALE_WIDTH).astype(int)] if is_shaded else _BAR
        found[7:17, left : left + _SCALE_WIDTH] = shades
        return found

    def _widen(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The range of everything painted so far, by column. `values` are finite."""
        if len(values):
            low, high = values.min(0), values.max(0)
            self._low = low if self._low is None else np.minimum(self._low, low)
            self._high = high if self._high is None else np.maximum(self._high, high)
        if self._low is None or self._high is None:
            return np.zeros(values.shape[1:]), np.ones(values.shape[1:])
        return self._low, np.where(self._high > self._low, self._high, self._low + 1)

    def _images(self, array: np.ndarray, canvas: np.ndarray) -> None:
        tiles = _tiles(array)
        low, high = self._widen(tiles[np.isfinite(tiles)])
        rows, columns = _grid(len(tiles), tiles.shape[1:], canvas.shape[:2])
        height, width = canvas.shape[0] // rows, canvas.shape[1] // columns
        gap = 2 if len(tiles) > 1 and min(height, width) > 8 else 0
        down = np.arange(height - gap) * tiles.shape[1] // (height - gap)
        across = np.arange(width - gap) * tiles.shape[2] // (width - gap)
        for number, tile in enumerate(tiles):
            shown = tile[np.ix_(down, across)]
            is_finite = np.isfinite(shown)
            level = (np.where(is_finite, shown, low) - low) / (high - low)
            coloured = _COLOURS[np.clip(level * 255, 0, 255).astype(np.uint8)]
            coloured[~is_finite] = _NON_FINITE
            top, left = number // columns * height, number % columns * width
            canvas[top : top + height - gap, left : left + width - gap] = coloured

    def _histogram(self, array: np.ndarray, canvas: np.ndarray) -> None:
        values = array[np.isfinite(array)]
        low, high = (float(each) for each in self._widen(values))
        counts, _ = np.histogram(values, _NUM_BARS, (low, high))
        height, width = canvas.shape[:2]
        tallest = max(int(counts.max(initial=0)), 1)
        edges = np.linspace(0, width, _NUM_BARS + 1).astype(int)
        for number, count in enumerate(counts.tolist()):
            top = height - round(count / tallest * (height - 4))
            canvas[top:, edges[number] : max(edges[number + 1] - 1, edges[number] + 1)] = _BAR
        if low < 0 < high:
            canvas[::4, int(-low / (high - low) * (width - 1))] = _INK

    def _points(self, array: np.ndarray, canvas: np.ndarray) -> None:
        is_finite = np.isfinite(array).all(1)
        low, high = self._widen(array[is_finite])
        height, width = canvas.shape[:2]
        margin, radius = 0.05, max(min(height, width) // 120, 2)
        shares = margin + (1 - 2 * margin) * (array - low) / (high - low)
        discs = np.mgrid[-radius : radius + 1, -radius : radius + 1]
        down, across = (each[(discs**2).sum(0) <= radius**2] for each in discs)
        for number in np.flatnonzero(is_finite):
            x, y = shares[number, 0] * (width - 1), (1 - shares[number, 1]) * (height - 1)
            rows = np.clip(down + int(y), 0, height - 1)
            columns = np.clip(across + int(x), 0, width - 1)
            canvas[rows, columns] = _COLOURS[int(number * 255 / max(len(array) - 1, 1))]


def _tiles(array: np.ndarray) -> np.ndarray:
    """Images side by side: the channels of the first example; a matrix is one tile."""
    while array.ndim > 3:
        array = array[0]
    if array.ndim < 2:
        array = array.reshape(1, -1)
    return (array[None] if array.ndim == 2 else array)[:_MOST_TILES]


def _grid(count: int, tile: Sequence[int], canvas: Sequence[int]) -> tuple[int, int]:
    """Rows and columns that make tiles of (height, width) as large as possible on a canvas."""

    def scale(columns: int) -> float:
        rows = -(-count // columns)
        return min(canvas[0] / rows / tile[0], canvas[1] / columns / tile[1])

    columns = max(range(1, count + 1), key=scale)
    return -(-count // columns), columns


# -- videos ----------------------------------------------------------------------------------------

_CODECS = ("libx264", "libopenh264", "mpeg4")


class Video:
    """Paints each array and appends the picture to an MP4 file.

    Each picture is a fragment of its own that is written at once, so the file plays up to its last
    picture whatever happens to the process. options: `path`, `show`, `fps`, `width`, `height`,
    `basis`.
    """

    def __init__(self, folder: Path, name: str, options: dict[str, Any]) -> None:
        self._options = options
        self._show: str = options["show"]
        is_projected = self._show in ("pca", "tsne")
        self._projector = projector_of(self._show, options["basis"]) if is_projected else None
        self._painter: Painter | None = None
        self._num_pictures = 0

    def add(self, step: int, array: np.ndarray) -> None:
        """Adds a picture; the first one opens the file."""
        if self._projector is not None:
            array = self._projector.project(array)[0]
        if self._painter is None:
            show = "points" if self._projector is not None else self._show
            how = shown_as(array.shape) if show == "auto" else show
            self._painter = Painter(how, self._options["width"], self._options["height"])
            self._open()
        frame = self._frame(self._painter.picture(step, array), format="rgb24")
        frame.pts = self._num_pictures
        self._num_pictures += 1
        self._write(frame)

    def finish(self) -> None:
        """Ends the file."""
        if self._painter is not None:
            self._write(None)
            self._container.close()

    def _open(self) -> None:
        import av

        path, fps = Path(self._options["path"]), self._options["fps"]
        width, height = self._options["width"], self._options["height"]
        path.parent.mkdir(parents=True, exist_ok=True)
        # The table of contents comes first and is empty; each fragment describes itself.
        flags = "frag_every_frame+empty_moov+default_base_moof"
        options = {"movflags": flags, "flush_packets": "1"}
        self._container: Any = av.open(str(path), "w", format="mp4", options=options)
        codec = next(name for name in _CODECS if name in av.codecs_available)
        self._stream: Any = self._container.add_stream(codec, rate=fps)
        self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, "yuv420p"
        self._stream.gop_size, self._stream.max_b_frames = fps, 0
        if codec == "libx264":  # does not hold a picture back to compare it with the next
            self._stream.options = {"tune": "zerolatency", "preset": "veryfast", "crf": "18"}
        else:
            self._stream.bit_rate = width * height * fps // 4
        self._frame: Any = av.VideoFrame.from_ndarray

    def _write(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)


# -- the process -----------------------------------------------------------------------------------

_JOBS: dict[str, type[Points] | type[Video]] = {"points": Points, "video": Video}


def main(folder: Path) -> None:
    """Answers requests until None or the end of standard input. A job that fails is not tried
    again.
    """
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # so that what a library prints is not read as an answer
    if hasattr(os, "nice"):
        os.nice(10)  # lets the training have the processor first
    jobs: dict[tuple[str, str], Points | Video | None] = {}
    while (request := _next_request(requests)) is not None:
        job, name, options, step, array = request
        key, problem = (job, name), ""
        try:
            if key not in jobs:
                jobs[key] = _JOBS[job](folder, name, options)
            if (own := jobs[key]) is not None:
                own.add(step, array)
        except Exception as error:
            jobs[key] = None
            problem = f"{job} of {name!r} failed ({type(error).__name__}: {error})"
        pickle.dump(problem, answers)
        answers.flush()
    for own in jobs.values():
        if own is not None:
            own.finish()


def _next_request(requests: Any) -> Any:
    try:
        return pickle.load(requests)
    except EOFError:  # the training process is gone
        return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
