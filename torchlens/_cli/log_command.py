"""`torchlens log TARGET --save F`: run a model once and save its log, without writing a script.

TARGET names something in a module or a file, `package.module:Model` or `train.py:build`: a model, a
class of models that takes no arguments, or a function that returns a model, a pair of model and
arguments, or a history. The model may be one of JAX.
"""

import inspect
import re
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch

from torchlens._cli.live import called, is_pair, named_object
from torchlens._cli.terminal import paint, say, width
from torchlens._history.model_history import ModelHistory
from torchlens._recording.frameworks import OtherModel, as_model, is_for_jax
from torchlens._recording.unseen import GradMode
from torchlens._text.error_wording import got
from torchlens._text.plain_text import printable
from torchlens._trace.files import open_trace
from torchlens._trace.overview import overview
from torchlens.api import log_forward_pass

HELP = (
    "run a model once and save its log: torchlens log module:Model --input 1x3x224x224 --save "
    "f.safetensors"
)
_INPUT = re.compile(r"(?P<shape>scalar|\d+(?:x\d+)*)(?::(?P<dtype>[a-z]\w*))?(?:<(?P<end>\d+))?")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="module:name or file.py:name; a model, its class, or a function",
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE",
        help="a random input; repeat for several: 1x3x224x224, 2x12:int64<50 (whole numbers below "
        "50)",
    )
    parser.add_argument(
        "--save", "-o", type=Path, metavar="F", help="the file to write (default: NAME.safetensors)"
    )
    parser.add_argument("--params", action="store_true", help="also save the model's parameters")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="for weights and inputs (default 0)"
    )
    parser.add_argument("--train", action="store_true", help="leave the model in training mode")


def run(arguments: Namespace) -> int:
    torch.manual_seed(arguments.seed)
    where, _, name = arguments.target.rpartition(":")
    if not where or not name:
        raise ValueError(
            f"TARGET must be module:name or file.py:name, got {printable(arguments.target)!r}."
        )
    found = named_object(arguments.target)
    history = _history_of(found, arguments)
    path = arguments.save or Path(f"{name}.safetensors")
    history.save(path, params=arguments.params)
    say(overview(open_trace(path)).text(width(), paint))
    return 0


def _history_of(found: Any, arguments: Namespace) -> ModelHistory:
    if not isinstance(found, torch.nn.Module) and callable(found):
        found = called(arguments.target, found)
    if isinstance(found, ModelHistory):
        return found
    found, inputs, kwargs = _with_inputs(found, arguments.input)
    model = as_model(found, inputs, kwargs)
    if not isinstance(model, torch.nn.Module | OtherModel):
        raise TypeError(
            "TARGET must be a model, a class of models, or a function that returns a model, a "
            f"pair of model and arguments, or a history, got {got(found)}."
        )
    if isinstance(model, torch.nn.Module) and not arguments.train:
        model.eval()
    if inputs is None and not kwargs:
        _check_needs_no_inputs(model, arguments.target)
    with GradMode(False):
        return log_forward_pass(found, inputs, kwargs)


def _with_inputs(found: Any, given: list[str]) -> tuple[Any, Any, Any]:
    """The model, its inputs and its keyword inputs; inputs of the command line come first."""
    inputs: Any = [_random_input(text) for text in given] or None
    kwargs = None
    if is_pair(found):
        found, own, *rest = found
        inputs, kwargs = own if inputs is None else inputs, rest[0] if rest else None
    if given and is_for_jax(found):
        inputs = [tensor.numpy() for tensor in inputs]
    return found, inputs, kwargs


def _check_needs_no_inputs(model: torch.nn.Module | OtherModel, target: str) -> None:
    needed = _needed_inputs(model)
    if needed:
        raise ValueError(
            f"{target} needs inputs ({', '.join(needed)}): give --input SHAPE for each, "
            "such as --input 1x3x224x224, or name a function that returns the model and its "
            "inputs."
        )


def _needed_inputs(model: torch.nn.Module | OtherModel) -> list[str]:
    """The arguments that a model cannot do without."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # written in C, or scripted
        return []
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]


def _random_input(text: str) -> torch.Tensor:
    shape, dtype, end = _parsed_input(text)
    try:
        made = torch.randn(shape) if _has_fractions(dtype) else torch.randint(0, end or 2, shape)
        return made.to(dtype)
    # larger than memory, or a dtype that random numbers cannot have
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"Cannot create a random input {printable(text)!r}: {printable(reason)}"
        ) from error


def _parsed_input(text: str) -> tuple[list[int], torch.dtype, int | None]:
    """The shape, the dtype and the end of the range of an input such as `2x12:int64<50`."""
    known = _INPUT.fullmatch(text)
    dtype = getattr(torch, (known["dtype"] if known else None) or "float32", None)
    if known is None or not isinstance(dtype, torch.dtype):
        raise ValueError(
            "--input must be a shape such as 1x3x224x224 or 2x12:int64<50, got "
            f"{printable(text)!r}."
        )
    shape = [] if known["shape"] == "scalar" else [int(size) for size in known["shape"].split("x")]
    end = None if known["end"] is None else int(known["end"])
    if end is not None and (end < 1 or _has_fractions(dtype)):
        raise ValueError(
            "--input SHAPE:DTYPE<N gives whole numbers from 0 up to N - 1: it needs a dtype of "
            f"whole numbers and an N of at least 1, such as 2x12:int64<50, got {printable(text)!r}."
        )
    return shape, dtype, end


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
