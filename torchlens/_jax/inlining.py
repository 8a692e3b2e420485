"""Primitives that run a program of their own: each step of it is logged, and not the whole.

Outside of other programs, loops and conditions run as Python while jit is off. Inside one (a
condition under vmap, what `jax.checkpoint` repeats) JAX has a primitive for each, which would run
compiled, in one piece.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.extend.core import primitives as known_primitives

from torchlens._jax.internals import CUSTOM_VMAP, REFERENCES
from torchlens.errors import TorchLensError

Arrays = Sequence[Any]


def _run(program: Any, args: Arrays) -> list[Any]:
    return list(jax.core.eval_jaxpr(program.jaxpr, program.consts, *args))


def _call(args: Arrays, params: dict[str, Any]) -> list[Any]:
    program = params.get("jaxpr") or params.get("call_jaxpr") or params.get("call")
    return _run(program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ()), args)


def _condition(args: Arrays, params: dict[str, Any]) -> list[Any]:
    branches = params["branches"]
    index, *operands = args
    return _run(branches[int(np.clip(int(index), 0, len(branches) - 1))], operands)


def _while(args: Arrays, params: dict[str, Any]) -> list[Any]:
    num_test, num_body = params["cond_nconsts"], params["body_nconsts"]
    test_constants, body_constants = args[:num_test], args[num_test : num_test + num_body]
    carried = list(args[num_test + num_body :])
    while True:
        (goes_on,) = _run(params["cond_jaxpr"], [*test_constants, *carried])
        if not bool(goes_on.any() if goes_on.ndim else goes_on):
            return carried
        results = _run(params["body_jaxpr"], [*body_constants, *carried])
        # Under vmap, each of a batch stops at its own time and keeps what it has.
        carried = (
            [_where(goes_on, new, old) for new, old in zip(results, carried, strict=True)]
            if goes_on.ndim
            else results
        )


def _where(is_new: Any, new: Any, old: Any) -> Any:
    return jax.lax.select(jax.lax.broadcast_in_dim(is_new, new.shape, range(is_new.ndim)), new, old)


def _scan(args: Arrays, params: dict[str, Any]) -> list[Any]:
    num_constants, num_carried = params["num_consts"], params["num_carry"]
    constants, carried = (
        list(args[:num_constants]),
        list(args[num_constants : num_constants + num_carried]),
    )
    sequences = args[num_constants + num_carried :]
    steps = range(params["length"])
    made: list[list[Any]] = []
    for step in reversed(steps) if params["reverse"] else steps:
        items = [jax.lax.index_in_dim(sequence, step, keepdims=False) for sequence in sequences]
        results = _run(params["jaxpr"], [*constants, *carried, *items])
        carried = results[:num_carried]
        made.append(results[num_carried:])
    if params["reverse"]:
        made.reverse()
    if made:
        return [*carried, *(jax.numpy.stack(column) for column in zip(*made, strict=True))]
    results = params["jaxpr"].out_avals[num_carried:]
    with jax.disable_jit():  # it is on where the body was traced, for want of a turn
        return [
            *carried,
            *(jax.numpy.zeros((0, *result.shape), result.dtype) for result in results),
        ]


def _refuse(args: Arrays, params: dict[str, Any]) -> list[Any]:
    raise TorchLensError(
        "A log cannot follow references that are written to (jax.new_ref), because it identifies "
        "arrays by what they are, and a reference changes. Pass the array along instead (x = "
        "x.at[0].set(1)), or log the function without that part."
    )


_BY_NAME: dict[str, Callable[[Arrays, dict[str, Any]], list[Any]]] = {
    "jit_p": _call,
    "remat_p": _call,
    "closed_call_p": _call,
    "cond_p": _condition,
    "while_p": _while,
    "scan_p": _scan,
}

# Primitive → what runs it step by step.
INLINED = {
    getattr(known_primitives, name): run
    for name, run in _BY_NAME.items()
    if hasattr(known_primitives, name)
}
INLINED |= dict.fromkeys(CUSTOM_VMAP, _call) | dict.fromkeys(REFERENCES, _refuse)
