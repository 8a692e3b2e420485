"""A header that is read by columns says what it says when it is read entry by entry; whatever is
odd goes the long way.
"""

import json
import random
from typing import Any

import pytest

from torchlens._trace import header
from torchlens._trace.format import Place, description, header_bytes
from torchlens.errors import TraceError

KINDS: list[tuple[str, tuple[int, ...], int]] = [
    ("F32", (2, 3), 24), ("U8", (5,), 5), ("F64", (), 8), ("BF16", (0, 4), 0), ("BOOL", (1, 1, 1),
    1), ("F4", (2,), 1),
]  # fmt: skip
NAMES = (
    "1/conv2d",
    "1/block:2/relu",
    "µ/数",
    "a b",
    "torchlens/call/1",
    "x},y",
    "data_offsets",
    "",
)
ODD_NAMES = ('a"b', "a\\b", "tab\t")


def random_header(choose: random.Random) -> tuple[bytes, int]:
    """The text of a header, and the bytes behind it."""
    places, end = [], 0
    for name in choose.sample(
        NAMES if choose.random() < 0.8 else (*NAMES, *ODD_NAMES), choose.randint(1, 7)
    ):
        dtype, shape, size = choose.choice(KINDS)
        places.append((name, description(Place(dtype, shape, end, end + size))))
        end += size
    metadata = choose.choice([{}, {"torchlens": "2"}, {"format": "pt", "a": 'b"c},'}])
    return header_bytes(places, metadata)[8:], end


def by_entries(content: bytes, num_bytes: int) -> Any:
    try:
        return header._header_by_entries(content, num_bytes)
    except TraceError:
        return None


def facts(found: Any) -> Any:
    return (
        found.metadata,
        found.data,
        found.num_bytes,
        [(name, found.place(name)) for name in found.names],
    )


def test_what_is_written_as_usual_is_read_by_columns():
    places = {
        name: description(Place("F32", (2,), 8 * n, 8 * n + 8)) for n, name in enumerate(("a", "b"))
    }
    content = header_bytes(places.items(), {"c": "d"})
    found = header._header_by_columns(content[8:], 16)
    assert found is not None
    assert facts(found) == facts(header._header_by_entries(content[8:], 16))
    assert found.place("b") == Place("F32", (2,), 8, 16)


@pytest.mark.parametrize("seed", range(4))
def test_both_ways_agree_on_headers_changed_at_random(seed: int):
    choose = random.Random(seed)
    num_read = 0
    for _ in range(400):
        content, num_bytes = random_header(choose)
        for _ in range(choose.choice([0, 1, 1, 2])):
            place = choose.randrange(len(content))
            piece = choose.choice(
                [
                    b"",
                    b",",
                    b"}",
                    b'"',
                    b"0",
                    b"7",
                    b"-",
                    b"[",
                    b" ",
                    b"\\",
                    b"\n",
                    b"\xff",
                    b"1e3",
                    b"{}",
                ]
            )
            content = content[:place] + piece + content[place + choose.randint(0, 2) :]
        if not content.startswith(b"{"):
            continue
        num_bytes += choose.choice([0, 0, 0, 1, -1])
        columns = header._header_by_columns(content, num_bytes)
        if columns is not None:
            num_read += 1
            assert facts(columns) == facts(by_entries(content, num_bytes))
    assert num_read > 50


@pytest.mark.parametrize(
    "spans",
    [
        "[0,8]},[8,16]}", "[0]},8,[8,16]}", "[0,8]},[8,016]}", "[0,8]},[08,6]}", "[,08]},[8,16]}",
        "[0,8]},[+8,16]}",
        "[0,8]},[8.,16]}", "[0,8},][8,16]}", "[0,8],[8,16]}}", "[0,8]},[8,18446744073709551632]}",
    ],
)  # fmt: skip
def test_only_offsets_that_are_written_as_usual_are_read_by_columns(spans: str):
    first, second = spans.rsplit("[", 1)
    kind = '":{"dtype":"F32","shape":[2],"data_offsets":'
    content = f'{{"a{kind}{first.removesuffix(",")},"b{kind}[{second}}}'.encode()
    found = header._header_by_columns(content, 16)
    assert (found is not None) == (spans == "[0,8]},[8,16]}")


def test_a_file_of_the_stock_library_is_read_by_columns():
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    content = safetensors.save(
        {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.int8)}, {"who": "they"}
    )
    length = int.from_bytes(content[:8], "little")
    found = header._header_by_columns(content[8 : 8 + length], len(content) - 8 - length)
    assert found is not None
    assert found.metadata == {"who": "they"}
    assert json.loads(content[8 : 8 + length])["a"]["shape"] == list(found.place("a").shape)
