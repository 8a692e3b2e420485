"""Numbers as people read them."""

from torchlens._recording.symbolic import SymbolicInt


def count_text(value: float) -> str:
    """`11.7 M`, or `70*s0` where sizes are symbolic."""
    if isinstance(value, SymbolicInt):
        return value.shown(count_text)
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {unit}"
    return f"{value:.0f}"


def seconds_text(value: float) -> str:
    """`1.23 ms`"""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {unit}"
    return f"{_three_digits(value * 1e6)} µs" if value else "0 s"


def shape_text(shape: tuple[int, ...]) -> str:
    """`8x64x56x56`; sizes that vary within a nested tensor are `?`, symbolic ones are
    expressions.
    """
    return (
        "x".join(
            "?" if size < 0 and not isinstance(size, SymbolicInt) else str(size) for size in shape
        )
        or "scalar"
    )


def _three_digits(value: float) -> str:
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )
