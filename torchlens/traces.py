"""The public functions for files: check the options, then call `trace`."""

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from torchlens.capture.collector import without_collector
from torchlens.capture.user_code import warn_caller
from torchlens.frameworks import Model, OtherModel, as_model
from torchlens.lazy_import import lazy_function
from torchlens.model_history import ModelHistory
from torchlens.options import check_model
from torchlens.trace import Tail, calls_of, chosen_layers, load_call, open_trace, overview, printable, read_pattern
from torchlens.wording import check_count, checked_file, got

jax_tail = lazy_function("torchlens.trace.jax_tailing", "JaxTail")

__all__ = ["load", "magnify", "read_trace", "tail"]

_Model = TypeVar("_Model", bound=Model)
_ROOM = 1 << 20


def load(path: str | os.PathLike[str], call: int | None = None) -> ModelHistory:
    """Opens a history that `history.save(path)` wrote, or one of the calls that `tail` recorded (by default the first).

    Labels, tables, drawings, pages and summaries work at once; a value is read from the file when you ask for it. The file
    may come from anyone: nothing in it is executed. Functions and autograd's nodes are not stored: a stand-in has the name
    of the function, and raises an error when called.

    >>> history = load('trace.safetensors')
    >>> history['conv2d_1'].tensor_contents
    """
    return without_collector(lambda: _load(path, call))  # it makes many objects, none of them garbage


def _load(path: str | os.PathLike[str], call: int | None) -> ModelHistory:
    files = open_trace(path)
    calls = calls_of(files)
    if call is None:
        call = calls[0]
        if len(calls) > 1:
            warn_caller(
                f"torchlens: {printable(files.path.name)} holds {len(calls)} calls of the model, and this is the first. "
                f"Choose with load(path, call=...), from {calls[0]} to {calls[-1]}."
            )
    if files.missing:
        warn_caller(f"torchlens: {printable(files.path.name)} was not closed. Missing: {'; '.join(files.missing)}.")
    check_count("call", call, 1)
    if call not in calls:
        raise ValueError(
            f"call must be one of those in {printable(files.path.name)}, {calls[0]} to {calls[-1]}, got {call}."
        )
    return load_call(files, call, ModelHistory)


def tail(
    model: _Model,
    path: str | os.PathLike[str] = "trace.safetensors",
    layers: "str | Sequence[str] | Callable[[list[str], Any], bool]" = "all",
    every: int = 1,
    params: bool = False,
    max_bytes: int | None = None,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> Tail[_Model]:
    """Records every call of a model inside the `with` block to a safetensors file, each call separately.

    Values are written while the model and the loop around it run. Entering the block gives the model itself, which behaves
    as it would without the recording. If something goes wrong, the recording ends with a warning, and the loop continues.

    >>> with tail(model, 'trace.safetensors') as m:
    ...     m(x)
    >>> load('trace.safetensors')

    Args:
        model: Any `nn.Module`, or a JAX callable, for which entering the block gives a function to call in its place. A
            jitted function stays one compiled program, which also returns the recorded arrays.
        path: The file. While it is being written, it consists of a `.partial` and a `.journal` file.
        layers: `'all'` for every operation; modules by address or pattern (`'features.*'`), whose outputs are recorded;
            names in the file (`'features.*/relu'`, every pass of it; `'/relu:2'` is the second outside any module); or a
            function of the path of a module (a list) and the module.
        every: 2 records every second call.
        params: Whether to write the parameters as well, as they are at the first call.
        max_bytes: Once the file has this many bytes, further calls are counted but not recorded.
        max_shard_bytes: Beyond this size, another file is started, and an index of all of them is written.
    """
    own = as_model(model)
    check_model(own)
    target = checked_file("path", path, "trace.safetensors")
    check_count("every", every, 1)
    check_count("max_shard_bytes", max_shard_bytes, 1)
    if max_bytes is not None:
        check_count("max_bytes", max_bytes, 1)
    if not isinstance(params, bool):
        raise TypeError(f"params must be True or False, got {got(params)}.")
    if isinstance(own, OtherModel):
        tailing: Any = jax_tail(own, target, layers, every, params, max_bytes, max_shard_bytes, _ROOM)
        return tailing
    assert isinstance(model, torch.nn.Module)
    return Tail(model, target, chosen_layers(model, layers), every, params, max_bytes, max_shard_bytes, _ROOM)


def magnify(path: str | os.PathLike[str], key: str | None = None, depth: int = 1, call: int | None = None) -> None:
    """Prints the modules and operations in a trace, with statistics of their values; with a key, one of them in detail.

    >>> magnify('trace.safetensors')
    >>> magnify('trace.safetensors', 'features.0')
    """
    found = overview(open_trace(path), key, depth, call)
    print(found.text(shutil.get_terminal_size((100, 24)).columns))  # noqa: T201 (printing is what it is for)


def read_trace(path: str | os.PathLike[str], pattern: str | None = None) -> dict[str, Any]:
    """Returns the values in a trace by name, in the order in which they were made; with a pattern, those that match it.

    A pattern is part of a name, or contains the wildcards `*` and `?`: `'features.0'`, `'2/*/relu'`. Any safetensors file
    can be read.

    >>> read_trace('trace.safetensors', 'act*')
    """
    if pattern is not None and not isinstance(pattern, str):
        raise TypeError(f"pattern must be text, such as 'features.*', got {got(pattern)}.")
    return dict(read_pattern(open_trace(path), pattern))
