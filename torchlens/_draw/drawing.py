"""A drawing: made from a history, written to files, shown in a notebook."""

import os
import sys
from pathlib import Path
from typing import Any

from torchlens._compat.torchlens_names import classic_drawing_options
from torchlens._draw.build_scene import build_scene
from torchlens._draw.dot import dot_source
from torchlens._draw.draw_options import DrawOptions, VisOpt, draw_options
from torchlens._draw.layout import Layout, clear_of_edges, lay_out, with_room
from torchlens._draw.render import is_graphviz_there, render
from torchlens._draw.scene import Scene
from torchlens._draw.signature import signed
from torchlens._history.receipt import exported_receipt
from torchlens._recording.user_code import warn_caller
from torchlens._text.plain_text import printable
from torchlens._text.whole_files import write_whole
from torchlens.errors import DrawingError

# Points: PDF readers refuse larger pages, and a bitmap has at most 32,767 pixels a side, 96 of them
# to 72 points.
_LONGEST_SIDES = {"pdf": 14_400.0, "png": 24_500.0, "jpg": 24_500.0}
# Fewer nodes than this are never that long.
_FEWEST_ON_A_LONG_SIDE = 40
# With more nodes than this, a layout takes so long that none is made for the titles of the frames
# alone.
_MOST_LAID_OUT_TWICE = 600
_TRIES_FOR_TITLES = 4


