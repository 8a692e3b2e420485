"""The table of supported releases: `make compat`.

Each release of torch runs the tests in an environment of its own under `.venvs`, made at the first
run: that downloads some gigabytes of CUDA packages for each. Other interpreters run them with the
newest release.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
# The oldest, two between and the newest.
RELEASES = ["2.6.0", "2.9.1", "2.13.0", "2.15.0"]
PYTHONS = ["python3.11", "python3.12", "python3.13", "python3.14"]
# What the tests import: of the checkout, and beside it.
NEEDED = [f"{ROOT}[draw,networkx,jax,dev]", "pillow", "torchvision"]
SELECTED = ["tests/trace", "tests/page", "tests/draw"]


class Cell(NamedTuple):
    """A release of torch and an interpreter."""

    torch: str
    python: str  # the interpreter's path
    version: str  # and its version, such as "3.11"

    @property
    def folder(self) -> Path:
        return ROOT / ".venvs" / f"compat-torch{self.torch}-python{self.version}"


def version_of(python: str) -> str | None:
    """Such as "3.11"; None if there is no such interpreter, or if it does not start."""
    path = shutil.which(python)
    if path is None:
        return None
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def cells(releases: list[str], pythons: list[str]) -> list[Cell]:
    """Each release with the interpreter that runs this, the last one with the others too."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = [Cell(release, sys.executable, own) for release in releases]
    seen = {own}
    for python in pythons:
        version = version_of(python)
        if version is None:
            print(f"{python}: none that starts is on the PATH", file=sys.stderr)
        elif version not in seen:
            seen.add(version)
            found.append(Cell(releases[-1], python, version))
    return found


def python_of(cell: Cell) -> str:
    """The interpreter of a cell's environment, which is made if it is not there."""
    python = cell.folder / "bin" / "python"
    if not (cell.folder / "ready").exists():
        print(f"setting up {cell.folder.relative_to(ROOT)} ...", file=sys.stderr, flush=True)
        subprocess.run([cell.python, "-m", "venv", "--clear", str(cell.folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, f"torch=={cell.torch}"], check=True)
        subprocess.run([*pip, f"torch=={cell.torch}", *NEEDED], check=True)
        (cell.folder / "ready").touch()
    return str(python)


def run_tests(cell: Cell, tests: list[str]) -> tuple[str, bool]:
    """A row of the table, and whether all is well."""
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            *(
                python_of(cell),
                "-m",
                "pytest",
                "-m",
                "not slow and not soak",
                "-p",
                "no:cacheprovider",
            ),
            *("--numprocesses", "2", "--dist", "worksteal", f"--junitxml={report}", *tests),
        ]
        print(f"torch {cell.torch}, Python {cell.version} ...", file=sys.stderr, flush=True)
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        suite = ElementTree.parse(report).find("testsuite") if report.exists() else None
    if suite is None:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        return f"| {cell.torch} | {cell.version} | did not run | | | |", False
    if done.returncode != 0:
        print(done.stdout[-6000:], file=sys.stderr)
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    row = f"| {cell.torch} | {cell.version} | {passed} | {failed} | {count['skipped']} |"
    return f"{row} {time.time() - start:.0f} s |", done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", help="the essential tests; more are always run")
    parser.add_argument("--torch", nargs="*", default=RELEASES, help="releases, the newest last")
    parser.add_argument("--python", nargs="*", default=PYTHONS, help="other interpreters")
    options = parser.parse_args()
    rows = [
        run_tests(cell, [*options.tests, *SELECTED])
        for cell in cells(options.torch, options.python)
    ]
    print("| torch | Python | passed | failed | skipped | time |")
    print("|---|---|---|---|---|---|")
    print("\n".join(row for row, _ in rows))
    if not all(is_well for _, is_well in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
