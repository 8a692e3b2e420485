"""Pickles and copies a log. The result has the same values, gradients, labels and fields.

Its tensors are in no autograd graph. Functions are pickled by name, and lines of source instead of
code objects. The graph is pickled too, so that labels do not depend on anything that is not.
"""

import copy
import zlib
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from torchlens._capture.gradients.backward_hooks import NodeRun
from torchlens._capture.gradients.entry_gradients import Gradients
from torchlens._capture.options import CaptureOptions, Transform
from torchlens._graph.build import Graph, ModuleTree
from torchlens._graph.labels import Layer
from torchlens._history.portable import Packer
from torchlens._recording.functions import Reference
from torchlens._recording.operations import Operation
from torchlens._recording.origin import installed_version, version_of
from torchlens._recording.recording import Failure, ModuleCall, Recording, Row, Write
from torchlens._recording.regions import Region
from torchlens._recording.stored import opened, opened_params
from torchlens.errors import TorchLensError

_NUMBER = (
    1  # raised when something is kept that means something else than before under the same name
)
_KEPT: tuple[Any, ...] = (
    Recording, Row, ModuleCall, Region, Write, Failure, NodeRun, Operation, Reference, Graph, Layer,
    ModuleTree,
)  # fmt: skip
# No live log has a version this high, so a value that was changed since it was saved stays one.
CHANGED = 1 << 62
# What a log holds of a live autograd graph.
_LIVE = ("watch", "_reaching", "_sent")


class Format:
    """The first object of a pickle: raises when it is read if the rest has another format."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _check_format, (_NUMBER, _layout(), installed_version("torchlens"))


def _check_format(number: int, layout: int, written_by: str) -> None:
    if (number, layout) != (_NUMBER, _layout()):
        raise TorchLensError(
            f"This history was pickled by torchlens {written_by}, whose format differs from that "
            f"of this version, {installed_version('torchlens')} (format {number}.{layout:08x}, "
            f"here {_NUMBER}.{_layout():08x}). Load it with the version that wrote it, or log the "
            "model again. To keep a graph for longer, write it with history.to_json(path)."
        )


def _layout() -> int:
    """A number that changes when the pickled classes get other fields."""
    names = [f"{kind.__name__} {' '.join(_field_names(kind))}" for kind in _KEPT]
    return zlib.crc32("\n".join(names).encode())


def _field_names(kind: Any) -> Iterable[str]:
    return kind._fields if issubclass(kind, tuple) else [field.name for field in fields(kind)]


def portable_options(options: CaptureOptions | None) -> CaptureOptions | None:
    """The options of the log, without those that cannot be pickled."""
    if options is None:
        return None
    transform = options.transform
    if isinstance(transform, Transform):
        postfunc = Packer().pack(transform.activation_postfunc)
        return replace(options, transform=replace(transform, activation_postfunc=postfunc))
    return replace(options, transform=Packer().pack(transform))


# -- copies
# --------------------------------------------------------------------------------------------------


def copied_deeply(recording: Recording, memo: dict[int, Any]) -> Recording:
    """A recording with tensors of its own. What never changes, like the rows, is shared."""
    packer = Packer(opened_params(recording.params))
    held = _packed_tensors(recording, packer)
    packer.finish()
    held = copy.deepcopy(held, memo)
    return _settled(replace(recording, **held, output=None), changed_entries(recording))


def packed(recording: Recording) -> dict[str, Any]:
    """The fields of a recording, ready to be pickled; `unpacked` makes one of them again."""
    packer = Packer(opened_params(recording.params))
    kept = {field.name: getattr(recording, field.name) for field in fields(recording)}
    del kept["output"]  # an object of any class
    kept |= _packed_tensors(recording, packer)
    pack, code = packer.pack, packer.code
    kept["rows"] = [
        row._replace(
            args=pack(row.args), kwargs=pack(row.kwargs), code=code(row.code, row.instruction)
        )
        for row in recording.rows
    ]
    kept["module_calls"] = [
        call._replace(code=code(call.code, call.instruction)) for call in recording.module_calls
    ]
    failure = recording.failure
    if failure is not None:
        kept["failure"] = replace(failure, code=code(failure.code, failure.instruction))
    for name in ("inputs", "outputs"):  # with paths, which may have anything for keys
        kept[name] = pack(kept[name])
    packer.finish()
    return {"recording": kept, "changed": changed_entries(recording)}


def unpacked(parts: dict[str, Any]) -> Recording:
    return _settled(Recording(**parts["recording"]), parts["changed"])


def _packed_tensors(recording: Recording, packer: Packer) -> dict[str, Any]:
    gradients = recording.gradients
    return {
        "params": [packer.pack(param) for param in packer.params],
        "values": [packer.pack(opened(value)) for value in recording.values],
        "saved_args": {
            number: packer.pack(arguments) for number, arguments in recording.saved_args.items()
        },
        "gradients": _Gradients(gradients, packer)
        if isinstance(gradients, Gradients)
        else packer.pack(gradients),
        "slices": [],
        "is_copy": True,
    }


def changed_entries(recording: Recording) -> set[int]:
    """Entries whose value was changed in place since it was saved."""
    pairs = enumerate(zip(recording.values, recording.versions, strict=True))
    return {
        number for number, (value, version) in pairs if version >= 0 and value._version != version
    }


def _settled(recording: Recording, changed: set[int]) -> Recording:
    """Reads the version counters of the new tensors."""
    recording.versions = [
        CHANGED if number in changed else version_of(value) if isinstance(value, Tensor) else -1
        for number, value in enumerate(recording.values)
    ]
    return recording


class _Gradients:
    """The gradients of backward passes, without the hooks that collected them."""

    def __init__(self, gradients: Gradients, packer: Packer) -> None:
        own = {number: packer.pack(gradient) for number, gradient in gradients.items()}
        facts = {name: value for name, value in vars(gradients).items() if name not in _LIVE}
        facts["parameters"] = packer.pack(dict(gradients.parameters.items()))
        self._parts = (own, facts, list(gradients.watch.runs))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored_gradients, self._parts

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradients:
        return _restored_gradients(*copy.deepcopy(self._parts, memo))


def _restored_gradients(
    own: dict[int, Tensor], facts: dict[str, Any], runs: list[NodeRun]
) -> Gradients:
    gradients = Gradients()
    gradients.update(own)
    vars(gradients).update(facts)
    gradients.watch.runs = runs
    return gradients