class Drawing:
    """A drawing of a history. In a notebook it displays itself.

    >>> drawing = history.render_graph(vis_save_only=True)
    >>> drawing.source, drawing.source_path, drawing.picture_path

    `receipt` says what was drawn; files of the source, SVG, PNG and PDF have it inside.
    """

    def __init__(self, scene: Scene, receipt: str = "") -> None:
        self.scene = scene
        self.receipt = printable(receipt)
        self.source = dot_source(scene)
        self.source_path: Path | None = None
        self.picture_path: Path | None = None
        # The number of the notebook's cell that has shown it already.
        self._cell: int | None = None
        self._layout: Layout | None = None

    def __repr__(self) -> str:
        place = f", in {self.picture_path or self.source_path}" if self.source_path else ""
        return (
            f"<Drawing of {self.scene.title}: {len(self.scene.nodes)} nodes, "
            f"{len(self.scene.edges)} edges{place}>"
        )

    def to_bytes(self, fileformat: str = "svg") -> bytes:
        """The picture, as the bytes of a file of that format."""
        if self.scene.boxes and (
            self._layout is not None or len(self.scene.nodes) <= _MOST_LAID_OUT_TWICE
        ):
            self._move_titles()
        return signed(render(self.source, fileformat), fileformat, self.receipt)

    def _lay_out(self) -> Layout:
        """The layout. It does not depend on the side of the titles."""
        if self._layout is None:
            self._layout = lay_out(self.source)
        return self._layout

    def _move_titles(self) -> None:
        """Moves the titles of frames out of the way of edges, in the source too."""
        may_widen = (
            self.scene.direction != "leftright" and len(self.scene.nodes) <= _MOST_LAID_OUT_TWICE
        )
        for tries_left in reversed(range(_TRIES_FOR_TITLES if may_widen else 1)):
            layout = self._lay_out()
            self.scene, crowded = clear_of_edges(self.scene, layout)
            if not crowded or not tries_left:
                break
            self.scene = with_room(self.scene, layout, crowded)
            self.source, self._layout = dot_source(self.scene), None
        self.source = dot_source(self.scene)

    def _signed_source(self) -> str:
        """The source, and a comment with the receipt."""
        note = f"// {self.receipt}\n" if self.receipt else ""
        return self.source + note

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the picture, or the source for `.gv` and `.dot`; the format is the path's
        ending.
        """
        options = draw_options(
            {"vis_outpath": path, "vis_fileformat": Path(path).suffix[1:].lower() or "pdf"}
        )
        fileformat = options.picture_format
        target = options.source_path if options.picture_path is None else options.picture_path
        write_whole(
            target, self._signed_source() if fileformat is None else self.to_bytes(fileformat)
        )
        return target

    def _repr_svg_(self) -> str | None:
        """What a notebook shows; None, and so the one-line text, without Graphviz or where the cell
        shows it already.
        """
        notebook = _notebook()
        if notebook is not None and self._cell == notebook.execution_count:
            return None
        return self.to_bytes("svg").decode("utf-8") if is_graphviz_there() else None


def make_drawing(history: Any, options: DrawOptions) -> Drawing:
    """The drawing of a history, without writing a file."""
    if options.vis_opt == "none":
        raise ValueError("vis_opt must be 'unrolled' or 'rolled' to make a drawing, got 'none'.")
    return Drawing(build_scene(history, options), str(exported_receipt(history._log)))


def draw(history: Any, options: DrawOptions) -> Drawing | None:
    """Draws as the options say, writes the files and shows the picture; returns None for
    `vis_opt='none'`.

    The source is written first: if no picture can be made, the error says where the source is.
    """
    if options.vis_opt == "none":
        return None
    if options.picture_format == "html":
        raise ValueError(
            "vis_fileformat='html' is the page that history.explore(path) writes; this draws "
            "pictures."
        )
    drawing = make_drawing(history, options)
    if options.picture_format in _LONGEST_SIDES:
        drawing = _within_page(history, options, drawing, _LONGEST_SIDES[options.picture_format])
    if drawing.scene.simplification is not None:
        warn_caller(
            f"torchlens: {drawing.scene.simplification} vis_nesting_depth, vis_collapse, "
            "vis_fold_repeats and vis_opt choose what is drawn; vis_max_nodes moves the limit."
        )
    source_path, picture_path = options.source_path, options.picture_path
    write_whole(source_path, drawing._signed_source())
    drawing.source_path = source_path
    if picture_path is not None and options.picture_format is not None:
        try:
            picture = drawing.to_bytes(options.picture_format)
        except DrawingError as error:
            raise DrawingError(f"{error} The source is in {str(source_path)!r}.") from error
        write_whole(source_path, drawing._signed_source())  # titles may have moved
        write_whole(picture_path, picture)
        drawing.picture_path = picture_path
        if not options.vis_save_only:
            _show(drawing)
    return drawing


def _within_page(history: Any, options: DrawOptions, drawing: Drawing, longest: float) -> Drawing:
    """The drawing, or one of fewer nodes that fits on the largest page of the format."""
    num_nodes = len(drawing.scene.nodes)
    while is_graphviz_there() and num_nodes > _FEWEST_ON_A_LONG_SIDE:
        try:
            layout = drawing._lay_out()
            if max(layout.width, layout.height) <= longest:
                break
        except DrawingError:  # it is raised again where the picture is made
            break
        num_nodes = max(num_nodes // 2, _FEWEST_ON_A_LONG_SIDE)
        reason = (
            f"a side of the {options.picture_format} would be longer than {longest:,.0f} points"
        )
        drawing = Drawing(build_scene(history, options, num_nodes, reason), drawing.receipt)
    return drawing


def render_graph(
    history: Any, vis_opt: VisOpt = "unrolled", *by_position: Any, **options: Any
) -> Drawing | None:
    """`draw` with options by name, or by position as in the classic; see `DrawOptions`."""
    given = classic_drawing_options("render_graph()", by_position, options)
    return draw(history, draw_options({"vis_opt": vis_opt, **given}))


def notebook_svg(history: Any) -> str | None:
    """A history as a notebook shows it: drawn, folded, with at most 300 nodes. None without
    Graphviz.
    """
    if not is_graphviz_there() or not len(history._log.graph.recorded):
        return None
    return make_drawing(
        history, DrawOptions(vis_direction="topdown", vis_fold_repeats=True, vis_max_nodes=300)
    )._repr_svg_()


def _show(drawing: Drawing) -> None:
    """Shows the picture in the notebook, or in a window if there is a screen and a terminal."""
    notebook = _notebook()
    if notebook is not None:
        from IPython.display import display

        display(drawing)
        drawing._cell = notebook.execution_count
        return
    has_screen = sys.platform in ("win32", "darwin") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    if has_screen and sys.stdin is not None and sys.stdin.isatty():
        import graphviz

        graphviz.view(str(drawing.picture_path), quiet=True)


def _notebook() -> Any:
    """The running notebook, or None."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    return running if running.__class__.__name__ == "ZMQInteractiveShell" else None
