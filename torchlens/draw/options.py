"""What the caller wants drawn, checked once."""

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["FORMATS", "DrawOptions", "draw_options"]

# What `vis_fileformat` may be: pictures that Graphviz makes, its own source, and the page to explore.
_PICTURES = ("pdf", "svg", "png", "jpg", "gif", "eps", "ps")
_SOURCES = ("dot", "gv")
FORMATS = (*_PICTURES, *_SOURCES, "html")

_COLOR_BY = ("time", "backward_time", "memory", "flops", "gradient_norm")

# graphviz attribute → value or function, or a function that returns such a dict.
Overrides = Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """The drawing options. Paths and formats are settled by `source_path` and `picture_path`.

    >>> DrawOptions(vis_opt='rolled', vis_fileformat='svg').picture_path
    PosixPath('graph.gv.svg')
    """

    vis_opt: str = "unrolled"
    vis_nesting_depth: int = 1000
    vis_outpath: str | os.PathLike[str] = "graph.gv"
    vis_save_only: bool = False
    vis_fileformat: str = "pdf"
    vis_buffer_layers: bool = False
    vis_direction: str = "bottomup"
    vis_graph_overrides: Overrides = None
    vis_node_overrides: Overrides = None
    vis_nested_node_overrides: Overrides = None
    vis_edge_overrides: Overrides = None
    vis_gradient_edge_overrides: Overrides = None
    vis_module_overrides: Overrides = None
    vis_collapse: Callable[[Any, str], bool] | None = None
    vis_fold_repeats: bool = False
    vis_color_by: str | Mapping[Any, float] | Callable[[Any], float | None] | None = None
    vis_max_nodes: int = 1500

    def __post_init__(self) -> None:
        _check_choice("vis_opt", self.vis_opt, ("none", "rolled", "unrolled"))
        _check_choice("vis_direction", self.vis_direction, ("bottomup", "topdown", "leftright"))
        _check_choice("vis_fileformat", self.vis_fileformat, FORMATS)
        for name in ("vis_save_only", "vis_buffer_layers", "vis_fold_repeats"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} is True or False, not {value!r} ({type(value).__name__}).")
        _check_count("vis_nesting_depth", self.vis_nesting_depth, "1 draws the outermost modules as one box each")
        _check_count("vis_max_nodes", self.vis_max_nodes, "drawings of more nodes are simplified")
        self._check_path()
        for name in _OVERRIDES:
            _check_overrides(name, getattr(self, name))
        if self.vis_collapse is not None and not callable(self.vis_collapse):
            raise TypeError(
                f"vis_collapse is a function of (history, module address), or None, not {self.vis_collapse!r}. "
                "For instance: vis_collapse=lambda history, module: module.endswith('attn')."
            )
        _check_color_by(self.vis_color_by)

    @property
    def is_rolled(self) -> bool:
        return self.vis_opt == "rolled"

    @property
    def picture_format(self) -> str | None:
        """What Graphviz is asked for; None where the source is all."""
        return None if self._format in _SOURCES else self._format

    @property
    def source_path(self) -> Path:
        """Where the DOT source goes."""
        path = Path(self.vis_outpath).expanduser()
        return path.with_suffix(".gv") if path.suffix[1:].lower() in (*_PICTURES, "html") else path

    @property
    def picture_path(self) -> Path | None:
        """Where the picture goes: beside the source, `graph.gv.pdf`, or where `vis_outpath` is itself a picture, there."""
        if self.picture_format is None:
            return None
        path = Path(self.vis_outpath).expanduser()
        if path.suffix[1:].lower() == self._format:
            return path
        return path.with_name(f"{path.name}.{self.picture_format}")

    @property
    def _format(self) -> str:
        """The format, by name or, where that was left at its default, by the path's ending."""
        ending = Path(self.vis_outpath).suffix[1:].lower()
        return ending if self.vis_fileformat == "pdf" and ending in (*_PICTURES, "html") else self.vis_fileformat

    def _check_path(self) -> None:
        if not isinstance(self.vis_outpath, str | os.PathLike) or not str(self.vis_outpath):
            raise TypeError(f"vis_outpath is the path of a file, such as 'graph.gv', not {self.vis_outpath!r}.")
        path = Path(self.vis_outpath).expanduser()
        if path.is_dir():
            raise ValueError(
                f"vis_outpath names a folder, {str(path)!r}. Name a file in it, such as {str(path / 'graph.gv')!r}."
            )
        ending = path.suffix[1:].lower()
        if ending in (*_PICTURES, "html") and ending != self._format:
            raise ValueError(
                f"vis_outpath={str(self.vis_outpath)!r} and vis_fileformat={self.vis_fileformat!r} ask for two formats. "
                f"Leave out vis_fileformat, or name the file {str(path.with_suffix('.gv'))!r}."
            )


_OVERRIDES = tuple(field.name for field in fields(DrawOptions) if field.name.endswith("_overrides"))


def draw_options(options: Mapping[str, Any]) -> DrawOptions:
    """Options by name; a name that is none gets the closest that is."""
    names = [field.name for field in fields(DrawOptions)]
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            raise TypeError(f"There is no drawing option {name!r}. {hint}There are: {', '.join(names)}.")
    return DrawOptions(**options)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        accepted = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
        close = difflib.get_close_matches(str(value).lower().lstrip("."), choices, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{name} is {accepted}, not {value!r}.{hint}")


def _check_count(name: str, value: Any, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number ({meaning}), not {value!r} ({type(value).__name__}).")
    if value < 1:
        raise ValueError(f"{name} is at least 1 ({meaning}), not {value}.")


def _check_overrides(name: str, value: Any) -> None:
    if value is None or callable(value):
        return
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(
            f"{name} is a dict of graphviz attributes, such as {{'color': 'red'}}, or a function that returns one, "
            f"not {value!r:.80}."
        )


def _check_color_by(value: Any) -> None:
    if value is None or callable(value) or isinstance(value, Mapping):
        return
    if not isinstance(value, str):
        raise TypeError(
            f"vis_color_by is one of {', '.join(map(repr, _COLOR_BY))}, a dict of layer label → number, or a function of a "
            f"layer entry that returns a number, not {value!r:.80} ({type(value).__name__})."
        )
    _check_choice("vis_color_by", value, _COLOR_BY)
