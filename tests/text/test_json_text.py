"""Text that is written by columns is what the json module writes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchlens._text.json_text import Columns, Lists, records_of, write_json

ODD = [
    "",
    '"',
    "\\",
    "\n\r\t\b\f\0\x7f",
    "</script>",
    "100 % %s %d",
    "{0} {}",
    "ü 漢 🙂 \u2028",
    ", ",
    ": ",
    "[]",
    "null",
]
# Equal, and not the same in JSON.
TWINS = [0, False, 0.0, -0.0, 1, True, 1.0, "1", None, "None", 10**30, 1e22, 5e-324, 2**63]

strings = st.sampled_from(ODD) | st.text(max_size=3)
scalars = (
    st.sampled_from(TWINS)
    | strings
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=6,
)
# As fields are: of one kind, of few kinds, much the same, of any.
kinds = st.sampled_from([
    values, scalars, strings, st.integers(), st.booleans() | st.none(), st.lists(st.sampled_from([1,
    2])),
    st.lists(strings), st.lists(st.sampled_from(TWINS)), st.just([]), st.just({}),
    st.sampled_from(["relu", "add"]),
    st.fixed_dictionaries({"label": strings, "argument": st.lists(scalars)}),
])  # fmt: skip


@st.composite
def columns(draw: st.DrawFn, num_records: int | None = None, depth: int = 0) -> Columns:
    size = draw(st.sampled_from([1, 2, 7])) if num_records is None else num_records
    found: dict[str, Any] = {}
    for name in draw(st.lists(strings, min_size=1, max_size=5, unique=True)):
        if depth < 2 and draw(st.integers(0, 3)) == 0:
            sizes = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
            found[name] = Lists(draw(columns(sum(sizes), depth + 1)), sizes)
        else:
            kind = draw(kinds)
            found[name] = draw(st.lists(kind, min_size=size, max_size=size))
    return found


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(
    parts=st.lists(columns(), max_size=3), beside=st.dictionaries(strings, values, max_size=2),
    indent=st.sampled_from([None, 0, 1, 4]),
)  # fmt: skip
@pytest.mark.slow
def test_it_is_what_the_json_module_writes(
    parts: list[Columns], beside: dict[str, Any], indent: int | None
):
    plain = {
        **beside,
        "records": [record for part in parts for record in records_of(part)],
        "after": 1,
    }
    expected = json.dumps(plain, indent=indent, ensure_ascii=False, allow_nan=False)
    assert write_json({**beside, "records": iter(parts), "after": 1}, None, indent) == expected


def test_long_columns_of_a_few_values_keep_what_is_equal_apart():
    twins, lists = TWINS * 100, [[twin] for twin in TWINS] * 100
    part: dict[str, Any] = {
        "twins": twins, "lists": lists, "numbers": [[index % 3, 1] for index in range(len(twins))],
        "texts": [ODD[index % 5] for index in range(len(twins))],
        "late": ["same"] * (len(twins) - 1) + ['"other"'],
        "names": [["a", "b"], []] * (len(twins) // 2), "none": [[]] * len(twins),
    }  # fmt: skip
    text = write_json({"records": iter([part])}, None, None)
    assert text == json.dumps({"records": records_of(part)}, ensure_ascii=False)


class Words(str):
    """A string of a class of its own."""


@pytest.mark.parametrize("indent", [None, 2])
def test_what_columns_do_not_know_is_left_to_the_json_module(indent: int | None):
    part: dict[str, Any] = {
        "keys": [{1: "x"}, {None: [1, {}]}, {"a": {2.5: 1}}], "tuples": [(1, (2,)), (), (3,)],
        "words": [Words('"'), "plain", Words("\n")],
    }  # fmt: skip
    text = write_json({"records": iter([part])}, None, indent)
    assert text == json.dumps({"records": records_of(part)}, ensure_ascii=False, indent=indent)


@pytest.mark.parametrize(
    "column",
    [[1.0, float("nan")], [float("inf"), None], [[0.5, float("-inf")], []], [{"x": float("nan")}]],
)
def test_a_number_that_json_does_not_have_is_an_error_as_there(column: list[Any]):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"records": iter([{"column": column}])}, None, None)


def test_half_a_character_is_written_as_an_escape(tmp_path: Path):
    """As in the name of a source file that is not in the system's encoding."""
    part = {"source": ["mod\udce9l.py:12", "ü"]}
    write_json({"records": iter([part])}, tmp_path / "graph.json", None)
    assert json.loads((tmp_path / "graph.json").read_text(encoding="utf-8")) == {
        "records": records_of(part)
    }
