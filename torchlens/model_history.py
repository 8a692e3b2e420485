"""The log of one forward pass, as the user holds it: the history, and what the rooms behind it can do with it."""

from typing import Any

from torchlens.draw.drawing import Drawing, notebook_svg, render_graph
from torchlens.history.base_history import BaseHistory

__all__ = ["ModelHistory"]


class ModelHistory(BaseHistory):
    """Every operation of a forward pass, in order. Index it by label, module, address or number.

    >>> history['conv2d_3_7'].tensor_contents
    >>> history['features.6'], history[7], history[-17]
    """

    def render_graph(self, vis_opt: str = "unrolled", **vis_options: Any) -> Drawing | None:
        """Draws the graph; the options are those of `log_forward_pass`.

        >>> history.render_graph(vis_opt='rolled', vis_outpath='model.svg')
        """
        return render_graph(self, vis_opt, **vis_options)

    def _repr_svg_(self) -> str | None:
        return notebook_svg(self)
