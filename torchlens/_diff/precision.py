"""How much a model loses by computing in a shorter type: the reference runs again in the
candidate's.
"""

import torch

from torchlens._recording.relative_error import dense, numbers, relative_error
from torchlens._replay.entries import Entries
from torchlens._replay.replay import Replay

SHORT = {2.0**-7: torch.bfloat16, 2.0**-10: torch.float16}
# The tolerance is in units of rounding; a whole model in a short type is off by a quarter as much
# of its own error.
OWN_ERRORS = 4.0
_LEAST = 0.25  # of the unit of rounding: a value that happens to be exact says nothing
_MOST_PINNED = 0.3


def short_type(reference: Entries, candidate: Entries) -> torch.dtype | None:
    """The candidate's type if it is a short one, and the reference's is not."""
    return SHORT.get(candidate.epsilon) if reference.epsilon < candidate.epsilon else None


def own_errors(reference: Entries, dtype: torch.dtype) -> dict[int, float] | None:
    """For each entry, how far the reference in `dtype` is from the reference as it is; None if it
    cannot run again.
    """
    replay = Replay(reference)
    if not replay.is_live:
        return None
    values = replay.run(dtype=dtype)
    if len(replay.pinned) > _MOST_PINNED * reference.size:
        return None
    least = _LEAST * torch.finfo(dtype).eps
    found = {}
    for entry, value in values.items():
        own, short = reference.value(entry), dense(value)
        if (
            own is not None
            and short is not None
            and own.is_floating_point()
            and own.shape == short.shape
        ):
            error = relative_error(numbers(own), numbers(short))
            found[entry] = max(error, least) if error < float("inf") else least
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
