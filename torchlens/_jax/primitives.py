"""What a primitive of JAX is called in the log, and how it is run again."""

import re
from typing import Any

import jax
import numpy as np
from jax.extend import core as extended_core
from jax.extend.core import primitives as known_primitives

from torchlens._jax.arrays import to_jax, to_torch
from torchlens._recording.operations import Operation, layer_type


class PrimitiveCall:
    """Runs a primitive on tensors, arrays or numbers, and returns tensors: what an entry's
    `func_applied` is.

    It knows the types of the arrays that the primitive was given, which a tensor or a number does
    not always tell: a random key is logged as the numbers in it, and `2` was a float32.

    >>> entry = history['dotgeneral_1']
    >>> entry.func_applied(a, b, **entry.func_keyword_args_non_tensor)
    """

    def __init__(self, primitive: Any, dtypes: tuple[Any, ...]) -> None:
        self.primitive = primitive
        self.dtypes = dtypes
        self.__name__ = primitive.name
        self.__module__ = __name__
        # By which a copy of a history finds it again.
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
    """The operation that the log names for a primitive given arrays of these types.

    Where JAX transposed the program to compute gradients, it is another than in the program itself,
    of the same name.
    """
    key = (primitive, dtypes, is_backward)
    operation = _KNOWN.get(key)
    if operation is None:
        call = PrimitiveCall(primitive, dtypes)
        operation = _KNOWN[key] = Operation(call, primitive.name, layer_type(_word(primitive.name)))
    return operation


def is_backward(operation: Operation) -> bool:
    """Whether it is part of a program that JAX transposed."""
    call = operation.func
    return (
        isinstance(call, PrimitiveCall)
        and operation_of(call.primitive, call.dtypes) is not operation
    )


def _word(name: str) -> str:
    return re.sub(r"\W", "_", name)  # `scatter-add`


class _Primitives:
    """Finds the call of a primitive by the name it gives itself; AttributeError where JAX has no
    such primitive now.
    """

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
    """Parameters by which a primitive does the same, and is not compiled for each place that it
    begins at.
    """
    is_slice = primitive is known_primitives.slice_p
    return (
        params | {"strides": None} if is_slice and set(params["strides"] or ()) == {1} else params
    )
