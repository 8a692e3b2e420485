"""`torchlens extract TARGET --data D --layers L --out F`: store the values of layers for a whole
data set; the same command resumes.

TARGET names something in a module or a file, `package.module:model` or `train.py:make_model`: a
model, or a function that returns one; or a pair of a model and the transform of an image or the
tokenizer of texts. With torchrun, each process extracts its part.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchlens._cli.live import called, named_object
from torchlens._cli.terminal import say
from torchlens._text.error_wording import got
from torchlens._text.plain_text import printable
from torchlens.api import extract

HELP = (
    "store the values of layers for a data set: torchlens extract module:model --data images/ "
    "--layers layer4 --out features/"
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="module:name or file.py:name of a model")
    parser.add_argument(
        "--data",
        required=True,
        metavar="D",
        help="a folder of images, a .npy file of inputs, a .txt file with a text a line, or "
        "module:name of a data set",
    )
    parser.add_argument(
        "--layers", required=True, nargs="+", metavar="L", help="labels, modules, or parts of them"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="F", help="the folder to write")
    parser.add_argument("--pool", help="mean, max, cls, last or grid:N")
    parser.add_argument("--dtype", help="float16, bfloat16 or float32")
    parser.add_argument("--batch-size", type=int, metavar="N", help="inputs run at once (32)")
    parser.add_argument(
        "--shard-size", type=int, default=4096, metavar="N", help="inputs in a file (4096)"
    )
    parser.add_argument(
        "--skip-errors", action="store_true", help="leave out inputs that fail, and list them"
    )
    parser.add_argument("--compile", action="store_true", help="run a compiled function")
    parser.add_argument("--device", help="where the model runs, such as cuda")


def run(arguments: Namespace) -> int:
    model, own = _model_of(arguments.target)
    if arguments.device is not None:
        model = model.to(arguments.device)
    data, is_text = _data_of(arguments.data)
    features = extract(
        model,
        data,
        arguments.layers,
        arguments.out,
        pool=arguments.pool,
        dtype=arguments.dtype,
        batch_size=arguments.batch_size,
        shard_size=arguments.shard_size,
        compile=arguments.compile,
        on_error="skip" if arguments.skip_errors else "raise",
        transform=None if is_text else own,
        tokenizer=own if is_text else None,
    )
    say(printable(repr(features)))
    return 0


def _model_of(target: str) -> tuple[torch.nn.Module, Any]:
    """The model, and its transform or tokenizer."""
    found = named_object(target)
    if callable(found) and not isinstance(found, torch.nn.Module):
        found = called(target, found)
    model, own = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            "TARGET must be a model, a function that returns one, or a pair of a model and its "
            f"transform or tokenizer, got {got(found)}."
        )
    return model, own


def _data_of(text: str) -> tuple[Any, bool]:
    """The data set, and whether it is of texts."""
    path = Path(text).expanduser()
    if path.is_dir():
        return path, False
    if path.suffix == ".npy":
        return np.load(path, mmap_mode="r", allow_pickle=False), False
    if path.suffix == ".txt":
        return path.read_text(encoding="utf-8").splitlines(), True
    if ":" in text:
        found = named_object(text)
        is_maker = callable(found) and not hasattr(found, "__getitem__")
        found = called(text, found) if is_maker else found
        return found, isinstance(found, list) and bool(found) and isinstance(found[0], str)
    raise ValueError(
        "--data must be a folder of images, a .npy file, a .txt file or module:name, got "
        f"{printable(text)!r}."
    )
