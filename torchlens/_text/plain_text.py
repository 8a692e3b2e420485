"""Text from a file, made safe to show: a terminal obeys escape codes, and the file may come from a
stranger.
"""

import re
from typing import Any

_LONGEST = 120
# Characters that move the cursor, change colours, ring or hide text: control characters, and
# those that change the direction of writing.
_ODD = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str, longest: int | None = None) -> str:
    """The text with control characters written as escapes (`\\x1b`), cut to a length."""
    if longest is not None and len(text) > longest:
        text = f"{text[: max(longest - 1, 0)]}…"
    return _ODD.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)


def shown(value: Any) -> str:
    """Text from outside, made safe for a message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    return printable(repr(value), _LONGEST)
