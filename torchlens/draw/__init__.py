"""Drawing: history → scene (plain nodes, edges, boxes) → Graphviz."""

import sys
from types import ModuleType
from typing import Any, NoReturn


class _Package(ModuleType):
    """This package. `torchlens.draw(model, x)` is what many try first, and once a drawing was made, the name is there."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "torchlens.draw is a package, not a function. To draw a model: torchlens.show_model_graph(model, x); to draw a "
            "history: history.render_graph()."
        )


sys.modules[__name__].__class__ = _Package
