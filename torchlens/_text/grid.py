"""A table of texts, laid out to fit a width."""

from collections.abc import Sequence
from dataclasses import dataclass

_GAP = "  "
# A text is cut down to this before a column is left out.
_NARROWEST = 14


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading and texts. The higher its rank, the sooner a narrow table goes
    without it.
    """

    heading: str
    texts: Sequence[str]
    rank: int = 0
    is_number: bool = True  # to the right, and never cut

    @property
    def width(self) -> int:
        return max(len(self.heading), max(map(len, self.texts), default=0))


def laid_out(columns: Sequence[Column], width: int) -> list[str]:
    """Heading, rule and rows. What does not fit is cut, then left out; a column that says nothing
    is left out anyway.
    """
    shown = [
        column
        for column in columns
        if column.rank == 0 or any(text not in ("", "-") for text in column.texts)
    ]
    while True:
        widths = _fitted(shown, width)
        excess = sum(widths) + len(_GAP) * (len(shown) - 1) - width
        dispensable = max(shown, key=lambda column: column.rank)
        if excess <= 0 or dispensable.rank == 0:
            break
        shown = [column for column in shown if column is not dispensable]
    headings = [
        _cell(column, column.heading, size) for column, size in zip(shown, widths, strict=True)
    ]
    lines = [_GAP.join(headings).rstrip(), "-" * (sum(widths) + len(_GAP) * (len(shown) - 1))]
    for number in range(len(shown[0].texts)):
        cells = [
            _cell(column, column.texts[number], size)
            for column, size in zip(shown, widths, strict=True)
        ]
        lines.append(_GAP.join(cells).rstrip())
    return lines


def _fitted(columns: Sequence[Column], width: int) -> list[int]:
    """Widths that fit, if cutting texts is enough: the widest texts are cut first."""
    widths = [column.width for column in columns]
    excess = sum(widths) + len(_GAP) * (len(columns) - 1) - width
    flexible = [number for number, column in enumerate(columns) if not column.is_number]
    while excess > 0 and flexible:
        widest = max(flexible, key=lambda number: widths[number])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
        excess -= 1
    return widths


def _cell(column: Column, text: str, width: int) -> str:
    return text.rjust(width) if column.is_number else _shortened(text, width).ljust(width)


def _shortened(text: str, width: int) -> str:
    """The end of a long address tells more than its beginning."""
    if len(text) <= width:
        return text
    indent = text[: len(text) - len(text.lstrip())]
    kept = width - len(indent) - 1
    return f"{indent}…{text[-kept:]}" if kept > 3 else f"…{text[-(width - 1) :]}"
