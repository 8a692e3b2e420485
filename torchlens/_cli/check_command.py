"""`torchlens check TARGET FILE`: whether a model still does what a file of its structure says."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch

from torchlens._cli.live import called, is_pair, named_object
from torchlens._cli.terminal import say
from torchlens._history.model_history import ModelHistory
from torchlens.api import check_structure, load

HELP = (
    "check that a model still has the structure in a file; exit code 0 if so, 1 if not, 2 if it "
    "could not be checked"
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="module:name or file.py:name of a model, of a class of models or of a function that "
        "returns a model, a pair of model and inputs, or a history; or a trace",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the file, such as model.lens.json")
    parser.add_argument("--update", action="store_true", help="write the file instead")
    parser.add_argument("--train", action="store_true", help="leave the model in training mode")


def run(arguments: Namespace) -> int:
    model, inputs, kwargs = _target(arguments.target)
    if isinstance(model, torch.nn.Module) and not arguments.train:
        model.eval()
    report = check_structure(model, arguments.file, inputs, kwargs, update=arguments.update)
    say(str(report))
    return 0 if report.ok else 1


def _target(text: str) -> tuple[Any, Any, Any]:
    """The model or history, and the inputs if they come with it."""
    if Path(text).exists() or ":" not in text:
        return load(text), None, None
    found = named_object(text)
    if callable(found) and not isinstance(found, torch.nn.Module | ModelHistory):
        found = called(text, found)
    if is_pair(found):
        model, inputs, *rest = found
        return model, inputs, rest[0] if rest else None
    return found, None, None
