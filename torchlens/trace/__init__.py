"""Histories in files: saved and loaded, or written while a model runs."""

from torchlens.foreign_names import refuse_calls
from torchlens.trace.files import TraceFiles
from torchlens.trace.load import calls_of, load_call
from torchlens.trace.opening import open_trace
from torchlens.trace.overview import Overview, overview
from torchlens.trace.plain_text import printable
from torchlens.trace.reading import read_pattern
from torchlens.trace.save import save_history
from torchlens.trace.tailing import Tail, chosen_layers

__all__ = [
    "Overview",
    "Tail",
    "TraceFiles",
    "calls_of",
    "chosen_layers",
    "load_call",
    "open_trace",
    "overview",
    "printable",
    "read_pattern",
    "save_history",
]

refuse_calls(__name__, "To log a model: torchlens.log_forward_pass(model, x).")
