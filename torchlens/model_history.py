"""The log of one forward pass, as the user holds it: the history, and what the rooms behind it can do with it."""

from torchlens.history.base_history import BaseHistory

__all__ = ["ModelHistory"]


class ModelHistory(BaseHistory):
    """Every operation of a forward pass, in order. Index it by label, module, address or number.

    >>> history['conv2d_3_7'].tensor_contents
    >>> history['features.6'], history[7], history[-17]
    """
