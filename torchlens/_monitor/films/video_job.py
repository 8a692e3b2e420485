"""The worker's job that films arrays."""

from pathlib import Path
from typing import Any

import numpy as np

from torchlens._monitor.films.pictures import Painter, shown_as
from torchlens._monitor.films.projection import NeighbourEmbedding, PrincipalComponents, Projector
from torchlens._monitor.films.video_file import VideoFile


class Video:
    """One picture for each array. options: `path`, `show`, `fps`, `width`, `height`, `basis`."""

    def __init__(self, folder: Path, name: str, options: dict[str, Any]) -> None:
        self._options = options
        self._show: str = options["show"]
        self._projector: Projector | None = None
        if self._show in ("pca", "tsne"):
            self._projector = (
                PrincipalComponents(options["basis"] == "fixed")
                if self._show == "pca"
                else NeighbourEmbedding()
            )
        self._painter: Painter | None = None
        self._file: VideoFile | None = None

    def add(self, step: int, array: np.ndarray) -> None:
        """Paints it, and appends it to the film, which begins with the first."""
        width, height = self._options["width"], self._options["height"]
        if self._file is None or self._painter is None:
            show = (
                shown_as(array.shape)
                if self._show == "auto"
                else "points"
                if self._projector is not None
                else self._show
            )
            self._painter = Painter(show, width, height)
            self._file = VideoFile(Path(self._options["path"]), width, height, self._options["fps"])
        shown = array if self._projector is None else self._projector.project(array)[0]
        self._file.add(self._painter.picture(step, shown))

    def finish(self) -> None:
        """Ends the film."""
        if self._file is not None:
            self._file.close()
