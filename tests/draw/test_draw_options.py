"""Bad drawing options are refused in words that help."""

from pathlib import Path
from typing import Any

import pytest

from torchlens._draw.draw_options import DrawOptions, draw_options


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"vis_opt": "unroled"},
            ValueError,
            (
                "vis_opt must be 'none', 'rolled' or 'unrolled', got 'unroled' (str). Did you "
                "mean 'unrolled'?"
            ),
        ),
        ({"vis_opt": None}, ValueError, "vis_opt must be 'none', 'rolled' or 'unrolled', got None"),
        (
            {"vis_direction": "up"},
            ValueError,
            "vis_direction must be 'bottomup', 'topdown' or 'leftright', got 'up'",
        ),
        ({"vis_fileformat": "bmp"}, ValueError, "vis_fileformat must be 'pdf', 'svg', 'png'"),
        ({"vis_fileformat": ".PDF"}, ValueError, "Did you mean 'pdf'?"),
        ({"vis_nesting_depth": 0}, ValueError, "vis_nesting_depth must be at least 1"),
        ({"vis_nesting_depth": "2"}, TypeError, "vis_nesting_depth must be a whole number"),
        ({"vis_nesting_depth": True}, TypeError, "vis_nesting_depth must be a whole number"),
        ({"vis_max_nodes": 0}, ValueError, "vis_max_nodes must be at least 1"),
        ({"vis_save_only": 1}, TypeError, "vis_save_only must be True or False, got 1 (int)"),
        ({"vis_buffer_layers": "yes"}, TypeError, "vis_buffer_layers must be True or False"),
        ({"vis_outpath": 3}, TypeError, "vis_outpath must name a file"),
        ({"vis_outpath": ""}, TypeError, "vis_outpath must name a file"),
        ({"vis_outpath": "net.svg", "vis_fileformat": "png"}, ValueError, "ask for two formats"),
        (
            {"vis_node_overrides": "red"},
            TypeError,
            "vis_node_overrides must be a dict of graphviz attributes",
        ),
        (
            {"vis_node_overrides": {1: "red"}},
            TypeError,
            "vis_node_overrides must be a dict of graphviz attributes",
        ),
        (
            {"vis_collapse": ["layer1"]},
            TypeError,
            "vis_collapse must be a function of (history, module address)",
        ),
        ({"vis_color_by": "speed"}, ValueError, "'calls' or 'gradient_norm', got 'speed'"),
        ({"vis_color_by": 3}, TypeError, "'calls', 'gradient_norm', a dict of layer label"),
    ],
)
def test_a_bad_option_says_what_is_accepted(
    options: dict[str, Any], error: type[Exception], words: str
):
    with pytest.raises(error) as caught:
        DrawOptions(**options)
    assert words in str(caught.value)


def test_a_folder_is_no_file(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"vis_outpath must name a file, got the folder .*Name a file in it"
    ):
        DrawOptions(vis_outpath=tmp_path)


def test_an_unknown_option_gets_the_closest_known():
    with pytest.raises(
        TypeError, match=r"has no option 'vis_nesting_level'\. Did you mean 'vis_nesting_depth'\?"
    ):
        draw_options({"vis_nesting_level": 3})


@pytest.mark.parametrize(
    ("outpath", "fileformat", "source", "picture"),
    [
        ("graph.gv", "pdf", "graph.gv", "graph.gv.pdf"),
        ("a/net", "svg", "a/net", "a/net.svg"),
        ("net.svg", "pdf", "net.gv", "net.svg"),
        ("net.png", "png", "net.gv", "net.png"),
        ("net.dot", "dot", "net.dot", None),
        ("page.html", "html", "page.gv", "page.html"),
        ("model.v2", "png", "model.v2", "model.v2.png"),
    ],
)
def test_the_picture_stands_beside_the_source(
    outpath: str, fileformat: Any, source: str, picture: str | None
):
    options = DrawOptions(vis_outpath=outpath, vis_fileformat=fileformat)
    assert options.source_path == Path(source)
    assert options.picture_path == (None if picture is None else Path(picture))
