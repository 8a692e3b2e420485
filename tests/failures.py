"""What an exception carries."""

import torchlens as tl

__all__ = ["partial_history"]


def partial_history(error: BaseException) -> tl.ModelHistory:
    """The log up to where the model raised."""
    history = getattr(error, "partial_history", None)
    assert isinstance(history, tl.ModelHistory)
    return history
