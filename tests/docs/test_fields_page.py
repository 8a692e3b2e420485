"""The tables of docs/fields.md are made of the docstrings; `pytest --update-golden` makes them
anew.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchlens as tl

PAGE = Path(__file__).parents[2] / "docs" / "fields.md"
SECTIONS = {"## Of a history\n": tl.ModelHistory, "## Of an entry\n": tl.LayerEntry}
_ROW = re.compile(r"^\| `(\w+)` \| (.*) \|$")


def fields_of(cls: type) -> dict[str, str]:
    """Every field with its sentence, in the order in which the class defines them."""
    found = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if not name.startswith("_") and isinstance(value, property):
                found[name] = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return found


def with_rows_of(page: str, fields: dict[str, str]) -> str:
    """The page with these sentences; a field it does not have comes after the one that is defined
    before it.
    """
    rows = {match[1] for line in page.split("\n") if (match := _ROW.match(line))}
    lines = []
    for line in page.split("\n"):
        match = _ROW.match(line)
        if match is None:
            lines.append(line)
            continue
        if match[1] not in fields:
            continue
        names = list(fields)
        following = names[names.index(match[1]) :]
        new = [following[0]]
        for name in following[1:]:
            if name in rows:
                break
            new.append(name)
        lines += [f"| `{name}` | {fields[name]} |" for name in new]
    return "\n".join(lines)


def made_anew(page: str) -> str:
    """The page with all rows as the docstrings have them."""
    starts = sorted(page.index(heading) for heading in SECTIONS)
    parts = [page[: starts[0]], page[starts[0] : starts[1]], page[starts[1] :]]
    for number, cls in enumerate(SECTIONS.values(), start=1):
        parts[number] = with_rows_of(parts[number], fields_of(cls))
    return "".join(parts)


@pytest.mark.parametrize("cls", SECTIONS.values(), ids=lambda cls: cls.__name__)
def test_every_field_and_method_says_what_it_is(cls: type):
    for name, sentence in fields_of(cls).items():
        assert sentence.endswith("."), f"{name}: {sentence!r}"
        assert "|" not in sentence
    for name in dir(cls):
        if not name.startswith("_"):
            assert inspect.getdoc(getattr(cls, name)), name


def test_the_page_says_what_the_docstrings_say(
    generated: Callable[[Path, Callable[[str], str]], None],
):
    generated(PAGE, made_anew)


def test_every_field_is_on_the_page_once():
    page = PAGE.read_text(encoding="utf-8")
    first, second = (page.index(heading) for heading in SECTIONS)
    for text, cls in ((page[first:second], tl.ModelHistory), (page[second:], tl.LayerEntry)):
        named = [match[1] for line in text.split("\n") if (match := _ROW.match(line))]
        assert sorted(named) == sorted(fields_of(cls))


def test_a_new_field_and_a_new_sentence_get_into_the_page():
    page = "| field | is |\n|---|---|\n| `a` | Old. |\n| `gone` | x. |\n| `c` | C. |\n\ntext"
    made = with_rows_of(page, {"a": "New.", "b": "B.", "c": "C."})
    assert made == "| field | is |\n|---|---|\n| `a` | New. |\n| `b` | B. |\n| `c` | C. |\n\ntext"


def test_the_table_has_all_fields_but_those_that_the_page_lists():
    end = PAGE.read_text(encoding="utf-8").partition("`history.to_pandas()` has one row per")[2]
    listed = set(re.findall(r"`(\w+)`", end)) - {"source"}
    history = tl.log_forward_pass(torch.nn.Linear(2, 2), torch.ones(1, 2))
    assert listed == set(fields_of(tl.LayerEntry)) - set(history.to_pandas().columns)
