"""The drawing options, checked once."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from torchlens._compat.torchlens_names import OPTION_NAMES, no_such_name
from torchlens._text.error_wording import check_choice, check_count, checked_file, got
from torchlens._text.measures import MEASURES, Measure

VisOpt: TypeAlias = Literal["none", "rolled", "unrolled"]
Direction: TypeAlias = Literal["bottomup", "topdown", "leftright"]
ColorBy: TypeAlias = Measure | Literal["gradient_norm"]
_COLOR_WORDS = (*MEASURES, "gradient_norm")
# Pictures that Graphviz makes, its own source, and the page to explore.
Picture: TypeAlias = Literal["pdf", "svg", "png", "jpg", "gif", "eps", "ps"]
Source: TypeAlias = Literal["dot", "gv"]
FileFormat: TypeAlias = Picture | Source | Literal["html"]

_PICTURES: tuple[str, ...] = get_args(Picture)
_SOURCES: tuple[str, ...] = get_args(Source)
FORMATS = (*_PICTURES, *_SOURCES, "html")

# graphviz attribute → value or function, or a function that returns such a dict.
Overrides: TypeAlias = Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None


class DrawKeywords(TypedDict, total=False):
    """The drawing options other than `vis_opt`, as keyword arguments; `DrawOptions` checks them and
    has the defaults.
    """

    vis_nesting_depth: int
    vis_outpath: str | os.PathLike[str]
    vis_save_only: bool
    vis_fileformat: FileFormat
    vis_buffer_layers: bool
    vis_direction: Direction
    vis_graph_overrides: Overrides
    vis_node_overrides: Overrides
    vis_nested_node_overrides: Overrides
    vis_edge_overrides: Overrides
    vis_gradient_edge_overrides: Overrides
    vis_module_overrides: Overrides
    vis_collapse: Callable[[Any, str], bool] | None
    vis_fold_repeats: bool
    vis_arguments: bool
    vis_color_by: ColorBy | Mapping[Any, float] | Callable[[Any], float | None] | None
    vis_max_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """The drawing options. Paths and formats are settled by `source_path` and `picture_path`.

    >>> DrawOptions(vis_opt='rolled', vis_fileformat='svg').picture_path
    PosixPath('graph.gv.svg')
    """

    vis_opt: VisOpt = "unrolled"
    vis_nesting_depth: int = 1000
    vis_outpath: str | os.PathLike[str] = "graph.gv"
    vis_save_only: bool = False
    vis_fileformat: FileFormat = "pdf"
    vis_buffer_layers: bool = False
    vis_direction: Direction = "topdown"
    vis_graph_overrides: Overrides = None
    vis_node_overrides: Overrides = None
    vis_nested_node_overrides: Overrides = None
    vis_edge_overrides: Overrides = None
    vis_gradient_edge_overrides: Overrides = None
    vis_module_overrides: Overrides = None
    vis_collapse: Callable[[Any, str], bool] | None = None
    vis_fold_repeats: bool = False
    vis_arguments: bool = False
    vis_color_by: ColorBy | Mapping[Any, float] | Callable[[Any], float | None] | None = None
    vis_max_nodes: int = 1500

    def __post_init__(self) -> None:
        check_choice("vis_opt", self.vis_opt, get_args(VisOpt))
        check_choice("vis_direction", self.vis_direction, get_args(Direction))
        check_choice("vis_fileformat", self.vis_fileformat, FORMATS)
        for name in ("vis_save_only", "vis_buffer_layers", "vis_fold_repeats", "vis_arguments"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {got(value)}.")
        check_count(
            "vis_nesting_depth",
            self.vis_nesting_depth,
            1,
            "1 draws the outermost modules as one box each",
        )
        check_count("vis_max_nodes", self.vis_max_nodes, 1, "drawings of more nodes are simplified")
        self._check_path()
        for name in _OVERRIDES:
            _check_overrides(name, getattr(self, name))
        if self.vis_collapse is not None and not callable(self.vis_collapse):
            raise TypeError(
                "vis_collapse must be a function of (history, module address), or None, got "
                f"{got(self.vis_collapse)}. For instance: vis_collapse=lambda history, module: "
                "module.endswith('attn')."
            )
        _check_color_by(self.vis_color_by)

    @property
    def is_rolled(self) -> bool:
        return self.vis_opt == "rolled"

    @property
    def picture_format(self) -> str | None:
        """The format that Graphviz makes; None if only the source is written."""
        return None if self._format in _SOURCES else self._format

    @property
    def source_path(self) -> Path:
        """Where the DOT source goes."""
        path = Path(self.vis_outpath).expanduser()
        return path.with_suffix(".gv") if path.suffix[1:].lower() in (*_PICTURES, "html") else path

    @property
    def picture_path(self) -> Path | None:
        """Where the picture goes: beside the source, `graph.gv.pdf`, or to `vis_outpath` if that
        names a picture.
        """
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
        return (
            ending
            if self.vis_fileformat == "pdf" and ending in (*_PICTURES, "html")
            else self.vis_fileformat
        )

    def _check_path(self) -> None:
        path = checked_file("vis_outpath", self.vis_outpath, "graph.gv")
        ending = path.suffix[1:].lower()
        if ending in (*_PICTURES, "html") and ending != self._format:
            raise ValueError(
                f"vis_outpath={str(self.vis_outpath)!r} and vis_fileformat={self.vis_fileformat!r} "
                "ask for two formats. Leave out vis_fileformat, or name the file "
                f"{str(path.with_suffix('.gv'))!r}."
            )


_OVERRIDES = tuple(field.name for field in fields(DrawOptions) if field.name.endswith("_overrides"))


def draw_options(options: Mapping[str, Any], function: str = "render_graph()") -> DrawOptions:
    """The options by name; the error for an unknown name suggests the closest one."""
    names = [field.name for field in fields(DrawOptions)]
    for name in options:
        if name not in names:
            raise TypeError(
                no_such_name(
                    function, "option", name, OPTION_NAMES, names, f"Available: {', '.join(names)}."
                )
            )
    return DrawOptions(**options)


def _check_overrides(name: str, value: Any) -> None:
    if value is None or callable(value):
        return
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(
            f"{name} must be a dict of graphviz attributes, such as {{'color': 'red'}}, or a "
            "function that returns one, "
            f"got {got(value)}."
        )


def _check_color_by(value: Any) -> None:
    if value is None or callable(value) or isinstance(value, Mapping):
        return
    if not isinstance(value, str):
        raise TypeError(
            f"vis_color_by must be one of {', '.join(map(repr, _COLOR_WORDS))}, a dict of layer "
            "label → number, or a function of a layer entry that returns a number, got "
            f"{got(value)}."
        )
    check_choice("vis_color_by", value, _COLOR_WORDS)
