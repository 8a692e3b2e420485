"""Histories in files: saved and loaded, or written while a model runs."""

from torchlens.trace.files import TraceFiles, open_trace
from torchlens.trace.load import calls_of, load_call
from torchlens.trace.plain_text import printable
from torchlens.trace.save import save_history

__all__ = ["TraceFiles", "calls_of", "load_call", "open_trace", "printable", "save_history"]
