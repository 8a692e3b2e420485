"""Numbers as people read them: the only place that turns a shape, size, time or count into text.

| function | text |
|---|---|
| `shape_text((1, 384, 13, 13))` | `1x384x13x13`; `(384,)` for one dimension, `scalar` for none |
| `bytes_text(259_584)` | `253.5 KB` |
| `seconds_text(0.00123)` | `1.23 ms` |
| `count_text(11_700_000)` | `11.7 M`; `count_text(1.82e9, 'FLOP')` is `1.82 GFLOP` |
| `counted(2, 'tensor')` | `2 tensors` |
| `share_text(1, 8)` | `12.5%` |
| `first_few(['a', 'b', 'c'], 2)` | `a, b and 1 more` |

Sizes may be symbolic (`torchlens._recording.symbolic.SymbolicInt`): those print as expressions,
`16*s0 B`. Tables are laid out by `torchlens._text.grid`.
"""

from collections.abc import Iterable, Sequence
from typing import Any


def shape_text(shape: Iterable[int]) -> str:
    """`8x64x56x56`, `(64,)`, or `scalar`. Sizes that vary within a nested tensor are `?`.

    One dimension has parentheses because `x64` and a lone `64` read as a number of passes.
    """
    sizes = ["?" if size < 0 and not _is_symbolic(size) else str(size) for size in shape]
    if len(sizes) == 1:
        return f"({sizes[0]},)"
    return "x".join(sizes) or "scalar"


def bytes_text(value: float) -> str:
    """`253.5 KB`, `-4.0 MB`, or `16*s0 B` where sizes are symbolic."""
    if _is_symbolic(value):
        return _symbolic_text(value, bytes_text, " B")
    if value < 0:
        return f"-{bytes_text(-value)}"
    size = float(value)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"


def seconds_text(value: float) -> str:
    """`1.23 ms`"""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {unit}"
    return f"{_three_digits(value * 1e6)} µs" if value else "0 s"


def count_text(value: float, unit: str = "") -> str:
    """`11.7 M`, `1.82 GFLOP` with the unit `FLOP`, or `70*s0` where sizes are symbolic."""
    if _is_symbolic(value):
        return _symbolic_text(value, count_text, f" {unit}".rstrip())
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def counted(number: int, noun: str) -> str:
    """`1 tensor`, `2,048 tensors`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_few(names: Sequence[str], most: int = 3) -> str:
    """`a, b and 4 more`"""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def share_text(part: float, whole: float = 1.0) -> str:
    """`12.5%`, or `-` if the whole is zero."""
    return f"{part / whole:.1%}" if whole else "-"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _is_symbolic(value: Any) -> bool:
    return hasattr(value, "expression")


def _symbolic_text(value: Any, as_number: Any, unit: str) -> str:
    return str(value.shown(as_number, unit))
