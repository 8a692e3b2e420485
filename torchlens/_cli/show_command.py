"""`torchlens show FILE [KEY]`: what is in a trace."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from torchlens._cli.terminal import paint, say, width
from torchlens._text.plain_text import printable
from torchlens._trace.files import open_trace
from torchlens._trace.overview import overview
from torchlens.api import load

HELP = "show what a trace contains: modules and operations, with statistics of their values"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a .safetensors file, or the .index.json of several"
    )
    parser.add_argument(
        "key",
        metavar="KEY",
        nargs="?",
        help="a module (h.0.attn), a layer (conv2d_1_1) or a name in the file",
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=1,
        metavar="N",
        help="how deep in modules to look (default 1; 0: operations)",
    )
    parser.add_argument(
        "--call", type=int, metavar="N", help="which call of the model, if the trace holds several"
    )
    parser.add_argument("--html", metavar="F", type=Path, help="write the page to explore to F")


def run(arguments: Namespace) -> int:
    files = open_trace(arguments.file)
    found = overview(files, arguments.key, arguments.depth, arguments.call)
    say(found.text(width(), paint))
    if arguments.html is not None:
        history = load(arguments.file, call=arguments.call)
        history.explore(arguments.html)
        say(f"Wrote {printable(str(arguments.html))}")
    return 0
