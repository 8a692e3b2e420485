"""Arrays → pictures (height, width, RGB): activations as images, histograms, points. On numpy
alone: the worker paints.

A painter keeps the range that its pictures have shown so far, and only ever widens it: colours and
places mean the same from one picture to the next, and a film of them does not flicker. The line
above a picture says the step and the range.
"""

from collections.abc import Callable, Sequence

import numpy as np

_BACKGROUND = np.array([18, 18, 24], np.uint8)
_INK = np.array([235, 235, 235], np.uint8)
_BAR = np.array([96, 165, 250], np.uint8)
_STRANGE = np.array([255, 0, 160], np.uint8)  # NaN and Inf
_MOST_TILES = 64
_NUM_BARS = 64
_CAPTION = 24  # the height of the line that says the step and the range
_SCALE_WIDTH = 64
# From dark to bright (viridis, at nine places).
_ANCHORS = np.array(
    [
        (68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141), (39, 173, 129),
        (92, 200, 99),
        (170, 220, 50), (253, 231, 37),
    ],
    np.float64,
)  # fmt: skip
_COLOURS = np.stack(
    [np.interp(np.linspace(0, 8, 256), np.arange(9), each) for each in _ANCHORS.T], 1
).astype(np.uint8)
# Three by five, a row of bits for each line.
_GLYPHS = {
    "0": (7, 5, 5, 5, 7), "1": (2, 6, 2, 2, 7), "2": (7, 1, 7, 4, 7), "3": (7, 1, 7, 1, 7), "4": (5,
    5, 7, 1, 1),
    "5": (7, 4, 7, 1, 7), "6": (7, 4, 7, 5, 7), "7": (7, 1, 1, 1, 1), "8": (7, 5, 7, 5, 7), "9": (7,
    5, 7, 1, 7),
    "s": (7, 4, 7, 1, 7), "t": (2, 7, 2, 2, 3), "e": (7, 5, 7, 4, 7), "p": (7, 5, 7, 4, 4), " ": (0,
    0, 0, 0, 0),
    "-": (0, 0, 7, 0, 0), "+": (0, 2, 7, 2, 0), ".": (0, 0, 0, 0, 2),
}  # fmt: skip

SHOWN_AS = ("images", "histogram", "points")


def shown_as(shape: Sequence[int]) -> str:
    """How an array is best shown, if nobody says: what has two dimensions is an image."""
    return "images" if len(shape) >= 2 and min(shape[-2:]) > 1 else "histogram"


class Painter:
    """Paints one array after the other. `how` is one of SHOWN_AS; points are arrays of two
    columns.
    """

    def __init__(self, how: str, width: int, height: int) -> None:
        paint: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
            "images": self._images, "histogram": self._histogram, "points": self._points,
        }  # fmt: skip
        self._paint = paint[how]
        self._has_shades = how == "images"
        self._width, self._height = width, height
        self._low: np.ndarray | None = None
        self._high: np.ndarray | None = None

    def picture(self, step: int, array: np.ndarray) -> np.ndarray:
        """The picture of an array, with the step above it."""
        found = np.empty((self._height, self._width, 3), np.uint8)
        found[:] = _BACKGROUND
        self._paint(np.asarray(array, np.float64), found[_CAPTION:])
        _write(found, 6, 7, f"step {step}")
        self._write_range(found, 6 + _text_width(f"step {step} "))
        return found

    def _write_range(self, found: np.ndarray, least: int) -> None:
        """From which number to which the colours go, or the bars; where there is room. Places of
        points mean nothing.
        """
        if self._low is None or self._high is None or self._low.ndim:
            return
        low, high = f"{float(self._low):.3g}", f"{float(self._high):.3g}"
        left = self._width - 6 - _text_width(high) - _SCALE_WIDTH - 12
        if left - _text_width(low) < least:
            return
        _write(found, left - _text_width(low), 7, low)
        shades = (
            _COLOURS[np.linspace(0, 255, _SCALE_WIDTH).astype(np.uint8)]
            if self._has_shades
            else _BAR
        )
        found[7:17, left + 6 : left + 6 + _SCALE_WIDTH] = shades
        _write(found, left + _SCALE_WIDTH + 12, 7, high)

    def _widen(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The range of all that was shown, by column. `values` are finite."""
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
        rows, columns = _grid(
            len(tiles), tiles.shape[1], tiles.shape[2], canvas.shape[0], canvas.shape[1]
        )
        height, width = canvas.shape[0] // rows, canvas.shape[1] // columns
        gap = 2 if len(tiles) > 1 and min(height, width) > 8 else 0
        down = np.arange(height - gap) * tiles.shape[1] // (height - gap)
        across = np.arange(width - gap) * tiles.shape[2] // (width - gap)
        for number, tile in enumerate(tiles):
            shown = tile[np.ix_(down, across)]
            is_real = np.isfinite(shown)
            level = np.where(is_real, (np.where(is_real, shown, 0.0) - low) / (high - low), 0.0)
            coloured = _COLOURS[np.clip(level * 255, 0, 255).astype(np.uint8)]
            coloured[~is_real] = _STRANGE
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
        is_real = np.isfinite(array).all(1)
        low, high = self._widen(array[is_real])
        height, width = canvas.shape[:2]
        margin, radius = 0.05, max(min(height, width) // 120, 2)
        shares = margin + (1 - 2 * margin) * (array - low) / (high - low)
        discs = np.mgrid[-radius : radius + 1, -radius : radius + 1]
        inside = (discs**2).sum(0) <= radius**2
        down, across = discs[0][inside], discs[1][inside]
        for number in np.flatnonzero(is_real):
            x, y = shares[number, 0] * (width - 1), (1 - shares[number, 1]) * (height - 1)
            own = _COLOURS[int(number * 255 / max(len(array) - 1, 1))]
            canvas[
                np.clip(down + int(y), 0, height - 1), np.clip(across + int(x), 0, width - 1)
            ] = own


def _tiles(array: np.ndarray) -> np.ndarray:
    """What is shown side by side: the channels of the first example; a matrix is one tile."""
    while array.ndim > 4:
        array = array[0]
    if array.ndim == 4:
        array = array[0]
    if array.ndim < 2:
        array = array.reshape(1, -1)
    tiles = array[None] if array.ndim == 2 else array
    return tiles[:_MOST_TILES]


def _grid(count: int, height: int, width: int, room_down: int, room_across: int) -> tuple[int, int]:
    """Rows and columns for tiles of one size, so that they are as large as can be."""
    best, chosen = -1.0, (1, count)
    for columns in range(1, count + 1):
        rows = -(-count // columns)
        scale = min(room_down / rows / height, room_across / columns / width)
        if scale > best:
            best, chosen = scale, (rows, columns)
    return chosen


def _text_width(text: str, scale: int = 2) -> int:
    return 4 * scale * len(text)


def _write(canvas: np.ndarray, left: int, top: int, text: str, scale: int = 2) -> None:
    for letter in text:
        bits = np.array(
            [
                [line >> (2 - place) & 1 for place in range(3)]
                for line in _GLYPHS.get(letter, (0,) * 5)
            ],
            bool,
        )
        large = np.kron(bits, np.ones((scale, scale), bool))
        part = canvas[top : top + large.shape[0], left : left + large.shape[1]]
        part[large[: part.shape[0], : part.shape[1]]] = _INK
        left += 4 * scale
