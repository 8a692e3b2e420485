"""Text that is written part by part is what the json module writes at once."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchlens._text.json_text import write_json

ODD = ["", '"', "\\", "\n\r\t\b\f\0\x7f", "ü 漢 🙂 \u2028", ", ", ": ", "[]", "null"]

strings = st.sampled_from(ODD) | st.text(max_size=3)
scalars = (
    strings
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=6,
)


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(
    parts=st.lists(st.lists(values, max_size=3), max_size=3),
    beside=st.dictionaries(strings, values, max_size=2),
    indent=st.sampled_from([None, 0, 1, 4]),
)
def test_it_is_what_the_json_module_writes(
    parts: list[list[Any]], beside: dict[str, Any], indent: int | None
):
    plain = {**beside, "records": [record for part in parts for record in part], "after": 1}
    expected = json.dumps(plain, indent=indent, ensure_ascii=False, allow_nan=False)
    assert write_json({**beside, "records": iter(parts), "after": 1}, None, indent) == expected


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_does_not_have_is_an_error(number: float):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"records": iter([[{"x": number}]])}, None, None)


def test_half_a_character_is_written_as_an_escape(tmp_path: Path):
    """As in the name of a source file that is not in the system's encoding."""
    records = ["mod\udce9l.py:12", "ü"]
    write_json({"records": iter([records])}, tmp_path / "graph.json", None)
    assert json.loads((tmp_path / "graph.json").read_text(encoding="utf-8")) == {"records": records}
