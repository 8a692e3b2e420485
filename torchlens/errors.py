"""The exceptions that torchlens defines.

    TorchLensError
    ├── CannotCompareError      two histories cannot be compared: no values, or other inputs
    ├── NestedLogError          a log was started inside a log of the same thread
    ├── DifferentGraphError     another run of the model did different operations from the log's
    ├── EditError               an edit had no effect, or its effect cannot be known
    │   └── NotReplayableError  recorded calls cannot run again: the message says why
    ├── DrawingError            Graphviz is missing, or could not draw a graph
    ├── FeaturesError           a folder is not one of features, was made otherwise, or is in use
    ├── NonFiniteError          a profile with stop=True met NaN or Inf
    ├── TraceError              a file is not a trace, or is damaged
    └── ValueChangedError       a saved tensor was changed in place after it was saved

Bad arguments raise ``TypeError`` or ``ValueError``, unknown layers ``KeyError`` or ``IndexError``.
An exception that the model raises comes through unchanged.
"""

__all__ = [
    "CannotCompareError",
    "DifferentGraphError",
    "DrawingError",
    "EditError",
    "FeaturesError",
    "NestedLogError",
    "NonFiniteError",
    "NotReplayableError",
    "TorchLensError",
    "TraceError",
    "ValueChangedError",
]


class TorchLensError(Exception):
    """The base class of all exceptions that torchlens defines."""


class CannotCompareError(TorchLensError):
    """Two histories cannot be compared: nothing was saved, or their inputs differ."""


class NestedLogError(TorchLensError):
    """A log was started while the same thread was already logging."""


class DifferentGraphError(TorchLensError):
    """Two runs of a model that should have done the same operations did different ones."""


class DrawingError(TorchLensError):
    """Graphviz is missing or failed. The DOT source is written all the same."""


class EditError(TorchLensError):
    """An edit had no effect, or its effect cannot be known from the recorded calls."""


class NotReplayableError(EditError):
    """Recorded calls cannot run again, or would not give what the model gives."""


class FeaturesError(TorchLensError):
    """A folder holds no features, damaged ones, or features that were made with other settings."""


class NonFiniteError(TorchLensError):
    """An operation made NaN or Inf, forward or backward."""


class TraceError(TorchLensError):
    """A file is not a trace, is damaged, or does not contain what was asked for."""


class ValueChangedError(TorchLensError):
    """A saved tensor no longer holds the value it was saved with."""
