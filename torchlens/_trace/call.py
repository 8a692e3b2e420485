"""One call of a model as JSON and back: values, gradients, arguments and times, beside the graph
that calls may share.
"""

from collections.abc import Callable
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from torch import Tensor

from torchlens._capture.gradients.backward_hooks import NodeRun
from torchlens._capture.gradients.entry_gradients import Gradients
from torchlens._capture.options import CaptureOptions, Transform
from torchlens._history.pickling import CHANGED, changed_entries
from torchlens._recording.recording import Recording
from torchlens._recording.stored import (
    StoredMapping,
    StoredParams,
    StoredValue,
    opened,
    opened_params,
)
from torchlens._text.plain_text import shown
from torchlens._trace.columns import numbers_form
from torchlens._trace.damage import told_as_damage
from torchlens._trace.files import TraceFiles
from torchlens._trace.names import param_name
from torchlens._trace.python_values import PythonReader, PythonWriter
from torchlens._trace.stored_tensors import stored_tensor, stored_tensors
from torchlens._trace.tensors import Note, Tensors
from torchlens.errors import TraceError

_TIMES = ("seconds_forward", "seconds_total", "seconds_setup", "started_at")
_GRADIENT_SETS = ("uncertain", "complete")


def value_form(value: Any, name: str, writer: PythonWriter, tensors: Tensors) -> Any:
    """What stands for a saved value: the note of a tensor, None, or any other value as {"value":
    ...}.
    """
    if type(value) is Tensor:
        return tensors.add(value, name)
    value = opened(value)
    if value is None:
        return None
    form = writer.write(value, name)
    return form["tensor"] if type(form) is dict and "tensor" in form else {"value": form}


def call_document(
    recording: Recording, names: list[str], writer: PythonWriter, tensors: Tensors, params: bool
) -> dict[str, Any]:
    """What one call left behind, ready for JSON once the tensors are settled."""
    gradients = recording.gradients
    changed = changed_entries(recording)
    pairs = enumerate(zip(recording.values, names, strict=True))
    return {
        "values": [
            value_form(value, name, writer, tensors) if n not in changed else None
            for n, (value, name) in pairs
        ],
        "changed": sorted(changed),
        "arguments": [
            (number, writer.write(arguments, f"{names[number]}/args"))
            for number, arguments in recording.saved_args.items()
        ],
        "gradients": _gradients_form(gradients, recording, names, tensors),
        "params": _params_form(recording, tensors) if params else None,
        "seconds": numbers_form([row.seconds for row in recording.rows]),
        **{name: getattr(recording, name) for name in _TIMES},
        "random_seed": recording.random_seed,
        "warnings": recording.warnings,
    }


def _params_form(recording: Recording, tensors: Tensors) -> list[Note]:
    own = zip(opened_params(recording.params), recording.param_addresses, strict=False)
    return [tensors.add(param, param_name(address)) for param, address in own]


def _gradients_form(
    gradients: Any, recording: Recording, names: list[str], tensors: Tensors
) -> Any:
    if not isinstance(gradients, Gradients):
        return [
            (number, tensors.add(gradient, f"{names[number]}/grad"))
            for number, gradient in gradients.items()
        ] or None
    addresses = recording.param_addresses
    return {
        "own": [
            (number, tensors.add(gradient, f"{names[number]}/grad"))
            for number, gradient in gradients.items()
        ],
        "parameters": [
            (number, tensors.add(gradient, f"{param_name(addresses[number])}/grad"))
            for number, gradient in gradients.parameters.items()
        ],
        "arrivals": gradients.arrivals,
        "owners": list(gradients.owners.items()),
        **{name: sorted(getattr(gradients, name)) for name in _GRADIENT_SETS},
        "has_checkpoint": gradients.has_checkpoint,
        "missing": list(gradients.missing.items()),
        "outside": gradients.outside,
        "runs": gradients.watch.runs,
    }


def options_form(options: CaptureOptions | None, writer: PythonWriter) -> Any:
    """What was asked for, as far as it matters to a log that is done."""
    if options is None:
        return None
    transform = options.transform
    form: dict[str, Any] = {
        "keeps_args": options.keeps_args,
        "keeps_gradients": options.keeps_gradients,
    }
    if isinstance(transform, Transform):
        postfunc = transform.activation_postfunc
        form["transform"] = {
            "detach": transform.detach_saved_tensors,
            "device": str(transform.output_device),
            "postfunc": None if postfunc is None else writer.function(postfunc),
        }
    elif transform is not None:
        form["transform"] = writer.function(transform)
    return form


def options_of(form: Any, random_seed: int | None, reader: PythonReader) -> CaptureOptions:
    """The way back."""
    if form is None:
        return CaptureOptions(random_seed=random_seed)
    transform: Any = form.get("transform")
    if isinstance(transform, dict) and "detach" in transform:
        postfunc = reader.read(transform["postfunc"])
        transform = Transform(bool(transform["detach"]), str(transform["device"]), postfunc)
    elif transform is not None:
        transform = reader.read(transform)
    return CaptureOptions(
        transform=transform,
        keeps_args=bool(form["keeps_args"]),
        keeps_gradients=bool(form["keeps_gradients"]),
        random_seed=random_seed,
    )


