"""Logs every operation of a model's forward pass, in one line of code.

>>> import torchlens as tl
>>> history = tl.log_forward_pass(model, x)
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Our modules leave no garbage, but they are enough new objects for Python to look through all of
# torch's for some, which takes longer than importing them.
_is_collecting = gc.isenabled()
gc.disable()
try:
    from torchlens._compat.monitor_names import MONITOR_FUNCTIONS
    from torchlens._compat.torchlens_names import FUNCTION_NAMES, no_such_name
    from torchlens._history.layer_entry import LayerEntry
    from torchlens._history.model_history import ModelHistory
    from torchlens.api import (
        assert_same_structure,
        compare,
        current_run,
        diff,
        edit,
        explore_together,
        extract,
        get_model_metadata,
        load,
        log_calls,
        log_forward_pass,
        magnify,
        monitor,
        open_features,
        open_run,
        profile,
        read_trace,
        show_model_graph,
        tail,
        validate_forward_pass,
        validate_saved_activations,
    )
    from torchlens.errors import (
        CannotCompareError,
        DifferentGraphError,
        DrawingError,
        EditError,
        FeaturesError,
        NestedLogError,
        NonFiniteError,
        NotReplayableError,
        TorchLensError,
        TraceError,
        ValueChangedError,
    )
finally:
    if _is_collecting:
        gc.enable()

if TYPE_CHECKING:
    from torchlens._diff.result import Diff
    from torchlens._health.finding import Finding
    from torchlens._monitor.read.reader import RunReader
    from torchlens._monitor.record.run import Run
    from torchlens._profile.profile import Profile
    from torchlens._validate.report import ValidationReport

__all__ = [
    "CannotCompareError",
    "Diff",
    "DifferentGraphError",
    "DrawingError",
    "EditError",
    "FeaturesError",
    "Finding",
    "LayerEntry",
    "ModelHistory",
    "NestedLogError",
    "NonFiniteError",
    "NotReplayableError",
    "Profile",
    "Run",
    "RunReader",
    "TorchLensError",
    "TraceError",
    "ValidationReport",
    "ValueChangedError",
    "assert_same_structure",
    "compare",
    "current_run",
    "diff",
    "edit",
    "explore_together",
    "extract",
    "get_model_metadata",
    "load",
    "log_calls",
    "log_forward_pass",
    "magnify",
    "monitor",
    "open_features",
    "open_run",
    "profile",
    "read_trace",
    "show_model_graph",
    "tail",
    "validate_forward_pass",
    "validate_saved_activations",
]

__version__ = "1.0.0"

# Types of features, which are imported when one of these names is first used.
_IMPORTED_ON_USE = {
    "Diff": "torchlens._diff.result",
    "Finding": "torchlens._health.finding",
    "Profile": "torchlens._profile.profile",
    "Run": "torchlens._monitor.record.run",
    "RunReader": "torchlens._monitor.read.reader",
    "ValidationReport": "torchlens._validate.report",
}
# Submodules that users reach as attributes, as in `torchlens.sinks.TensorBoard`.
_MODULES = ("callbacks", "edits", "features", "sinks")
# The classic TorchLens's names for the types of an entry and of a layer with all its passes.
_CLASSIC = {
    "TensorLogEntry": ("torchlens._history.layer_entry", "LayerEntry"),
    "RolledTensorLogEntry": ("torchlens._history.classic_history", "RolledLayer"),
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
        no_such_name(
            f"module {__name__!r}",
            "attribute",
            name,
            FUNCTION_NAMES | MONITOR_FUNCTIONS,
            __all__,
            listing,
        ),
        name=name,
    )


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__version__"]
