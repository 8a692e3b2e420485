"""The words for what can be measured: the same ones sort a history, sort a profile and colour a
diagram.
"""

from typing import Literal, TypeAlias, get_args

# Some have a longer name that tells them from others; both are accepted everywhere.
Measure: TypeAlias = Literal[
    "time", "forward_time", "backward_time", "total_time", "flops", "flops_backward", "memory",
    "output_bytes", "params",
    "parameters", "calls",
]  # fmt: skip
MEASURES: tuple[str, ...] = get_args(Measure)
_LONGER = {"forward_time": "time", "output_bytes": "memory", "parameters": "params"}


def short_word(word: str) -> str:
    """The shorter of two names for the same: `time` for `forward_time`."""
    return _LONGER.get(word, word)
