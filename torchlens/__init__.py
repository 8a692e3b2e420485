"""Shows what a PyTorch model really does: every operation of a forward pass, in one line.

>>> import torchlens as tl
>>> history = tl.log_forward_pass(model, x)
"""

from torchlens.api import get_model_metadata, log_forward_pass, show_model_graph
from torchlens.errors import DifferentGraphError, DrawingError, NestedLogError, TorchLensError, ValueChangedError
from torchlens.history.layer_entry import LayerEntry
from torchlens.model_history import ModelHistory
from torchlens.validation import ValidationReport, validate_forward_pass, validate_saved_activations

__all__ = [
    "DifferentGraphError",
    "DrawingError",
    "LayerEntry",
    "ModelHistory",
    "NestedLogError",
    "TorchLensError",
    "ValidationReport",
    "ValueChangedError",
    "get_model_metadata",
    "log_forward_pass",
    "show_model_graph",
    "validate_forward_pass",
    "validate_saved_activations",
]
