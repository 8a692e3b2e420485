"""The public functions for files: check the options, then call the room `trace`."""

import os

from torchlens.capture.user_code import warn_caller
from torchlens.model_history import ModelHistory
from torchlens.trace import calls_of, load_call, open_trace, printable
from torchlens.wording import check_count, got

__all__ = ["load"]


def load(path: str | os.PathLike[str], call: int | None = None) -> ModelHistory:
    """The history that `history.save(path)` wrote, or one call of those that `tail` did; the first if none is named.

    Labels, tables, drawings, pages and summaries work at once; a value is read from the file when it is asked for. The file
    may come from anywhere: nothing in it is run. Functions and autograd's nodes are left behind: what stands for a function
    has its name, and says so when it is called.

    >>> history = load('trace.safetensors')
    >>> history['conv2d_1'].tensor_contents
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must name a file, such as 'trace.safetensors', got {got(path)}.")
    files = open_trace(path)
    calls = calls_of(files)
    if call is None:
        call = calls[0]
        if len(calls) > 1:
            warn_caller(
                f"torchlens: {printable(files.path.name)} holds {len(calls)} calls of the model, and this is the first. "
                f"Choose with load(path, call=...), from {calls[0]} to {calls[-1]}."
            )
    check_count("call", call, 1)
    if call not in calls:
        raise ValueError(
            f"call must be one of those in {printable(files.path.name)}, {calls[0]} to {calls[-1]}, got {call}."
        )
    return load_call(files, call, ModelHistory)
