"""Data as JSON: text, or a file."""

import json
import os
from typing import Any

from torchlens.wording import checked_file

__all__ = ["write_json"]


def write_json(data: Any, path: str | os.PathLike[str] | None, indent: int | None) -> str | None:
    """The text, or, with a path, nothing: it is in that file then."""
    text = json.dumps(data, indent=indent, ensure_ascii=False, allow_nan=False)
    if path is None:
        return text
    target = checked_file("path", path, "model.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n", encoding="utf-8")
    return None
