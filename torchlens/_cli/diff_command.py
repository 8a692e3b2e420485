"""`torchlens diff A B`: where two implementations of a model diverge. A is the reference, B the
candidate.
"""

import json
from argparse import ArgumentParser, Namespace
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
    json_file = (
        None if arguments.json is None else checked_file("--json", arguments.json, "diff.json")
    )
    page = None if arguments.html is None else checked_file("--html", arguments.html, "diff.html")
    reference, candidate = (
        _history(text, arguments.call) for text in (arguments.reference, arguments.candidate)
    )
    mapping = None if arguments.map is None else _mapping(arguments.map)
    found = diff(
        reference,
        candidate,
        tolerance=arguments.tolerance,
        mapping=mapping,
        isolate=arguments.isolate,
    )
    if not arguments.quiet:
        say(found.text(width(), is_colored()))
    written = []
    if json_file is not None:
        found.to_json(json_file)
        written.append(json_file)
    if page is not None:
        found.explore(page)
        written.append(page)
    for path in written if not arguments.quiet else ():
        say(f"Wrote {printable(str(path))}")
    return 0 if found.ok else 1


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
