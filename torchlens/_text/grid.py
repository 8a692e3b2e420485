"""A table of texts, laid out to fit a width."""

from collections.abc import Sequence
from dataclasses import dataclass

_GAP = "  "
# A text is cut down to this before a column is left out.
_NARROWEST = 14


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading and texts. A narrow table leaves out the column of the highest rank
    first, and never one of rank 0.
    """

    heading: str
    texts: Sequence[str]
    rank: int = 0
    is_number: bool = True  # aligned to the right, never cut

    @property
    def width(self) -> int:
        return max(map(len, (self.heading, *self.texts)))

    @property
    def is_empty(self) -> bool:
        return {"", "-"}.issuperset(self.texts)


def laid_out(columns: Sequence[Column], width: int) -> list[str]:
    """Heading, rule and rows. Texts that do not fit are cut, then columns are left out; an empty
    column is always left out.
    """
    shown = [column for column in columns if column.rank == 0 or not column.is_empty]
    widths = _fitted(shown, width)
    while _total(widths) > width and any(column.rank for column in shown):
        shown.remove(max(shown, key=lambda column: column.rank))
        widths = _fitted(shown, width)
    cells = [
        [_cell(column, text, size) for text in (column.heading, *column.texts)]
        for column, size in zip(shown, widths, strict=True)
    ]
    heading, *rows = [_GAP.join(row).rstrip() for row in zip(*cells, strict=True)]
    return [heading, "-" * _total(widths), *rows]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _fitted(columns: Sequence[Column], width: int) -> list[int]:
    """Widths that fit, if cutting texts is enough: the widest texts are cut first."""
    widths = [column.width for column in columns]
    excess = _total(widths) - width
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
