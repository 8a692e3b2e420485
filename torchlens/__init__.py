"""Shows what a PyTorch model really does: every operation of a forward pass, in one line.

>>> import torchlens as tl
>>> history = tl.log_forward_pass(model, x)
"""

from torchlens.api import get_model_metadata, log_forward_pass
from torchlens.errors import DifferentGraphError, NestedLogError, TorchLensError, ValueChangedError
from torchlens.history.layer_entry import LayerEntry
from torchlens.model_history import ModelHistory

__all__ = [
    "DifferentGraphError",
    "LayerEntry",
    "ModelHistory",
    "NestedLogError",
    "TorchLensError",
    "ValueChangedError",
    "get_model_metadata",
    "log_forward_pass",
]
