"""Steps of a program that give what they are given in another shape: their values need no memory of
their own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

# The value of a step, made of the value of what the step is given: both look at the same memory
# where that can be.
View = Callable[[Tensor], Tensor]

# What gives each of its arguments as it is.
_SAME = frozenset({"copy", "copy_p", "name", "optimization_barrier", "pvary", "stop_gradient"})


def view_made_by(equation: Any, place: int) -> tuple[int, View] | None:
    """Which argument the result at `place` looks at, and how; None where a step makes numbers of
    its own.
    """
    name, params = equation.primitive.name, equation.params
    if not all(
        isinstance(atom.aval.dtype, np.dtype)
        for atom in equation.invars
        if hasattr(atom.aval, "dtype")
    ):
        return None  # a random key has sides that its shape does not tell
    if name in _SAME:
        return place, lambda tensor: tensor
    if len(equation.invars) != 1:
        return None  # a side of a size that is computed
    shape = tuple(equation.outvars[place].aval.shape)
    if name == "reshape" and params["dimensions"] is None:
        return 0, lambda tensor: tensor.reshape(shape)
    if name == "transpose":
        return 0, lambda tensor: tensor.permute(tuple(params["permutation"]))
    if name == "squeeze":
        return 0, lambda tensor: tensor.squeeze(tuple(params["dimensions"]))
    if name == "broadcast_in_dim":
        return 0, lambda tensor: _broadcast(tensor, shape, params["broadcast_dimensions"])
    if name == "slice":
        starts, ends = params["start_indices"], params["limit_indices"]
        index = tuple(map(slice, starts, ends, params["strides"] or [1] * len(starts)))
        return 0, lambda tensor: tensor[index]
    if name == "split":
        axis, sizes = params["axis"], params["sizes"]
        return 0, lambda tensor: tensor.narrow(axis, sum(sizes[:place]), sizes[place])
    return None


def _broadcast(tensor: Tensor, shape: tuple[int, ...], sides: tuple[int, ...]) -> Tensor:
    for side in range(len(shape)):
        if side not in sides:
            tensor = tensor.unsqueeze(side)
    return tensor.expand(shape)
