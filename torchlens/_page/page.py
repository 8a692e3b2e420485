"""Writes a history as one web page that explores it."""

import html
import json
import os
import re
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchlens._history.model_history import ModelHistory
from torchlens._page.page_data import page_data
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._text.error_wording import checked_file, got
from torchlens._text.whole_files import write_whole

PAGE = Path(__file__).parent / "js"
_FRAME_HEIGHT = 720

_IMPORT = re.compile(r'^import \{[^}]*\} from "((?:\./|\.\./)[\w/-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", re.MULTILINE)


class Exploration:
    """A page that explores a history: a file, and in a notebook the page itself.

    >>> page = explore(history, 'model.html')
    >>> page.path, len(page.html)
    """

    def __init__(self, text: str, path: Path | None, height: int = _FRAME_HEIGHT) -> None:
        self.html = text
        self.path = path
        self.height = height

    def __repr__(self) -> str:
        where = "not written to a file" if self.path is None else f"written to {str(self.path)!r}"
        return (
            f"<Exploration, {len(self.html.encode()) // 1024} KB, {where}; open it in a web "
            "browser>"
        )

    def _repr_html_(self) -> str:
        source = html.escape(self.html, quote=True)
        return (
            f'<iframe srcdoc="{source}" title="Model explorer" sandbox="allow-scripts '
            'allow-downloads" '
            f'style="width:100%;height:{self.height}px;border:1px solid '
            '#8888;border-radius:6px"></iframe>'
        )

    def open(self) -> None:
        """Opens the file in the web browser."""
        if self.path is None:
            raise ValueError(
                "This page was not written to a file. Give explore() a path, then open() it."
            )
        webbrowser.open(self.path.resolve().as_uri())


def explore(
    history: ModelHistory,
    path: str | os.PathLike[str] | None = "model.html",
    *,
    overlays: Mapping[str, Mapping[str, float]] | None = None,
    title: str | None = None,
) -> Exploration:
    """Writes one HTML file in which you can explore the model; it needs neither a network nor other
    files.

    `overlays` are numbers to colour the model by: for each name, a number per layer, under any key
    that finds the layer; a key with several passes stands for all of them. Time and memory are
    always there. With `path=None`, nothing is written.

    >>> means = {entry.layer_label: entry.tensor_contents.mean() for entry in history}
    >>> explore(history, 'model.html', overlays={'mean': means})
    """
    if not isinstance(history, ModelHistory):
        raise TypeError(f"history must be the result of log_forward_pass, got {got(history)}.")
    check_title(title)
    if overlays is not None and not isinstance(overlays, Mapping):
        raise TypeError(
            f"overlays must be a dict such as {{'importance': {{'conv2d_1_1': 0.7}}}}, got "
            f"{got(overlays)}."
        )
    for name, values in (overlays or {}).items():
        if not isinstance(values, Mapping):
            raise TypeError(
                f"The overlay {name!r} must be a dict with a number for each layer label, got "
                f"{got(values)}."
            )
    target = None if path is None else checked_file("path", path, "model.html")
    with unseen(), NoTorchFunction():
        text = page_text(page_data(history, overlays or {}, title))
    return write_page(text, target)


def check_title(title: Any) -> None:
    """Raises unless the title of a page is text, or None for one made of the models' names."""
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title must be text, or None for the name of the model, got {got(title)}.")


def page_text(data: dict[str, Any]) -> str:
    """The page of one history."""
    script = (
        f"({bundle(PAGE, 'start.js')})("
        "{ root: document, data: JSON.parse(document.getElementById('data').textContent) });"
    )
    return filled_template(
        data["title"], data, (PAGE / "pane.html").read_text(encoding="utf-8"), ["page.css"], script
    )


def filled_template(
    title: str,
    data: dict[str, Any],
    body: str,
    styles: Sequence[str],
    script: str,
    connects: bool = False,
) -> str:
    """A page: the template with style, body, scripts and data inserted. If it `connects`, its
    policy lets it request data from its server.
    """
    template = (PAGE / "page.html").read_text(encoding="utf-8")
    pieces = {
        "TITLE": html.escape(title),
        "STYLE": "".join((PAGE / name).read_text(encoding="utf-8") for name in styles),
        "CONNECT": "; connect-src 'self'" if connects else "",
        "BODY": body,
        "DATA": _safe_json(data),
        "SCRIPT": f'"use strict";\n{script}\n',
    }
    # The template is split first, so that text in one piece is not taken for a placeholder.
    parts = template.split("%%")
    return "".join(pieces[part] if index % 2 else part for index, part in enumerate(parts))


def write_page(text: str, target: Path | None) -> Exploration:
    """Writes a page to its file, if it is to have one."""
    if target is not None:
        write_whole(target, text)
    return Exploration(text, target)


def _safe_json(data: Any) -> str:
    """JSON that cannot end the script element around it, nor break a line of JavaScript."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    # A lone surrogate (a name taken from undecodable bytes) cannot be written as UTF-8.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# -- scripts ---------------------------------------------------------------------------------------


def bundle(folder: Path, start: str) -> str:
    """The script `start` and what it imports, in the order in which a browser would run them, as
    the body of one function.

    They share one scope there: no two files define the same name. Calling the function twice gives
    two of everything.
    """
    scripts: dict[Path, str] = {}
    _add((folder / start).resolve(), scripts, set())
    return "given => {\n" + "\n".join(scripts.values()) + "}"


def _add(path: Path, scripts: dict[Path, str], begun: set[Path]) -> None:
    begun.add(path)
    text = path.read_text(encoding="utf-8")
    for imported in _IMPORT.findall(text):
        other = (path.parent / imported).resolve()
        if other not in begun:
            _add(other, scripts, begun)
    scripts[path] = _EXPORT.sub("", _IMPORT.sub("", text))
