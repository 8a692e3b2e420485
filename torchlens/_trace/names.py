"""The names of tensors in a file: `1/features.0/conv2d` was made in that module in the first call.

`1/block:2/relu:3` is the third `relu` in the second pass of the module `block`. What the model
itself computes, outside any module, is `1/add`. Inputs, outputs and buffers go by their address:
`1/input.x`, `1/output.logits`, `1/buffer.bn.mean`.
"""

import re
from collections.abc import Iterable, Sequence

from torchlens._history.log import path_text
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import Recording

OWN_PREFIX = "torchlens/"  # of the documents that describe the tensors
_LONGEST = 1000
# What separates the parts of a name, and what a terminal cannot show.
_ODD = re.compile("[/:\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class Names:
    """The names that are taken, of one call."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def claim(self, name: str) -> str:
        """The name, or one like it that is still free."""
        name = name[:_LONGEST]
        count = self._taken.get(name, 0)
        while count:
            count += 1
            other = f"{name}~{count}"
            if other not in self._taken:
                self._taken[name] = count
                name = other
                break
        self._taken[name] = 1
        return name


def full_name(call: int, key: str) -> str:
    """The name in the file of what a call has under `key`; a key that begins with a slash belongs
    to no call.
    """
    return key[1:] if key.startswith("/") else f"{call}/{key}"


def param_key(address: str) -> str:
    return f"/params/{_plain(address)}"


def call_of(name: str) -> int | None:
    """The call that a name belongs to."""
    number = name.partition("/")[0]
    return int(number) if number.isdigit() and number.isascii() and len(number) < 10 else None


def names_of_rows(recording: Recording, call: int) -> list[str]:
    """The names in the file of the values of all rows."""
    return [f"{call}/{name}" for name in names_in_call(recording)]


def names_in_call(recording: Recording) -> list[str]:
    """The names without the number of the call, all different. Calls with the same graph have the
    same ones.
    """
    addresses = boundary_addresses(recording)
    modules = [_module_part(call.address, call.pass_num) for call in recording.module_calls]
    counts: dict[tuple[int, str], int] = {}
    found = []
    for number, row in enumerate(recording.rows):
        kind = row.operation.layer_type
        address = addresses.get(number)
        if address is not None and row.operation in (INPUT, OUTPUT, BUFFER):
            found.append(_plain(address))
            continue
        place = (row.module_call, kind)
        count = counts[place] = counts.get(place, 0) + 1
        found.append(f"{modules[row.module_call]}{_plain(kind)}{f':{count}' if count > 1 else ''}")
    return _apart(found)


def boundary_addresses(recording: Recording) -> dict[int, str]:
    """Row → `input.x`, `output.logits`, `buffer.bn.running_mean`."""
    found: dict[int, str] = {}
    for head, paths in (("input", recording.inputs), ("output", recording.outputs)):
        for path, number in paths:
            found.setdefault(number, path_text(head, path))
    for address, number in recording.buffers:
        found.setdefault(number, f"buffer.{address}")
    return found


def _module_part(address: str, pass_num: int) -> str:
    if not address:
        return ""
    return f"{_plain(address)}{f':{pass_num}' if pass_num > 1 else ''}/"


def _plain(text: str) -> str:
    return _ODD.sub("_", text)


def _apart(names: Sequence[str]) -> list[str]:
    if len(set(names)) == len(names):
        return list(names)
    own = Names()
    return list(map(own.claim, names))


def without_own(names: Iterable[str]) -> list[str]:
    """The names of tensors, without those of our documents."""
    return [name for name in names if not name.startswith(OWN_PREFIX)]
