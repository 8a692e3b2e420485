"""Finds the history that an argument of a command names: a file, or a name in the user's own
code.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch

from torchlens._history.model_history import ModelHistory
from torchlens._recording.user_code import is_user_code
from torchlens._text.error_wording import did_you_mean, got
from torchlens.api import load, log_forward_pass
from torchlens.errors import TorchLensError

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_ACCEPTED = "a history, (model, input), or a function without arguments that returns one of these"


def history_of(text: str) -> ModelHistory:
    """The history in a file, or at `module:name` or `file.py:name`: a history, (model, input), or a
    function that returns one of these.
    """
    if not _is_name(text):
        return load(text)
    found = named_object(text)
    if callable(found) and not isinstance(found, torch.nn.Module):
        found = called(text, found)
    if isinstance(found, ModelHistory):
        return found
    if is_pair(found):
        return log_forward_pass(*found)
    raise TypeError(f"{text} must lead to {_ACCEPTED}, got {got(found)}.")


def is_pair(found: Any) -> bool:
    """Whether it is a model, of whatever framework, with its inputs, and maybe its keyword
    inputs.
    """
    return isinstance(found, tuple | list) and len(found) in (2, 3) and callable(found[0])


def called(text: str, function: Callable[[], Any]) -> Any:
    """The result of the user's function; its errors say where they were raised."""
    try:
        return function()
    except (TorchLensError, RuntimeError):  # these say enough themselves, or are shown whole
        raise
    except Exception as error:
        raise ValueError(
            f"{text} raised {type(error).__name__}: {error}{place_of(error)}."
        ) from error


def place_of(error: BaseException) -> str:
    """` (train.py:12)`, the last line of the user's own code on the way to an error; empty if there
    is none.

    Packages that are installed come into question only if there is no other code: some replace
    `sys.exit`.
    """
    lines = [
        (frame.f_code, line)
        for frame, line in walk_tb(error.__traceback__)
        if is_user_code(frame.f_code)
    ]
    own = [
        place for place in lines if not _INSTALLED.intersection(Path(place[0].co_filename).parts)
    ] or lines
    return f" ({Path(own[-1][0].co_filename).name}:{own[-1][1]})" if own else ""


def _is_name(text: str) -> bool:
    """Whether it names something in Python rather than a file; a colon also follows the letter of a
    drive.
    """
    place, colon, name = text.rpartition(":")
    return (
        bool(colon)
        and not Path(text).exists()
        and len(place) > 1
        and all(map(str.isidentifier, name.split(".")))
    )


def named_object(text: str) -> Any:
    """The object at `module:name` or `file.py:name`, searched for in the current folder, too."""
    place, _, name = text.rpartition(":")
    module = _imported(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, [known for known in vars(found) if not known.startswith("_")])
            raise ValueError(f"{place} has no {name!r}. {near}".rstrip())
        found = getattr(found, part)
    return found


def _imported(place: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if not place.endswith(".py"):
        return _module(place)
    path = Path(place).resolve()
    if not path.exists():
        raise FileNotFoundError(f"There is no file {place!r}.")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or name.split(".")[0] != error.name.split(".")[0]:
            raise  # something that the module itself imports
        raise ValueError(
            f"There is no module {name!r}, neither here ({Path.cwd()}) nor installed. A file is "
            f"named with its ending: {name.split('.')[0]}.py:name."
        ) from error
