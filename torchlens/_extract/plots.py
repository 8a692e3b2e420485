"""Figures of features, by matplotlib. Each function returns the figure; `figure.savefig(path)`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens._extract.analyses import nearest, rdm
from torchlens._extract.exporters import library
from torchlens._extract.feature_store import Features
from torchlens._extract.reductions import Array

if TYPE_CHECKING:
    import pandas as pd


def plot_similarity(similarity: "pd.DataFrame", title: str = "") -> Any:
    """A heat map of what `cka` or `rsa` returned: layers of one network against another's."""
    rows, columns = similarity.shape
    figure, axes = _figure(2 + 0.35 * columns, 1.6 + 0.35 * rows)
    image = axes.imshow(similarity.to_numpy(), vmin=0, vmax=1, cmap="viridis")
    axes.set_xticks(range(columns), similarity.columns, rotation=90)
    axes.set_yticks(range(rows), similarity.index)
    axes.set_title(title)
    figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def plot_rdm(features: Features, layer: str, metric: str = "correlation") -> Any:
    """The dissimilarity of each input with each."""
    figure, axes = _figure(5, 4.2)
    image = axes.imshow(rdm(features, layer, metric).to_numpy(), cmap="magma")
    axes.set_title(layer)
    axes.set_xlabel("input")
    figure.colorbar(image, ax=axes, label=f"{metric} distance")
    return figure


def plot_mds(
    features: Features, layer: str, colors: Any = None, metric: str = "correlation"
) -> Any:
    """The inputs in the plane, as far apart as in the layer (classical scaling); `colors` has one
    item for each input.
    """
    figure, axes = _figure(5, 4.5)
    places = mds(rdm(features, layer, metric).to_numpy())
    groups = np.zeros(len(places)) if colors is None else np.asarray(colors)
    for group in np.unique(groups):
        own = places[groups == group]
        axes.scatter(own[:, 0], own[:, 1], s=14, label=str(group))
    if colors is not None:
        axes.legend(fontsize="small")
    axes.set_title(layer)
    axes.set_aspect("equal")
    return figure


def mds(distances: Array) -> Array:
    """Places in the plane whose distances are about these (classical multidimensional scaling)."""
    count = len(distances)
    centring = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(-0.5 * centring @ np.square(distances) @ centring)
    return np.asarray(vectors[:, :-3:-1] * np.sqrt(np.maximum(values[:-3:-1], 0)))


def plot_probe(scores: "pd.Series") -> Any:
    """The curve over depth of what `probe` returned."""
    figure, axes = _figure(2 + 0.4 * len(scores), 3.5)
    axes.plot(range(len(scores)), scores.to_numpy(), marker="o")
    axes.set_xticks(range(len(scores)), scores.index, rotation=45, ha="right")
    axes.set_ylabel(scores.name)
    axes.grid(alpha=0.3)
    return figure


def plot_nearest(
    features: Features, layer: str, unit: Any, image_of: Callable[[Any], Any], k: int = 9
) -> Any:
    """The inputs with the largest values of a unit, as pictures; `image_of` returns the image of an
    id: a PIL image, or an array of (height, width) or (height, width, channels).
    """
    found = nearest(features, layer, unit, k)
    columns = min(len(found), 3)
    rows = -(-len(found) // columns)
    figure, grid = _figure(2 * columns, 2.2 * rows, rows, columns)
    for axes in np.atleast_1d(grid).flat:
        axes.set_axis_off()
    for axes, (one, value) in zip(np.atleast_1d(grid).flat, found.items(), strict=False):
        axes.imshow(np.asarray(image_of(one)), cmap="gray")
        axes.set_title(f"{one}: {value:.3g}", fontsize="small")
    figure.suptitle(f"{layer}, unit {unit}")
    return figure


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> Any:
    """A figure that no window shows, and its axes."""
    figures = library("matplotlib.figure")
    figure = figures.Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns)
