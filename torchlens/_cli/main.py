"""The command `torchlens`: parses arguments, then calls the public functions.

Exit codes: 0 for success (or agreement), 1 if something differs, 2 if it could not be done; stderr
says why.
"""

import argparse
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torchlens
from torchlens._cli.live import place_of
from torchlens._cli.terminal import flush
from torchlens._text.plain_text import printable
from torchlens.errors import TorchLensError

# The commands, in the order in which the help lists them. Each is a file here: `log_command.py`.
COMMANDS = ("log", "show", "diff", "check", "serve", "extract", "features")
# What a command may raise because of what it was given.
_EXPECTED = (TorchLensError, ValueError, TypeError, LookupError, OSError, ImportError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    modules = {name: import_module(f"torchlens._cli.{name}_command") for name in COMMANDS}
    parser = argparse.ArgumentParser(
        prog="torchlens",
        description="What a model really does: logs of forward passes, in files and compared.",
    )
    parser.add_argument("--version", action="version", version=f"torchlens {torchlens.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in modules.items():
        own = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(own)
    given = parser.parse_args(arguments)
    return _run(modules[given.command], given)


def _run(command: Any, given: argparse.Namespace) -> int:
    with warnings.catch_warnings():
        warnings.showwarning = _say_warning
        try:
            code: int = command.run(given)
            flush()
            return code
        except KeyboardInterrupt:
            return 130
        except (
            SystemExit
        ) as error:  # of the user's code, whatever code it has: nothing was logged or compared
            given_code = "" if error.code is None else repr(error.code)
            ended = (
                f"the code that was to run called sys.exit({given_code}){place_of(error)} before "
                "there was a result."
            )
            print(f"torchlens {given.command}: {printable(ended)}", file=sys.stderr)
            return 2
        except _EXPECTED as error:
            reason = error.args[0] if isinstance(error, LookupError) and error.args else error
            lines = str(reason).splitlines() or [type(error).__name__]
            print(
                f"torchlens {given.command}: {chr(10).join(map(printable, lines))}", file=sys.stderr
            )
            return 2
        # of the user's model, mostly: all there is to say, and not the code that means "differs"
        except Exception:
            traceback.print_exc()
            return 2


def _say_warning(message: Any, category: Any, *_: Any, **__: Any) -> None:
    print(printable(str(message)), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
