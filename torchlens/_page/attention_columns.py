"""The attention weights of a page: a small picture per head, of the first example."""

import base64
from collections.abc import Sequence
from typing import Any

import torch

from torchlens._attention.attention import calls_of_attention, small_attention
from torchlens._history.log import Log
from torchlens._page.parts import ChosenParts

_SIDE = 32
_MOST_HEADS = 32
_MOST_CALLS = 256


def attention_columns(log: Log, chosen: ChosenParts) -> dict[str, list[Any]]:
    """One row per attention that the page carries and that can be rebuilt.

    `entry` is the page's number of the result, `high` the largest weight of each head, `heads` the
    weights as bytes, head by head.
    """
    columns: dict[str, list[Any]] = {
        name: [] for name in ("entry", "rows", "cols", "queries", "keys", "high", "heads")
    }
    carried = [entry for entry in chosen.entries if entry < len(log.graph.recorded)]
    calls = [entry for entry in calls_of_attention(log, carried) if log.is_saved(entry)]
    for call in calls[:_MOST_CALLS]:
        try:
            weights, queries, keys = small_attention(log, call, _SIDE)
        except ValueError:  # it cannot be rebuilt, or not from what was saved
            continue
        high = weights.amax((1, 2))
        scaled = (weights / high[:, None, None].clamp(min=1e-12) * 254).round().byte()
        row: Sequence[Any] = (
            *chosen.numbers([call]), *weights.shape[1:], queries, keys,
            [float(f"{float(own):.4g}") for own in high[:_MOST_HEADS]], _text(scaled[:_MOST_HEADS]),
        )  # fmt: skip
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    return columns


def _text(pictures: torch.Tensor) -> str:
    return base64.b64encode(pictures.cpu().numpy().tobytes()).decode("ascii")
