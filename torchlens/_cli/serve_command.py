"""`torchlens serve FOLDER`: a page in the browser that shows runs while they are recorded."""

import webbrowser
from argparse import ArgumentParser, Namespace
from pathlib import Path

from torchlens._cli.terminal import flush, say
from torchlens._monitor.serve.server import RunServer
from torchlens._text.plain_text import printable

HELP = "show the runs that torchlens.monitor records, live in a browser"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=Path,
        help="a run, or a folder with runs in it, such as runs/",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="N",
        help="the port of this machine (default: any free one)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the web browser")


def run(arguments: Namespace) -> int:
    if not 0 <= arguments.port < 65536:
        raise ValueError(f"--port must be a number up to 65535, got {arguments.port}.")
    with RunServer(arguments.folder.expanduser(), arguments.port) as server:
        count = len(server.live.runs)
        found = f"{count} run{'' if count == 1 else 's'}" if count else "no run yet"
        say(
            f"{printable(str(arguments.folder))}: {found}. Only this machine can open the page; "
            "Ctrl-C ends it."
        )
        say(server.url)
        flush()
        if arguments.open:
            webbrowser.open(server.url)
        server.serve_forever()
    return 0
