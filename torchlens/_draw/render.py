"""From Graphviz source to a picture, with whichever Graphviz is installed."""

import importlib.util
import os
import shutil
import subprocess
import sys

from torchlens.errors import DrawingError

# Seconds that a layout may take with the settings of the source, and then again in a hurry.
_PATIENCE = 40.0

# What makes `dot` stop polishing: few iterations, straight edges.
_HASTE = "graph [nslimit=0.1 nslimit1=0.1 mclimit=0.05 splines=line]\n"

# The layout runs in a process of its own, as it does with `dot`: it can then be given a time limit,
# its complaints do not land on the user's terminal, and Graphviz, which is not made for threads, is
# never in two of them.
_BUNDLED = """
import sys, pygraphviz
source = sys.stdin.buffer.read().decode("utf-8")
picture = pygraphviz.AGraph(string=source, encoding="UTF-8").draw(format=sys.argv[1], prog="dot")
sys.stdout.buffer.write(picture)
"""


def is_graphviz_there() -> bool:
    """True if pictures can be rendered on this machine."""
    return shutil.which("dot") is not None or importlib.util.find_spec("pygraphviz") is not None


def render(source: str, fileformat: str) -> bytes:
    """The picture, as the content of a file. Uses `dot` where it is installed, else the Graphviz
    inside pygraphviz.
    """
    command = _command(fileformat)
    try:
        return _run(command, source)
    except subprocess.TimeoutExpired:
        opening, brace, rest = source.partition("{")
    try:
        return _run(command, opening + brace + rest.rstrip().removesuffix("}") + _HASTE + "}\n")
    except subprocess.TimeoutExpired as error:
        raise DrawingError(
            f"Graphviz did not finish within {2 * _PATIENCE:.0f} s. Draw less: "
            "vis_nesting_depth=1, vis_opt='rolled', vis_fold_repeats=True or a smaller "
            "vis_max_nodes."
        ) from error


def _command(fileformat: str) -> list[str]:
    program = shutil.which("dot")
    if program is not None:
        return [program, f"-T{fileformat}"]
    if importlib.util.find_spec("pygraphviz") is not None:
        return [sys.executable, "-c", _BUNDLED, fileformat]
    raise DrawingError(
        "A picture needs Graphviz, which is not installed. Install it for this Python, pip "
        "install 'torchlens[draw]', or for the machine, for instance apt install graphviz or brew "
        "install graphviz. The DOT source needs neither."
    )


def _run(command: list[str], source: str) -> bytes:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command,
        input=source.encode("utf-8"),
        capture_output=True,
        timeout=_PATIENCE,
        check=False,
        env=environment,
    )
    if done.returncode or not done.stdout:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise DrawingError(
            "Graphviz could not draw this: "
            f"{' '.join(said[-3:]) or f'it ended with code {done.returncode}'}"
        )
    return done.stdout
