"""docs/fields.md names every field, and no other."""

import re
from pathlib import Path

import torchlens as tl

PAGE = (Path(__file__).parents[2] / "docs" / "fields.md").read_text()
OF_A_HISTORY, OF_AN_ENTRY = PAGE.split("## Of a history")[1].split("## Of an entry")


def documented(section: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def fields_of(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_") and isinstance(getattr(cls, name), property)}


def test_every_field_of_a_history_is_documented_once():
    assert sorted(documented(OF_A_HISTORY)) == sorted(fields_of(tl.ModelHistory))


def test_every_field_of_an_entry_is_documented_once():
    assert sorted(documented(OF_AN_ENTRY)) == sorted(fields_of(tl.LayerEntry))
