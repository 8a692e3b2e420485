"""Pickles and copies a log, as the documents that trace files have. The result has the same values,
gradients, labels and fields.

Beside the documents are the tensors and what a file has no form for: functions, objects of any
class, parameters. Tensors leave their autograd graph. Those that lie in the memory of another saved
tensor do so in the copy.
"""

import copy
import zlib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from torchlens._capture.options import CaptureOptions
from torchlens._graph.build import Graph, ModuleTree
from torchlens._graph.labels import Layer
from torchlens._portable.document_reading import fill_recording, options_of, recording_of
from torchlens._portable.documents import (
    FORMAT,
    call_document,
    changed_entries,
    options_form,
    recording_document,
    value_forms,
)
from torchlens._portable.live_objects import LiveObjects, TensorBundle, live_parameter
from torchlens._portable.python_values import PythonReader, PythonWriter
from torchlens._portable.stored_tensors import TensorSource, stored_tensor
from torchlens._portable.tensor_notes import TensorWriter
from torchlens._recording.origin import installed_version, version_of
from torchlens._recording.recording import Recording, Write
from torchlens._recording.regions import Region
from torchlens._recording.stored import opened, opened_params
from torchlens.errors import TorchLensError

# What replaying, and nothing that a file promises, needs.
_BESIDE = (
    "storages", "regions", "writes", "outside_storages", "copies", "hidden_writes", "trained",
    "generators",
)  # fmt: skip
_KEPT: tuple[Any, ...] = (Graph, Layer, ModuleTree, Region, Write)


class PackedLog(NamedTuple):
    """A recording and its options, ready to be pickled or copied."""

    documents: tuple[dict[str, Any], dict[str, Any]]  # of the recording, and of its call
    beside: dict[str, Any]  # fields of the recording as they are
    tensors: TensorBundle
    objects: list[Any]
    params: list[Any]


class Format:
    """The first object of a pickle: raises when it is read if the rest has another format."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _check_format, (_format(), installed_version("torchlens"))


def _format() -> str:
    """Another text if a pickled class has other fields, or a document another meaning."""
    names = [f"{kind.__name__} {' '.join(_field_names(kind))}" for kind in _KEPT]
    return f"{FORMAT}.{zlib.crc32('; '.join(names).encode()):08x}"


def _field_names(kind: Any) -> Iterable[str]:
    return kind._fields if issubclass(kind, tuple) else [field.name for field in fields(kind)]


def _check_format(written_format: str, written_by: str) -> None:
    if written_format != _format():
        raise TorchLensError(
            f"This history was pickled by torchlens {written_by}, whose format differs from that "
            f"of this version, {installed_version('torchlens')} (format {written_format}, here "
            f"{_format()}). Load it with the version that wrote it, or log the model again. To "
            "keep a graph for longer, write it with history.to_json(path)."
        )


def packed(recording: Recording, options: CaptureOptions) -> PackedLog:
    """The parts of a log; `unpacked` makes it of them."""
    objects = LiveObjects()
    count = iter(range(1 << 62))
    tensors = TensorWriter(lambda name: str(next(count)), objects)
    writer = PythonWriter(tensors.add, objects)
    no_names = [""] * len(recording.rows)
    document = recording_document(recording, writer)
    values = value_forms(recording, no_names, writer, tensors)
    call = call_document(recording, no_names, writer, tensors, params=False)
    call |= {"values": values, "options": options_form(options, writer)}
    params = list(map(live_parameter, opened_params(recording.params)))
    beside = {name: getattr(recording, name) for name in _BESIDE}
    bundle = TensorBundle(tensors.settle())
    return PackedLog((document, call), beside, bundle, objects.found, params)


def unpacked(parts: PackedLog) -> tuple[Recording, CaptureOptions]:
    """The recording and the options."""
    (document, call), tensors = parts.documents, _PickledTensors(parts.tensors, parts.objects)
    reader = PythonReader(lambda note: stored_tensor(tensors, note), parts.objects)
    recording = recording_of(document, call["seconds"], reader)
    fill_recording(recording, call, tensors, reader)
    for name, value in parts.beside.items():
        setattr(recording, name, value)
    recording.params = parts.params
    return _in_memory(recording), options_of(call["options"], recording.random_seed, reader)


def copied_deeply(recording: Recording, options: CaptureOptions, memo: dict[int, Any]) -> Recording:
    """A recording with tensors of its own."""
    parts = packed(recording, options)
    live = copy.deepcopy((parts.tensors, parts.objects, parts.params), memo)
    return unpacked(PackedLog(parts.documents, parts.beside, *live))[0]


class _PickledTensors(TensorSource):
    """The tensors of a pickle by key."""

    path = Path("pickle")

    def __init__(self, bundle: TensorBundle, objects: list[Any]) -> None:
        self.objects = objects
        self._tensors = bundle.tensors

    def read(self, key: str) -> Tensor:
        return self._tensors[key].detach()


def _in_memory(recording: Recording) -> Recording:
    """The recording with tensors where stored values are."""
    changed = changed_entries(recording)
    recording.values = [
        value if number in changed else opened(value)
        for number, value in enumerate(recording.values)
    ]
    for number, value in enumerate(recording.values):
        if isinstance(value, Tensor):
            recording.versions[number] = version_of(value)
    recording.saved_args = dict(recording.saved_args.items())
    gradients: Any = recording.gradients
    for number, gradient in gradients.items():
        dict.__setitem__(gradients, number, gradient)
    if hasattr(gradients, "parameters"):
        gradients.parameters = dict(gradients.parameters.items())
    return recording
