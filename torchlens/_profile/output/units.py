"""Numbers of each unit as people read them."""

from collections.abc import Callable

from torchlens._text.numbers import bytes_text, count_text, seconds_text, shape_text


def shapes_text(shapes: list[tuple[int, ...]]) -> str:
    """`8x64x56x56`, and `+1` where there are more."""
    if not shapes:
        return ""
    return (
        shape_text(shapes[0]) if len(shapes) == 1 else f"{shape_text(shapes[0])} +{len(shapes) - 1}"
    )


def text_of(unit: str) -> Callable[[float], str]:
    """How numbers of a unit are written."""
    return {"seconds": seconds_text, "bytes": bytes_text}.get(unit, count_text)
