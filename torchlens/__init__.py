"""Shows what a PyTorch model really does: every operation of a forward pass, in one line.

>>> import torchlens as tl
>>> history = tl.log_forward_pass(model, x)
"""

from torchlens.api import get_model_metadata, log_forward_pass, profile, show_model_graph
from torchlens.errors import (
    DifferentGraphError,
    DrawingError,
    NestedLogError,
    NonFiniteError,
    TorchLensError,
    ValueChangedError,
)
from torchlens.history.layer_entry import LayerEntry
from torchlens.model_history import ModelHistory
from torchlens.profile import Finding, Profile
from torchlens.validation import ValidationReport, validate_forward_pass, validate_saved_activations

__all__ = [
    "DifferentGraphError",
    "DrawingError",
    "Finding",
    "LayerEntry",
    "ModelHistory",
    "NestedLogError",
    "NonFiniteError",
    "Profile",
    "TorchLensError",
    "ValidationReport",
    "ValueChangedError",
    "get_model_metadata",
    "log_forward_pass",
    "profile",
    "show_model_graph",
    "validate_forward_pass",
    "validate_saved_activations",
]
