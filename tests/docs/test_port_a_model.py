"""The commands of docs/port-a-model.md find what the page says they find; `pytest --update-golden`
writes the page anew.
"""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from torchlens._cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "port-a-model.md"
_FILE = re.compile(r"^```py\n# (?P<name>\w+\.py)\n(?P<body>.*?)^```\n", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(
    r"^```console\n\$ (?P<command>[^\n]*)\n(?P<printed>.*?)^```\n", re.MULTILINE | re.DOTALL
)


def without_measures(text: str) -> str:
    """The text without measured errors, whose last digits are the machine's, and without what keeps
    columns apart.
    """
    return " ".join(re.sub(r"[\d,.]+(e[-+]?\d+)? eps|\d\.\d+(e[-+]?\d+)|-{5,}", "#", text).split())


def printed_by(command: str) -> str:
    """What a command of the page prints, and its exit code where that is not 0."""
    program, *arguments = command.split()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if program == "python":
            runpy.run_path(arguments[0], run_name="__main__")
            code = 0
        else:
            assert program == "torchlens"
            code = main(arguments)
    return printed.getvalue() + (f"exit {code}\n" if program == "torchlens" else "")


@pytest.mark.slow
def test_the_commands_find_the_three_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: Any
) -> None:
    updates = pytestconfig.getoption("--update-golden")
    text = PAGE.read_text()
    for file in _FILE.finditer(text):
        (tmp_path / file["name"]).write_text(f"# {file['name']}\n{file['body']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("gpt", "port"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    commands = list(_COMMAND.finditer(text))
    assert len(commands) == 4
    try:
        for found in commands:
            printed = printed_by(found["command"])
            if updates:
                text = text.replace(found[0], f"```console\n$ {found['command']}\n{printed}```\n")
            elif without_measures(printed) != without_measures(found["printed"]):
                pytest.fail(
                    f"{found['command']} should print\n\n{found['printed']}\nand "
                    f"prints\n\n{printed}"
                )
    finally:
        for name in ("gpt", "port"):
            sys.modules.pop(name, None)
    if updates:
        PAGE.write_text(text)
