"""The exceptions torchlens raises on its own account.

    TorchLensError
    ├── CannotCompareError      two histories cannot be compared: nothing was saved, or they had other inputs
    ├── NestedLogError          a log was started inside a log of the same thread
    ├── DifferentGraphError     a second run of the model did not do what the first one did
    ├── DrawingError            no picture could be made of a graph
    ├── NonFiniteError          a profile was to stop at the first NaN or Inf, and there was one
    ├── TraceError              a file is no trace, or is damaged
    └── ValueChangedError       a saved tensor was changed in place after it was saved

Bad arguments are plain ``TypeError`` and ``ValueError``; unknown layers are plain ``KeyError`` and ``IndexError``; an
exception of the model's own comes through as it is.
"""

__all__ = [
    "CannotCompareError",
    "DifferentGraphError",
    "DrawingError",
    "NestedLogError",
    "NonFiniteError",
    "TorchLensError",
    "TraceError",
    "ValueChangedError",
]


class TorchLensError(Exception):
    """Whatever torchlens itself has to complain about."""


class CannotCompareError(TorchLensError):
    """Two histories of which nobody can say where they part."""


class NestedLogError(TorchLensError):
    """A log was started while the same thread was already logging."""


class DifferentGraphError(TorchLensError):
    """Two runs of a model that should have done the same operations did not."""


class DrawingError(TorchLensError):
    """No picture could be made. Its DOT source could."""


class NonFiniteError(TorchLensError):
    """An operation made NaN or Inf, forward or backward."""


class TraceError(TorchLensError):
    """A file cannot be read as a trace: it is none, it is damaged, or what is asked for is not in it."""


class ValueChangedError(TorchLensError):
    """A saved tensor no longer holds the value it was saved with."""
