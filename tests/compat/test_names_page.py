"""The tables of docs/coming-from-torchlens.md are made of the code; `pytest --update-golden` makes
them anew.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchlens._compat.torchlens_names import (
    ENTRY_NAMES,
    FUNCTION_NAMES,
    HISTORY_NAMES,
    OPTION_NAMES,
)
from torchlens._history.classic import ENTRY_FIELDS, ENTRY_METHODS, HISTORY_FIELDS, NOT_HERE

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-torchlens.md"


def table(head: tuple[str, str], rows: Mapping[str, str]) -> str:
    lines = [
        f"| {head[0]} | {head[1]} |",
        "|---|---|",
        *(f"| {left} | {right} |" for left, right in rows.items()),
    ]
    return "\n".join(lines)


def classic() -> str:
    """The classic's fields with their sentences."""

    def rows(fields: Mapping[str, Callable[..., Any]], call: str = "") -> dict[str, str]:
        return {
            f"`{name}{call}`": sentence(name, function) for name, function in sorted(fields.items())
        }

    return (
        f"Of a history:\n\n{table(('field', 'is'), rows(HISTORY_FIELDS))}\n\nOf an "
        f"entry:\n\n{table(('field', 'is'), rows(ENTRY_FIELDS) | rows(ENTRY_METHODS, '()'))}"
    )


def sentence(name: str, function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):  # an option
        return f"The option `{function.args[0]}`."
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())


def not_here() -> str:
    reasons = {
        f"`{name}`": f"{reason[0].upper()}{reason[1:]}."
        for name, reason in sorted(NOT_HERE.items())
    }
    return table(("field", "because"), reasons)


def newer() -> str:
    """What to write here, with the names that mean it."""
    parts = []
    for title, names in (
        ("Functions and classes", FUNCTION_NAMES), ("Options", OPTION_NAMES), ("Of a history",
        HISTORY_NAMES),
        ("Of an entry", ENTRY_NAMES),
    ):  # fmt: skip
        rows: dict[str, list[str]] = {}
        for foreign, ours in names.items():
            rows.setdefault(f"`{ours}`", []).append(f"`{foreign}`")
        parts.append(
            f"{title}:\n\n{table(('here', 'there'), {ours: ', '.join(all_of) for ours, all_of in rows.items()})}"
        )
    return "\n\n".join(parts)


def made_anew(page: str) -> str:
    for name, make in {"classic": classic, "not-here": not_here, "newer": newer}.items():
        start, end = f"<!-- {name}:start -->\n", f"<!-- {name}:end -->"
        before, _, rest = page.partition(start)
        _, _, after = rest.partition(end)
        page = f"{before}{start}{make()}\n{end}{after}"
    return page


def test_the_page_says_what_the_code_says(generated: Callable[[Path, Callable[[str], str]], None]):
    generated(PAGE, made_anew)


def test_the_page_lists_every_name():
    page = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)(?:\(\))?`", page))
    for names in (
        HISTORY_FIELDS,
        ENTRY_FIELDS,
        ENTRY_METHODS,
        NOT_HERE,
        FUNCTION_NAMES,
        HISTORY_NAMES,
        ENTRY_NAMES,
        OPTION_NAMES,
    ):
        assert named >= set(names)
