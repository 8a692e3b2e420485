"""Two histories in one page, side by side: counterparts are matched, differences are marked and
listed.

>>> torchlens.explore_together(before, after, 'two.html')

matches by structure (torchlens._history.correspondence) and finds the differences itself. A caller
who knows better which parts correspond, for example from their values, gives the pairs, and the
page shows those:

>>> explore_together(torch_log, jax_log, 'diff.html', names=('torch', 'jax'), pairs=[
...     {'a': 'h.0.ln_1', 'b': 'blocks.0.norm1', 'note': 'an eps?', 'error': 5.6e-3},
...     ('linear_1_6', 'dotgeneral_1_31'),  # no note, so it is not listed
...     {'a': 'dropout_1_9', 'note': 'the port has none'},  # no counterpart
... ])

Keys are those that find a layer in a history (a label without its pass means all passes) or
addresses of modules, which stand for the whole module. One thing may be in several pairs (`q`, `k`
and `v` are one `qkv`): a click follows the first. Boxes around paired things are paired by what
they share. Only what is in a pair is marked; the list has the pairs with a note, and those without
a counterpart, in the order given. `title` and `names` are what the page and its two sides are
called.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from torchlens._history.correspondence import match
from torchlens._history.model_history import ModelHistory
from torchlens._page.differences import (
    KINDS_OF_DIFFERENCE,
    Difference,
    find_differences,
    given_differences,
)
from torchlens._page.page import PAGE, Exploration, bundle, check_title, filled_template, write_page
from torchlens._page.page_data import carried_data
from torchlens._page.pairs import PartPair, Side, given_pairs, matched_pairs
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._text.error_wording import checked_file, got


def explore_together(
    a: ModelHistory,
    b: ModelHistory,
    path: str | os.PathLike[str] | None = "two.html",
    *,
    pairs: Sequence[Any] | None = None,
    names: tuple[str, str] | None = None,
    title: str | None = None,
) -> Exploration:
    """Writes one HTML file that shows two histories side by side, with the differences marked; see
    `torchlens.explore_together`.
    """
    if names is not None and (isinstance(names, str) or len(names) != 2):
        raise ValueError(f"names must be two names, such as ('before', 'after'), got {got(names)}.")
    check_title(title)
    if pairs is not None and (isinstance(pairs, str) or not isinstance(pairs, Iterable)):
        raise TypeError(f"pairs must be a list of tuples (a, b) or of dicts, got {got(pairs)}.")
    target = None if path is None else checked_file("path", path, "two.html")
    with unseen(), NoTorchFunction():
        text = _page_text(a, b, pairs, names or _names(a, b), title)
    return write_page(text, target)


def _names(a: ModelHistory, b: ModelHistory) -> tuple[str, str]:
    if a.model_name != b.model_name:
        return a.model_name, b.model_name
    return f"{a.model_name} (a)", f"{b.model_name} (b)"


def _page_text(
    a: ModelHistory,
    b: ModelHistory,
    pairs: Sequence[Any] | None,
    names: tuple[str, str],
    title: str | None,
) -> str:
    sides = Side(a, carried_data(a, {}, names[0])), Side(b, carried_data(b, {}, names[1]))
    if pairs is None:
        found = matched_pairs(*sides, match(a, b))
        differences = find_differences(*sides, found)
    else:
        found = given_pairs(*sides, pairs)
        differences = given_differences(found)
    data: dict[str, Any] = {
        "title": title or " · ".join(names),
        "names": list(names),
        "sides": [side.carried.data for side in sides],
        "pairs": _pair_columns(found),
        "kinds": KINDS_OF_DIFFERENCE,
        "differences": [_columns(difference) for difference in differences],
        "isGiven": pairs is not None,
    }
    pane = (PAGE / "pane.html").read_text(encoding="utf-8")
    body = (PAGE / "together.html").read_text(encoding="utf-8").replace("%%PANE%%", pane)
    script = f"const openPane = {bundle(PAGE, 'start.js')};\n({bundle(PAGE, 'together.js')})();"
    return filled_template(data["title"], data, body, ["page.css", "together.css"], script)


def _pair_columns(pairs: Sequence[PartPair]) -> dict[str, list[Any]]:
    shown = [pair for pair in pairs if pair.a >= 0 and pair.b >= 0]
    return {"a": [pair.a for pair in shown], "b": [pair.b for pair in shown]}


def _columns(difference: Difference) -> dict[str, Any]:
    error, words = difference.error, difference.words
    return {
        "a": difference.a,
        "b": difference.b,
        "words": [
            [at, words[kind]] for at, kind in enumerate(KINDS_OF_DIFFERENCE) if kind in words
        ],
        "error": None if error is None else float(f"{error:.4g}") if error < float("inf") else "∞",
        "colour": difference.colour,
        "follows": int(difference.follows),
        "listed": int(difference.is_listed),
    }