# -- back
# --------------------------------------------------------------------------------------------------


class StoredGradients(StoredMapping, Gradients):
    """The gradients of a history that was loaded."""

    def __init__(self) -> None:
        Gradients.__init__(self)


class _Decoded(StoredValue):
    """A value that is made of JSON when somebody asks for it."""

    __slots__ = ("_make", "_path")

    def __init__(self, path: Path, make: Callable[[], Any]) -> None:
        self._path = path
        self._make = make

    def read(self) -> Any:
        with told_as_damage(self._path):
            return self._make()


def fill_recording(
    recording: Recording, document: dict[str, Any], files: TraceFiles, reader: PythonReader
) -> None:
    """Puts what one call left behind into its recording."""
    path, tensor = files.path, partial(stored_tensor, files)
    count = len(recording.rows)
    values = document["values"]
    if len(values) != count:
        raise TraceError("A call must have a value, or none, for each row of its graph.")
    if set(map(type, values)) == {str}:
        recording.values = stored_tensors(files, values)
    else:
        recording.values = [_value_of(form, path, tensor, reader) for form in values]
    for number in document["changed"]:
        recording.values[number] = _Decoded(path, lambda: None)
        recording.versions[number] = CHANGED
    recording.saved_args = StoredMapping(
        {
            _number(n, count): _Decoded(path, partial(_arguments_of, form, reader))
            for n, form in document["arguments"]
        }
    )
    if document["params"] is not None:
        stored = {number: tensor(note) for number, note in enumerate(document["params"])}
        recording.params = StoredParams(recording.params, _of_shape(stored, recording))
    _fill_gradients(recording, document["gradients"], tensor, count)
    for name in _TIMES:
        setattr(recording, name, _finite(document[name]))
    seed = document["random_seed"]
    recording.random_seed = seed if isinstance(seed, int) else None
    recording.warnings = [str(message) for message in document["warnings"]]


def _finite(number: Any) -> float:
    if type(number) not in (int, float) or not isfinite(number):
        raise TraceError(f"A time must be a number, not {shown(number)}.")
    return float(number)


def _arguments_of(form: Any, reader: PythonReader) -> tuple[Any, Any]:
    args, kwargs = reader.read(form)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise TraceError("The arguments of a call must be a tuple and a dictionary.")
    return args, kwargs


def _value_of(form: Any, path: Path, tensor: Callable[[Any], Any], reader: PythonReader) -> Any:
    if form is None:
        return None
    if type(form) is dict and "value" in form:
        return _Decoded(path, partial(reader.read, form["value"]))
    return tensor(form)


def _of_shape(stored: dict[int, Any], recording: Recording) -> dict[int, StoredValue]:
    """The parameters that are in the file; one without values is what `recording.params` has."""
    return {
        number: value
        for number, value in stored.items()
        if isinstance(value, StoredValue) and number < len(recording.params)
    }


def _fill_gradients(
    recording: Recording, form: Any, tensor: Callable[[Any], Any], count: int
) -> None:
    if form is None:
        return
    if isinstance(form, list):
        recording.gradients = StoredMapping(
            {_number(number, count): tensor(note) for number, note in form}
        )
        return
    gradients = StoredGradients()
    dict.update(gradients, {_number(number, count): tensor(note) for number, note in form["own"]})
    gradients.parameters = StoredMapping(
        {
            _number(number, len(recording.params)): tensor(note)
            for number, note in form["parameters"]
        }
    )
    gradients.arrivals = [(task, _number(number, count)) for task, number in form["arrivals"]]
    gradients.owners = {node: _number(entry, count) for node, entry in form["owners"]}
    for name in _GRADIENT_SETS:
        setattr(gradients, name, set(form[name]))
    gradients.has_checkpoint = bool(form["has_checkpoint"])
    gradients.missing = {_number(number, count): str(why) for number, why in form["missing"]}
    gradients.outside = list(map(_run_of, form["outside"]))
    gradients.watch.runs = list(map(_run_of, form["runs"]))
    recording.gradients = gradients


def _run_of(form: Any) -> NodeRun:
    run = NodeRun(*form)
    numbers: list[Any] = [
        value for value in run if value is not run.name and value is not run.parameter
    ]
    if not isinstance(run.name, str) or not all(
        type(number) in (int, float) and isfinite(number) for number in numbers
    ):
        raise TraceError(f"A run of a node must be a name and numbers, not {shown(form)}.")
    return run


def _number(number: Any, count: int) -> int:
    if type(number) is not int or not 0 <= number < count:
        raise TraceError(f"There is no row {shown(number)} among {count}.")
    return number
