"""Data as JSON: text, or a file."""

import json
import os
from collections.abc import Iterator
from typing import Any

from torchlens.wording import checked_file

__all__ = ["write_json"]


def write_json(data: dict[str, Any], path: str | os.PathLike[str] | None, indent: int | None) -> str | None:
    """The text, or, with a path, nothing: it is in that file then.

    A field that is an iterator of lists becomes one long list. Only one of its parts is in memory at a time.
    """
    if path is None:
        return "".join(_pieces(data, indent))
    target = checked_file("path", path, "model.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", encoding="utf-8") as file:
        file.writelines(_pieces(data, indent))
        file.write("\n")
    return None


def _pieces(data: dict[str, Any], indent: int | None) -> Iterator[str]:
    """What `json.dumps` would write, field by field and part by part."""
    encode = json.JSONEncoder(indent=indent, ensure_ascii=False, allow_nan=False, check_circular=False).encode
    line, comma, end = ("", ", ", "") if indent is None else ("\n" + " " * indent, ",", "\n")

    def nested(text: str) -> str:
        return text.replace("\n", line) if line else text  # a line break inside a string is no such character

    yield "{"
    for number, (name, value) in enumerate(data.items()):
        yield f"{comma if number else ''}{line}{encode(name)}: "
        if isinstance(value, Iterator):
            yield "["
            is_empty = True
            for part in value:
                yield ("" if is_empty else comma) + nested(encode(part)[1:-1].removesuffix(end))
                is_empty = False
            yield "]" if is_empty else f"{line}]"
        else:
            yield nested(encode(value))
    yield f"{end if data else ''}}}"
