"""Logs every operation of a model's forward pass, in one line of code.

>>> import torchlens as tl
>>> history = tl.log_forward_pass(model, x)
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Our modules leave no garbage, but they are enough new objects for Python to look through all of torch's for some, which
# takes longer than importing them.
_is_collecting = gc.isenabled()
gc.disable()
try:
    from torchlens.api import get_model_metadata, log_forward_pass, show_model_graph
    from torchlens.errors import (
        CannotCompareError,
        DifferentGraphError,
        DrawingError,
        NestedLogError,
        NonFiniteError,
        TorchLensError,
        TraceError,
        ValueChangedError,
    )
    from torchlens.foreign_names import FUNCTION_NAMES, no_such_name
    from torchlens.history.layer_entry import LayerEntry
    from torchlens.model_history import ModelHistory
    from torchlens.watch_names import MONITOR_FUNCTIONS
finally:
    if _is_collecting:
        gc.enable()

if TYPE_CHECKING:
    from torchlens.differences import Diff, diff
    from torchlens.measure import compare, profile
    from torchlens.monitoring import Run, RunReader
    from torchlens.profiling import Finding, Profile
    from torchlens.runs import current_run, monitor, open_run
    from torchlens.traces import load, magnify, read_trace, tail
    from torchlens.validation import ValidationReport, validate_forward_pass, validate_saved_activations
    from torchlens.viewer import explore_together

__all__ = [
    "CannotCompareError",
    "Diff",
    "DifferentGraphError",
    "DrawingError",
    "Finding",
    "LayerEntry",
    "ModelHistory",
    "NestedLogError",
    "NonFiniteError",
    "Profile",
    "Run",
    "RunReader",
    "TorchLensError",
    "TraceError",
    "ValidationReport",
    "ValueChangedError",
    "compare",
    "current_run",
    "diff",
    "explore_together",
    "get_model_metadata",
    "load",
    "log_forward_pass",
    "magnify",
    "monitor",
    "open_run",
    "profile",
    "read_trace",
    "show_model_graph",
    "tail",
    "validate_forward_pass",
    "validate_saved_activations",
]

__version__ = "0.1.0"

# Parts of the package that not every program needs are imported when one of these names is first used.
_IMPORTED_ON_USE = {
    "Diff": "torchlens.differences",
    "Finding": "torchlens.profiling",
    "Profile": "torchlens.profiling",
    "Run": "torchlens.monitoring",
    "RunReader": "torchlens.monitoring",
    "ValidationReport": "torchlens.validation",
    "compare": "torchlens.measure",
    "current_run": "torchlens.runs",
    "diff": "torchlens.differences",
    "explore_together": "torchlens.viewer",
    "load": "torchlens.traces",
    "magnify": "torchlens.traces",
    "monitor": "torchlens.runs",
    "open_run": "torchlens.runs",
    "profile": "torchlens.measure",
    "read_trace": "torchlens.traces",
    "tail": "torchlens.traces",
    "validate_forward_pass": "torchlens.validation",
    "validate_saved_activations": "torchlens.validation",
}
# Submodules that users reach as attributes, as in `torchlens.sinks.TensorBoard`.
_MODULES = ("callbacks", "sinks")
# The classic TorchLens's names for the types of an entry and of a layer with all its passes.
_CLASSIC = {
    "TensorLogEntry": ("torchlens.history.layer_entry", "LayerEntry"),
    "RolledTensorLogEntry": ("torchlens.history.classic", "RolledLayer"),
}


def __getattr__(name: str) -> Any:
    if name in _CLASSIC:
        return getattr(import_module(_CLASSIC[name][0]), _CLASSIC[name][1])
    if name in _IMPORTED_ON_USE:
        value = globals()[name] = getattr(import_module(_IMPORTED_ON_USE[name]), name)
        return value
    if name in _MODULES:
        return import_module(f"torchlens.{name}")
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    listing = f"Available: {', '.join(__all__)}."
    raise AttributeError(
        no_such_name(f"module {__name__!r}", "attribute", name, FUNCTION_NAMES | MONITOR_FUNCTIONS, __all__, listing),
        name=name,
    )


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__version__"]
