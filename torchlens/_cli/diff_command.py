"""`torchlens diff A B`: where two implementations of a model diverge. A is the reference, B the
candidate.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchlens._cli.live import history_of
from torchlens._cli.terminal import is_colored, say, width
from torchlens._history.model_history import ModelHistory
from torchlens._recording.tolerance import TOLERANCE
from torchlens._text.error_wording import checked_file
from torchlens._text.plain_text import printable
from torchlens.api import diff, load

HELP = (
    "find where two implementations of a model diverge; exit code 0 if they agree, 1 if not, 2 if "
    "they could not be compared"
)
_WHERE = "a trace, or module:name or file.py:name for a model that runs now"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("reference", metavar="A", help=f"the reference: {_WHERE}")
    parser.add_argument("candidate", metavar="B", help=f"the candidate: {_WHERE}")
    parser.add_argument(
        "--isolate",
        action="store_true",
        help="also find the errors behind the first; B must be a model that can run",
    )
    parser.add_argument(
        "--map",
        metavar="F",
        type=Path,
        help="a JSON file that maps names in A to names in B, with * for the part that varies",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="N",
        help=f"how many units of rounding a correct layer may be off ({TOLERANCE})",
    )
    parser.add_argument(
        "--call", type=int, metavar="N", help="which call of the model, if the traces hold several"
    )
    parser.add_argument("--json", metavar="F", type=Path, help="write everything to F as JSON")
    parser.add_argument("--html", metavar="F", type=Path, help="write a page with both graphs to F")
    parser.add_argument(
        "--quiet", action="store_true", help="print nothing; only set the exit code"
    )


def run(arguments: Namespace) -> int:
    # Before the models run: a path that cannot be written to is an error.
    files = _checked("--json", arguments.json), _checked("--html", arguments.html)
    found = diff(
        _history(arguments.reference, arguments.call),
        _history(arguments.candidate, arguments.call),
        tolerance=arguments.tolerance,
        mapping=None if arguments.map is None else _mapping(arguments.map),
        isolate=arguments.isolate,
    )
    if not arguments.quiet:
        say(found.text(width(), is_colored()))
    writers: list[Callable[[Path], object]] = [found.to_json, found.explore]
    for path, write in zip(files, writers, strict=True):
        if path is not None:
            write(path)
            if not arguments.quiet:
                say(f"Wrote {printable(str(path))}")
    return 0 if found.ok else 1


def _checked(option: str, path: Path | None) -> Path | None:
    return None if path is None else checked_file(option, path, f"diff.{option[2:]}")


def _history(text: str, call: int | None) -> ModelHistory:
    """One call in a file, or a model that runs now."""
    is_file = ":" not in text or Path(text).exists()
    return load(text, call=call) if call is not None and is_file else history_of(text)


def _mapping(path: Path) -> Any:
    """The names in a file."""
    if not path.exists():
        raise ValueError(f"--map must be a file of JSON; there is no file {printable(str(path))}.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f'--map must be a file of JSON, such as {{"h.*.ln_1": "blocks.*.norm1"}}; {path} is '
            f"not JSON ({error})."
        ) from error
