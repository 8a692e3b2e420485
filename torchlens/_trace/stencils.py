"""Calls that differ in nothing but their values, as those of a compiled program do: how one is
written is worked out once.

The names, the notes of where each value is and the JSON are those of the first call with another
number in front, and what is written are pieces of the same blocks of memory.
"""

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from torchlens._recording.recording import Recording
from torchlens._trace.call import call_document
from torchlens._trace.names import OWN_PREFIX
from torchlens._trace.python_values import PythonWriter
from torchlens._trace.save import json_bytes, short_note
from torchlens._trace.tensors import Blob, Tensors, is_as_written


class RepeatedCall(Protocol):
    """A call of something that does the same at each call."""

    program: Any  # the same object for calls that differ in nothing but their values

    @property
    def num_bytes(self) -> int:
        """How much memory the values take."""

    @property
    def num_rows(self) -> int:
        """How many rows the recording has."""

    def memory(self) -> list[memoryview]:
        """The blocks of memory that the values lie in."""

    def recording(self) -> tuple[Recording, list[Tensor]]:
        """The call as a recording, and tensors that are the blocks of memory."""


class _Place(NamedTuple):
    """Something that is written: what the header says of it, and which bytes of which block it
    is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    block: int
    start: int
    end: int


class Stencil:
    """Writes further calls of a program."""

    def __init__(self, places: Sequence[_Place], document: Sequence[str]) -> None:
        self._places = places
        self._document = document

    def pieces(self, call: int, memory: Sequence[memoryview]) -> list[Blob]:
        """What is written of a call."""
        prefix = f"{call}/"
        found = [
            Blob(prefix + name, dtype, shape, memory[block][start:end])
            for name, dtype, shape, block, start, end in self._places
        ]
        text = prefix.join(self._document).encode("utf-8", "surrogatepass")
        return [*found, Blob(f"{OWN_PREFIX}call/{call}", "U8", (len(text),), text)]


def call_facts(changed: Sequence[int], graph: int) -> dict[str, Any]:
    """What a call of a trace says beside its values."""
    listing = {"keeps_unsaved": True, "marks_distances": False}
    return {"changed": changed, "graph": graph, "listing": listing, "options": None}


def stencil_of(
    recording: Recording, names: Sequence[str], blocks: Sequence[Tensor], graph: int
) -> Stencil | None:
    """How the calls are written that do the same as this one; None where a value is no piece of a
    block.

    `names` are those of the rows without the number of the call.
    """
    prefix = f"{secrets.token_hex(16)}/"  # stands for the number of the call, and nowhere else
    tensors = Tensors(lambda name: name)
    writer = PythonWriter(tensors.add)
    document = call_document(
        recording, [prefix + name for name in names], writer, tensors, params=False
    )
    number_of = {block.untyped_storage()._cdata: number for number, block in enumerate(blocks)}
    places = [_place_of(blob, number_of, blocks, len(prefix)) for blob in tensors.settle()]
    document["values"] = list(map(short_note, document["values"]))
    text = json_bytes(document | call_facts([], graph)).decode("utf-8", "surrogatepass")
    found = [place for place in places if place is not None]
    return Stencil(found, text.split(prefix)) if len(found) == len(places) else None


def _place_of(
    blob: Blob, number_of: dict[int, int], blocks: Sequence[Tensor], len_prefix: int
) -> _Place | None:
    tensor = blob.content
    if not isinstance(tensor, Tensor):
        return None
    number = number_of.get(tensor.untyped_storage()._cdata)
    if number is None or not is_as_written(tensor) or not blocks[number].is_contiguous():
        return None
    start = tensor.data_ptr() - blocks[number].data_ptr() if blob.num_bytes else 0
    return _Place(
        blob.name[len_prefix:], blob.dtype, blob.shape, number, start, start + blob.num_bytes
    )
