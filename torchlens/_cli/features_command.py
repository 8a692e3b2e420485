"""`torchlens features show|verify|export FOLDER`: what features are in a folder, whether the files
are whole, and the same in another format.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from torchlens._cli.terminal import say
from torchlens._text.plain_text import printable
from torchlens.api import open_features

HELP = "show, check or convert what `torchlens extract` has stored"
# The suffix of the file → the method that writes it.
_WRITERS = {
    ".h5": "to_hdf5", ".mat": "to_mat", ".safetensors": "to_safetensors", ".zarr": "to_zarr",
}  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, words in {
        "show": "print what is in the folder",
        "verify": "compare the files with their checksums",
        "export": "write another format, by the suffix of the file",
    }.items():
        own = commands.add_parser(name, help=words)
        own.add_argument("folder", metavar="FOLDER")
        if name == "export":
            own.add_argument("file", type=Path, help=f"a file ending in {', '.join(_WRITERS)}")
            own.add_argument("--layers", nargs="+", metavar="L", help="some of the layers")


def run(arguments: Namespace) -> int:
    features = open_features(arguments.folder)
    if arguments.action == "show":
        say(printable(repr(features)))
        for one, reason in features.skipped.items():
            say(printable(f"  skipped {one}: {reason}"))
        return 0
    if arguments.action == "verify":
        damaged = features.damaged()
        for name in damaged:
            say(printable(f"damaged: {name}"))
        say(f"{len(damaged)} damaged files" if damaged else "All files are as they were written.")
        return 1 if damaged else 0
    suffix = arguments.file.suffix
    if suffix not in _WRITERS:
        raise ValueError(f"FILE must end in {', '.join(_WRITERS)}, got {arguments.file.name!r}.")
    getattr(features, _WRITERS[suffix])(arguments.file, arguments.layers)
    say(f"Wrote {printable(str(arguments.file))}")
    return 0
