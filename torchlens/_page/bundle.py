"""Puts the page's scripts together: modules that import each other become one script, for a page
has no other files.
"""

import re
from pathlib import Path

_IMPORT = re.compile(r'^import \{[^}]*\} from "((?:\./|\.\./)[\w/-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", re.MULTILINE)


def bundle(folder: Path, start: str) -> str:
    """The script `start` and what it imports, in the order in which a browser would run them, as
    the body of one function.

    They share one scope there: no two files define the same name. Whoever calls the function twice
    has two of everything.
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
