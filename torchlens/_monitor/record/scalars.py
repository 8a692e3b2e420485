"""Numbers that the user logs, on their way to the file."""

from typing import Any

import numpy as np
import torch

from torchlens._recording.unseen import call_unseen
from torchlens._text.problems import Problems
from torchlens._text.wording import got

_MOST_SCALARS = 100_000


class PendingScalars(list[tuple[str, int, Any]]):
    """(name, step, value) of what was logged since it was last handed over."""

    def keep_small(self, problems: Problems) -> None:
        """Lets go of the oldest where nothing is handed over."""
        if len(self) > _MOST_SCALARS:
            del self[: len(self) - _MOST_SCALARS]
            problems.add(
                f"More than {_MOST_SCALARS:,} scalars were logged in one step: only the last are "
                "kept"
            )


def scalar_value(name: str, value: Any) -> Any:
    """A number, or a tensor that is not waited for; None where a tensor has no value (inside a
    transform).
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            kind = "complex " if value.is_complex() else "meta " if value.is_meta else ""
            raise ValueError(
                f"{name} must be a number or a tensor of one real element, got "
                f"{got(value).replace('a ', f'a {kind}', 1)}."
            )
        return call_unseen(_copied, value)
    if isinstance(value, bool) or not hasattr(type(value), "__float__") or np.iscomplexobj(value):
        raise TypeError(
            f"{name} must be a number or a tensor of one real element, got {got(value)}."
        )
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{name} must be a number that fits in a float, at most 1.8e308, got a larger one."
        ) from None
    except (TypeError, ValueError):  # NumPy's arrays of several elements
        raise TypeError(
            f"{name} must be a number or a tensor of one real element, got {got(value)}."
        ) from None


def _copied(value: torch.Tensor) -> Any:
    """A number now where that costs nothing; on another device a copy, to be sent along."""
    return float(value) if value.device.type == "cpu" else value.detach().float().reshape(1).clone()
