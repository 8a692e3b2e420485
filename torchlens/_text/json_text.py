"""Data as JSON: text, or a file."""

import json
import os
from collections.abc import Iterator
from typing import Any

from torchlens._text.error_wording import check_count, checked_file
from torchlens._text.whole_files import whole_file


def write_json(
    data: dict[str, Any], path: str | os.PathLike[str] | None, indent: int | None
) -> str | None:
    """The text that `json.dumps` gives; with a path, writes it to that file and returns None.

    A field that is an iterator of lists becomes one long list. Only one of its parts is in memory
    at a time.
    """
    if indent is not None:
        check_count("indent", indent, 0)
    if path is None:
        return "".join(_pieces(data, indent))
    target = checked_file("path", path, "model.json")
    # A lone surrogate, as in the name of a file in another encoding, has no bytes in UTF-8, but an
    # escape in JSON.
    with (
        whole_file(target) as beside,
        beside.open("w", encoding="utf-8", errors="backslashreplace") as file,
    ):
        file.writelines(_pieces(data, indent))
        file.write("\n")
    return None


def _pieces(data: dict[str, Any], indent: int | None) -> Iterator[str]:
    """The text, field by field and part by part."""
    encode = json.JSONEncoder(
        indent=indent, ensure_ascii=False, allow_nan=False, check_circular=False
    ).encode

    line, comma = ("", ", ") if indent is None else ("\n" + " " * indent, ",")

    def text_of(value: Any) -> str:
        # One level deeper; a line break in a string is an escape in JSON.
        return encode(value).replace("\n", line) if line else encode(value)

    def listed(parts: Iterator[list[Any]]) -> Iterator[str]:
        before = "["
        for part in filter(None, parts):
            yield before + text_of(part)[1:-1].rstrip()
            before = comma
        yield "[]" if before == "[" else f"{line}]"

    before = "{"
    for name, value in data.items():
        yield f"{before}{line}{encode(name)}: "
        yield from listed(value) if isinstance(value, Iterator) else (text_of(value),)
        before = comma
    end = "" if indent is None else "\n"
    yield f"{end}}}" if data else "{}"
