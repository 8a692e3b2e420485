"""Converts Python values to JSON and back: the arguments of calls, paths, anything beside tensors.

Numbers, text and None are written as they are, tuples as lists, and anything else as an object
whose first key names its kind. Functions and objects of unknown classes have no form of their own.
A pickle keeps them beside the documents, and refers to them by number. A file has only their text:
reading it runs no code, and gives a `StandIn`, which prints as the object did.
"""

import base64
import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlens._portable.live_objects import FUNCTIONS, LiveObjects, text_of
from torchlens._portable.tensor_notes import Note, dtype_named, word_of
from torchlens._recording.functions import Reference, StandIn, reference_to
from torchlens._recording.stored import opened
from torchlens._recording.symbolic import SymbolicInt, inert
from torchlens._text.plain_text import shown
from torchlens.errors import TraceError

_DEEPEST = 100
_PLAIN = frozenset({bool, int, str, type(None)})
_NOT_STORED = (
    "functions are live objects, and a file holds no more than their name; ask a history of the "
    "model itself for it."
)


class PythonWriter:
    """Makes JSON of values. `add` takes a tensor and the name it may have, and gives its note.

    `objects` takes live objects; without it, they become text.
    """

    def __init__(
        self, add: Callable[[Tensor, str], Note], objects: LiveObjects | None = None
    ) -> None:
        self._add = add
        self.objects = objects
        self._functions: dict[int, tuple[Any, Any]] = {}

    def write(self, value: Any, name: str = "", depth: int = 0) -> Any:
        """The JSON of `value`. Tensors in it are called `name` and their place in it."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in _SIMPLE:
            return _SIMPLE[kind](value)
        if depth > _DEEPEST:
            return {"object": "...", "why": f"it is nested more than {_DEEPEST} deep."}
        if kind is tuple:
            return self._items(value, name, depth)
        if kind in (list, set, frozenset):
            return {kind.__name__: self._items(value, name, depth)}
        if kind is dict:
            return {"dict": [self._pair(key, item, name, depth + 1) for key, item in value.items()]}
        if kind is slice:
            return {"slice": self._items((value.start, value.stop, value.step), name, depth)}
        if isinstance(value, Tensor):
            return {"tensor": self._add(value, name)}
        if self.objects is not None:
            return {"kept": self.objects.keep(value)}
        return self._text_of_object(value, name, depth)

    def _pair(self, key: Any, value: Any, name: str, depth: int) -> tuple[Any, Any]:
        return self.write(key, "", depth), self.write(value, f"{name}.{key}", depth)

    def _items(self, values: Any, name: str, depth: int) -> list[Any]:
        return [self.write(item, f"{name}.{place}", depth + 1) for place, item in enumerate(values)]

    def _tuple(self, value: tuple[Any, ...], name: str, depth: int) -> Any:
        items = self._items(value, name, depth)
        fields: Any = getattr(value, "_fields", None) or getattr(value, "__match_args__", ())
        if len(fields) != len(items):
            return items
        return {"named": type(value).__name__, "fields": list(fields), "items": items}

    def _text_of_object(self, value: Any, name: str, depth: int) -> Any:
        if isinstance(value, tuple):
            return self._tuple(value, name, depth)
        if isinstance(value, np.ndarray):
            return self._array(value, name)
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return {"scalar": value.dtype.str, "bytes": _base64(value.tobytes())}
        if isinstance(value, (StandIn, *FUNCTIONS)):
            return self.function(value)
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        why = f"it is of the class {kind}, and a file holds no objects."
        return {"object": text_of(value), "why": why}

    def _array(self, value: np.ndarray[Any, Any], name: str) -> Any:
        try:
            tensor = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        except TypeError:  # text, dates, objects
            return {"object": text_of(value), "why": f"it is an array of {value.dtype}."}
        return {"array": self._add(tensor, name)}

    def function(self, func: Any) -> Any:
        """The JSON of a function: its name, and those of its arguments."""
        if self.objects is not None:
            return {"kept": self.objects.keep(func)}
        known = self._functions.get(id(func))
        if known is None:
            if isinstance(func, StandIn) and func._reference is None:
                made: Any = {"object": repr(func), "why": func._reason}
            else:
                made = {"function": reference_parts(func)}
            known = self._functions[id(func)] = (func, made)
        return known[1]


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _float(value: float) -> Any:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else {"float": repr(value)}


def _size(size: Any) -> Any:
    size = inert(size)
    if isinstance(size, SymbolicInt):
        return {"symbolic": str(size), "example": int(size) if size.is_known else None}
    return size


_SIMPLE: dict[type, Callable[[Any], Any]] = {
    float: _float,
    torch.dtype: lambda value: {"dtype": word_of(value)},
    torch.Size: lambda value: {"size": list(map(_size, value))},
    torch.SymInt: _size,
    SymbolicInt: _size,
    torch.device: lambda value: {"device": str(value)},
    torch.layout: lambda value: {"layout": word_of(value)},
    torch.memory_format: lambda value: {"memory_format": word_of(value)},
    type(Ellipsis): lambda value: {"ellipsis": True},
    complex: lambda value: {"complex": [repr(value.real), repr(value.imag)]},
    bytes: lambda value: {"bytes": _base64(value)},
    range: lambda value: {"range": [value.start, value.stop, value.step]},
}


# -- reading ---------------------------------------------------------------------------------------


class FunctionStandIn(StandIn):
    """Replaces a function in a loaded history; has its name and its arguments' names."""

    def __init__(self, text: str, reason: str, reference: Reference) -> None:
        super().__init__(text, reason, reference)
        self.__name__ = self.__qualname__ = reference.path.rpartition(".")[2]

    @property
    def explanation(self) -> str:
        return (
            f"This history was loaded from a file, and {self._text} did not come with it: "
            f"{self._reason}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return FunctionStandIn, (self._text, self._reason, self._reference)


def reference_parts(func: Any) -> list[Any]:
    """The names of a function and its arguments; `function_of` makes a stand-in of them."""
    reference = reference_to(func)
    name = getattr(func, "__name__", "")
    return [reference.module, reference.path, reference.text, list(reference.argument_names), name]


def function_of(parts: Any) -> Any:
    """A stand-in for a function; an operator of torch itself, which runs only when it is called."""
    module, path, text, names, name = parts
    if not all(isinstance(word, str) for word in (path, text, name, *names)) or not isinstance(
        module, str | None
    ):
        raise TraceError(f"A function must be given by its names, not by {shown(parts)}.")
    operator = _operator_at(module, path)
    if operator is not None:
        return operator
    known = tuple(word for word in names if word.isidentifier())
    stand_in = FunctionStandIn(text, _NOT_STORED, Reference(module, path, text, known))
    stand_in.__name__ = name
    return stand_in


def _operator_at(module: str | None, path: str) -> Any:
    """An operator of `torch.ops` that is registered here, since costs are found by it. Nothing is
    imported for it.
    """
    words = path.split(".")
    is_path = module == "torch" and words[0] == "ops" and len(words) in (3, 4)
    if not is_path or not all(map(str.isidentifier, words)):
        return None
    if not torch._C._jit_get_schemas_for_operator(f"{words[1]}::{words[2]}"):
        return None
    found: Any = torch.ops
    for word in words[1:]:
        found = getattr(found, word, None)
    return found if isinstance(found, torch._ops.OpOverload | torch._ops.OpOverloadPacket) else None


class PythonReader:
    """Makes values of JSON. `tensor` takes a note and gives the tensor, or a `StoredValue`.

    `objects` are the live objects of a pickle.
    """

    def __init__(self, tensor: Callable[[Note], Any], objects: Sequence[Any] = ()) -> None:
        self._tensor = tensor
        self.objects = objects

    def read(self, form: Any) -> Any:
        """The value that the JSON describes."""
        if type(form) is list:
            return tuple(map(self.read, form))
        if type(form) is not dict:
            return form
        reading = _READINGS.get(next(iter(form), ""))
        if reading is None:
            raise TraceError(f"A value must be of a known kind, not {shown(form)}.")
        return reading(self, form)

    def items(self, forms: Any) -> list[Any]:
        return list(map(self.read, forms))

    def pairs(self, form: Any) -> dict[Any, Any]:
        """A dictionary, from its pairs; a key that has no hash becomes text."""
        found = {}
        for key, item in form:
            own = self.read(key)
            try:
                hash(own)
            except TypeError:
                own = repr(own)
            found[own] = self.read(item)
        return found

    def tensor(self, form: Any) -> Any:
        return opened(self._tensor(form))

    def function(self, parts: Any) -> Any:
        """A function of an operation."""
        return self.objects[parts] if type(parts) is int else function_of(parts)


def _named(reader: PythonReader, form: Any) -> Any:
    items = tuple(reader.items(form["items"]))
    try:
        return namedtuple(form["named"], form["fields"])(*items)
    except (TypeError, ValueError):  # names that no such tuple can have
        return items


def _of_torch(word: str, kind: type) -> Callable[[PythonReader, Any], Any]:
    def read(reader: PythonReader, form: Any) -> Any:
        name = form[word]
        found = getattr(torch, name, None) if isinstance(name, str) else None
        if not isinstance(found, kind):
            raise TraceError(f"torch {torch.__version__} has no {word} {shown(name)}.")
        return found

    return read


def _device(reader: PythonReader, form: Any) -> Any:
    try:
        return torch.device(str(form["device"]))
    except RuntimeError:  # of a kind that this torch does not know
        return StandIn(str(form["device"]), "there is no such device here.")


def _scalar(reader: PythonReader, form: Any) -> Any:
    kind = np.dtype(form["scalar"])
    if kind.hasobject:
        raise TraceError(f"A number must not be of the dtype {shown(form['scalar'])}.")
    return np.frombuffer(base64.b64decode(form["bytes"]), kind)[0]


def _symbolic(reader: PythonReader, form: Any) -> SymbolicInt:
    """A symbol that prints as the expression did; what is computed from it is one again."""
    import sympy

    example = form["example"]
    symbol = sympy.Symbol(str(form["symbolic"]), integer=True, positive=True)
    return SymbolicInt(None if example is None else int(example), symbol)


_READINGS: dict[str, Callable[[PythonReader, Any], Any]] = {
    "tensor": lambda reader, form: reader.tensor(form["tensor"]),
    "kept": lambda reader, form: reader.objects[form["kept"]],
    "dtype": lambda reader, form: dtype_named(form["dtype"]),
    "list": lambda reader, form: reader.items(form["list"]),
    "dict": lambda reader, form: reader.pairs(form["dict"]),
    "slice": lambda reader, form: slice(*reader.items(form["slice"])),
    "size": lambda reader, form: torch.Size(reader.items(form["size"])),
    "symbolic": _symbolic,
    "device": _device,
    "layout": _of_torch("layout", torch.layout),
    "memory_format": _of_torch("memory_format", torch.memory_format),
    "ellipsis": lambda reader, form: Ellipsis,
    "named": _named,
    "function": lambda reader, form: function_of(form["function"]),
    "object": lambda reader, form: StandIn(str(form["object"]), str(form["why"])),
    "array": lambda reader, form: reader.tensor(form["array"]).numpy(),
    "scalar": _scalar,
    "set": lambda reader, form: set(reader.items(form["set"])),
    "frozenset": lambda reader, form: frozenset(reader.items(form["frozenset"])),
    "complex": lambda reader, form: complex(*map(float, form["complex"])),
    "bytes": lambda reader, form: base64.b64decode(form["bytes"]),
    "range": lambda reader, form: range(*form["range"]),
    "float": lambda reader, form: float(form["float"]),
}
