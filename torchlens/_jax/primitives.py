"""The operation that the log has for a primitive of JAX, and how to run it again."""

import re
from typing import Any

import jax
import numpy as np
from jax.extend import core as extended_core
from jax.extend.core import primitives as known_primitives

from torchlens._jax.arrays import to_jax, to_torch
from torchlens._recording.operations import Operation, layer_type


class PrimitiveCall:
    """The `func_applied` of an entry: runs a primitive on tensors, arrays or numbers, and returns
    tensors.

    It converts the arguments to the types of the logged call: a random key is logged as the numbers
    in it, and a constant `2` may have been a float32.

    >>> entry = history['dotgeneral_1']
    >>> entry.func_applied(a, b, **entry.func_keyword_args_non_tensor)
    """

    def __init__(self, primitive: Any, dtypes: tuple[Any, ...]) -> None:
        self.primitive = primitive
        self.dtypes = dtypes
        self.__name__ = primitive.name
        self.__module__ = __name__
        # The name by which pickle finds it.
        self.__qualname__ = (
            f"PRIMITIVES.{primitive.name}({','.join(str(dtype) for dtype in dtypes)})"
        )

    def __call__(self, *args: Any, **params: Any) -> Any:
        if len(args) != len(self.dtypes):
            raise TypeError(
                f"The primitive {self.primitive.name} must be given {len(self.dtypes)} arrays, got "
                f"{len(args)}."
            )
        arrays = [to_jax(arg, dtype) for arg, dtype in zip(args, self.dtypes, strict=True)]
        with jax.disable_jit():
            result = self.primitive.bind(*arrays, **compiled_once(self.primitive, params))
        return (
            [to_torch(array) for array in result]
            if self.primitive.multiple_results
            else to_torch(result)
        )

    def __repr__(self) -> str:
        return f"<the JAX primitive {self.primitive.name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrimitiveCall) and (self.primitive, self.dtypes) == (
            other.primitive,
            other.dtypes,
        )

    def __hash__(self) -> int:
        return hash((self.primitive, self.dtypes))


_KNOWN: dict[tuple[Any, ...], Operation] = {}


def operation_of(primitive: Any, dtypes: tuple[Any, ...], is_backward: bool = False) -> Operation:
    """The operation for a primitive and the types of its arguments.

    A primitive of the backward pass has another operation, of the same name.
    """
    key = (primitive, dtypes, is_backward)
    operation = _KNOWN.get(key)
    if operation is None:
        call = PrimitiveCall(primitive, dtypes)
        operation = _KNOWN[key] = Operation(call, primitive.name, layer_type(_word(primitive.name)))
    return operation


def is_backward(operation: Operation) -> bool:
    """True for an operation of the backward pass."""
    call = operation.func
    return (
        isinstance(call, PrimitiveCall)
        and operation_of(call.primitive, call.dtypes) is not operation
    )


def _word(name: str) -> str:
    return re.sub(r"\W", "_", name)  # `scatter-add`


class _Primitives:
    """Finds a `PrimitiveCall` by its `__qualname__`, for pickle."""

    def __getattr__(self, text: str) -> PrimitiveCall:
        name, _, rest = text.partition("(")
        found = next(
            (
                value
                for value in vars(known_primitives).values()
                if isinstance(value, extended_core.Primitive) and value.name == name
            ),
            None,
        )
        if found is None:
            raise AttributeError(
                f"This version of JAX ({jax.__version__}) has no primitive {name!r}."
            )
        words = [word for word in rest.rstrip(")").split(",") if word]
        return PrimitiveCall(found, tuple(_dtype_named(word) for word in words))


def _dtype_named(word: str) -> Any:
    if word.startswith("key<"):
        tag = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}.get(
            word[4:-1], word[4:-1]
        )
        return jax.random.key(0, impl=tag).dtype
    return jax.dtypes.float0 if "float0" in word else np.dtype(word)


PRIMITIVES = _Primitives()


def compiled_once(primitive: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Equivalent parameters with which JAX compiles a slice once for all its start indices."""
    is_slice = primitive is known_primitives.slice_p
    return (
        params | {"strides": None} if is_slice and set(params["strides"] or ()) == {1} else params
    )
