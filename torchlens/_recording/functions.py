"""Functions by name: what their arguments are called, and how one is found again in another
process.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from torchlens.errors import TorchLensError

# Where torch keeps functions that do not say where they are kept.
_NAMESPACES = (
    "torch", "torch._C._nn", "torch._C._linalg", "torch._C._fft", "torch._C._special",
    "torch._C._sparse",
    "torch._C._nested", "torch._VF", "torch.nn.functional", "torch._C",
)  # fmt: skip


def argument_names(func: Callable[..., Any]) -> tuple[str, ...]:
    """`('input', 'weight', ...)`; empty if unknown."""
    try:
        return tuple(inspect.signature(func).parameters)
    except (TypeError, ValueError):  # written in C: ask torch's schemas, then its documentation
        name = getattr(func, "__name__", "")
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    if schemas:
        longest = max(schemas, key=lambda schema: len(schema.arguments))
        return tuple(argument.name for argument in longest.arguments if not argument.is_out)
    return _documented_names(name, getattr(func, "__doc__", None) or "")


def _documented_names(name: str, text: str) -> tuple[str, ...]:
    """The arguments in the first signature of a docstring: `relu(input, inplace=False)`."""
    documented = re.search(rf"\b{re.escape(name)}\(([^)]*)\)", text) if name else None
    if documented is None:
        return ()
    words = (part.split("=")[0].strip(" *\\") for part in documented.group(1).split(","))
    return tuple(word for word in words if word.isidentifier())


def values_used_by(function: FunctionType) -> dict[str, Any]:
    """The closure variables and globals that a function, or one inside it, names, with their
    values.
    """
    named: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # the cell is empty
            named[name] = cell.cell_contents
    names = filter(function.__globals__.__contains__, names_used_by(function))
    return named | {name: function.__globals__[name] for name in names}


def names_used_by(function: FunctionType) -> list[str]:
    """The names of globals and attributes in the code of a function and of those inside it."""
    codes = _with_inner(function.__code__)
    return list(dict.fromkeys(name for code in codes for name in code.co_names))


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of the functions inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _with_inner(const)


class StandIn:
    """Replaces a function that could not be copied: has its repr, and raises when called.

    >>> StandIn('<function <lambda>>', 'it has no name to be found by')()
    """

    def __init__(self, text: str, reason: str, reference: "Reference | None" = None) -> None:
        self._text = text
        self._reason = reason
        self._reference = reference  # by which yet another process may find it
        names = () if reference is None else dict.fromkeys(reference.argument_names)
        # Only positional-only parameters may be named `from`, as in torch's `uniform_`.
        kind = inspect.Parameter.POSITIONAL_ONLY
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def __repr__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandIn) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TorchLensError(self.explanation)

    @property
    def explanation(self) -> str:
        """The reason why the function is missing."""
        return f"This history is a copy, and {self._text} did not come with it: {self._reason}"

    def __reduce__(self) -> tuple[Any, ...]:
        return StandIn, (self._text, self._reason, self._reference)


class Reference(NamedTuple):
    """The name of a function, to find it in another process; `module` is None if it has none."""

    module: str | None
    path: str  # `Tensor.add` for `torch.Tensor.add`
    text: str
    argument_names: tuple[str, ...]


def reference_to(func: Any) -> Reference:
    """How `func` may be found in another process."""
    if isinstance(func, StandIn) and func._reference is not None:
        return func._reference
    names = tuple(name for name in argument_names(func) if name.isidentifier())
    for module, path in _candidates(func):
        try:
            is_found = _is_same(_at(module, path), func)
        except (AttributeError, ImportError):
            continue
        if is_found:
            return Reference(module, path, f"{module}.{path}", names)
    known = [getattr(func, attribute, None) for attribute in ("__qualname__", "__name__")]
    name = next(filter(None, known), type(func).__name__)
    owner = getattr(func, "__module__", None) or type(func).__module__
    return Reference(None, name, f"{owner}.{name}", names)


def found_again(reference: Reference) -> Any:
    """The function, or a StandIn if it cannot be found."""
    module, path, text, _ = reference
    if module is None:
        reason = (
            "it is no function at the top of a module, and only those are found again by their "
            "name."
        )
        return StandIn(text, reason, reference)
    try:
        return _at(module, path)
    except Exception as error:  # the import of a foreign module may raise anything
        reason = (
            f"functions go by name, and this name is not known here ({type(error).__name__}: "
            f"{error})."
        )
        return StandIn(text, reason, reference)


def _at(module: str, path: str) -> Any:
    found: Any = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _is_same(found: Any, func: Any) -> bool:
    # A method of a class, `Function.apply` say, is another object each time it is asked for.
    return found is func or (
        type(found) is type(func) and not isinstance(func, type) and bool(found == func)
    )


def _candidates(func: Any) -> list[tuple[str, str]]:
    """Places where `func` may be found, as module and path."""
    if isinstance(func, torch._ops.OpOverload):
        return [("torch", f"{_path_of_operator(func._schema.name)}.{func._overloadname}")]
    if isinstance(func, torch._ops.OpOverloadPacket):
        return [("torch", _path_of_operator(func._qualified_op_name))]
    name = getattr(func, "__name__", None)
    if not isinstance(name, str):
        return []
    if name in ("__get__", "__set__", "__delete__"):  # of a property
        paths = _names_on_tensor(getattr(func, "__self__", None))
        return [("torch", f"Tensor.{path}.{name}") for path in paths]
    return [*_own_places(func, name), *_places_in_torch(func, name)]


def _own_places(func: Any, name: str) -> list[tuple[str, str]]:
    """The places that a function itself names."""
    found: list[tuple[str, str]] = []
    owner = getattr(func, "__self__", None)
    module, path = getattr(func, "__module__", None), getattr(func, "__qualname__", None)
    if isinstance(module, str) and isinstance(path, str) and "<" not in path:
        found.append((module, path))
    if isinstance(owner, type):
        found.append((owner.__module__, f"{owner.__qualname__}.{name}"))
    return found


def _places_in_torch(func: Any, name: str) -> list[tuple[str, str]]:
    """Where torch may keep a function of this name."""
    methods = [("torch", f"Tensor.{path}") for path in _names_on_tensor(func)]
    return [("torch", f"Tensor.{name}"), *((place, name) for place in _NAMESPACES), *methods]


def _path_of_operator(name: str) -> str:
    """`ops.aten.add` for `aten::add`."""
    return f"ops.{name.replace('::', '.')}"


def _names_on_tensor(value: Any) -> list[str]:
    """What a method or property of Tensor is called there, whatever it calls itself."""
    return [
        name
        for kind in torch.Tensor.__mro__
        for name, known in vars(kind).items()
        if known is value
    ]
