"""Slices, run so that they are compiled once.

JAX compiles a slice for each place that it begins at, unless it is told of no strides; strides of
one are none. With jit off, a scan takes a slice with strides of one at each turn, so that a long
one would spend its time on compiling.
"""

from typing import Any

from jax.extend.core import primitives as known_primitives


def compiled_once(primitive: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Parameters by which a primitive does the same, and is not compiled for each place that it
    begins at.
    """
    is_slice = primitive is known_primitives.slice_p
    return (
        params | {"strides": None} if is_slice and set(params["strides"] or ()) == {1} else params
    )
