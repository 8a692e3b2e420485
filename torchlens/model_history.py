"""The log of one forward pass, as the user holds it: the history, with drawing, exploring, exporting and saving."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack, overload

from torchlens.history.base_history import BaseHistory
from torchlens.lazy_import import lazy_function

if TYPE_CHECKING:
    import networkx

    from torchlens.draw.drawing import Drawing, notebook_svg, render_graph
    from torchlens.draw.options import DrawKeywords, VisOpt
    from torchlens.export.json_graph import to_json
    from torchlens.export.networkx_graph import to_networkx
    from torchlens.trace import save_history
    from torchlens.viewer import Exploration, explore
else:
    render_graph = lazy_function("torchlens.draw.drawing", "render_graph")
    notebook_svg = lazy_function("torchlens.draw.drawing", "notebook_svg")
    to_json = lazy_function("torchlens.export.json_graph", "to_json")
    to_networkx = lazy_function("torchlens.export.networkx_graph", "to_networkx")
    explore = lazy_function("torchlens.viewer", "explore")
    save_history = lazy_function("torchlens.trace", "save_history")

__all__ = ["ModelHistory"]


class ModelHistory(BaseHistory):
    """Every operation of a forward pass, in order. Index it by label, module, address or number.

    >>> history['conv2d_3_7'].tensor_contents
    >>> history['features.6'], history[7], history[-17]
    """

    def render_graph(
        self, vis_opt: "VisOpt" = "unrolled", *by_position: Any, **vis_options: "Unpack[DrawKeywords]"
    ) -> "Drawing | None":
        """Draws the graph; the drawing options are those of `log_forward_pass`.

        >>> history.render_graph(vis_opt='rolled', vis_outpath='model.svg')
        """
        return render_graph(self, vis_opt, *by_position, **vis_options)

    def explore(
        self,
        path: str | os.PathLike[str] | None = "model.html",
        *,
        overlays: Mapping[str, Mapping[str, float]] | None = None,
        title: str | None = None,
    ) -> "Exploration":
        """Writes one HTML file in which you can explore the model; in a notebook it shows inline.

        >>> history.explore('model.html', overlays={'importance': {'conv2d_1_1': 0.7}})
        """
        return explore(self, path, overlays=overlays, title=title)

    @overload
    def to_json(self, path: None = None, indent: int | None = None) -> str: ...

    @overload
    def to_json(self, path: str | os.PathLike[str], indent: int | None = None) -> None: ...

    def to_json(self, path: str | os.PathLike[str] | None = None, indent: int | None = None) -> str | None:
        """Returns the graph as JSON, or writes it to `path`."""
        return to_json(self, path, indent)

    def save(self, path: str | os.PathLike[str], params: bool = False, *, max_shard_bytes: int = 5_000_000_000) -> None:
        """Writes the history to a safetensors file, which `torchlens.load(path)` opens.

        With `params=True`, the file includes the values of the model's parameters. Beyond `max_shard_bytes`, the tensors
        are split among several files, with an index beside them.

        >>> history.save('trace.safetensors')
        """
        save_history(self._log, path, params, max_shard_bytes)

    def to_networkx(self) -> "networkx.MultiDiGraph":
        """Returns the graph as a networkx graph; networkx must be installed."""
        return to_networkx(self)

    def _repr_svg_(self) -> str | None:
        return notebook_svg(self)
