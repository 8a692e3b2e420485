"""The program that JAX itself writes down of a function, in a form that a log can be compared
with.
"""

from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from torchlens import ModelHistory
from torchlens._recording.recording import located

# A node: the primitive and what it reads, in order; ("input", n) for what goes in; a number for a
# constant.
Node = Any
_INLINE = {
    "jit",
    "pjit",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
    "checkpoint",
    "closed_call",
    "core_call",
}


def outputs_of_jaxpr(function: Any, *args: Any) -> list[Node]:
    """What each result is computed from, as nested tuples."""
    program = jax.make_jaxpr(function)(*args)
    inputs = [("input", place) for place in range(len(program.jaxpr.invars))]
    return _run(program.jaxpr, program.consts, inputs)


def _run(jaxpr: Any, consts: Any, args: list[Node]) -> list[Node]:
    known: dict[Any, Node] = dict(zip(jaxpr.invars, args, strict=True))
    known |= {var: _constant(value) for var, value in zip(jaxpr.constvars, consts, strict=True)}

    def read(atom: Any) -> Node:
        return _constant(atom.val) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        name = equation.primitive.name
        if name in _INLINE:
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            results = (
                _run(inner.jaxpr, inner.consts, given)
                if isinstance(inner, ClosedJaxpr)
                else _run(inner, (), given)
            )
        elif _changes_nothing(equation) or (
            name == "convert_element_type" and isinstance(given[0], str)
        ):
            results = given
        else:
            node = (name, *given)
            several = len(equation.outvars) > 1
            results = [
                (*node, index) if several else node for index in range(len(equation.outvars))
            ]
        known |= dict(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _changes_nothing(equation: Any) -> bool:
    if equation.primitive.name not in ("convert_element_type", "broadcast_in_dim"):
        return False
    before, after = equation.invars[0].aval, equation.outvars[0].aval
    return (before.dtype, before.shape) == (after.dtype, after.shape)


def _constant(value: Any) -> Node:
    value = np.asarray(value)
    return str(round(float(value), 5)) if value.ndim == 0 else ("constant", value.shape)


def outputs_of_log(history: ModelHistory) -> list[Node]:
    """The same of a log."""
    log = history._log
    recording = log.recording
    inputs = {number: ("input", place) for place, (_, number) in enumerate(recording.inputs)}
    buffers = {number for _, number in recording.buffers}
    known: dict[int, Node] = {}
    for number, row in enumerate(recording.rows):
        if number in inputs:
            known[number] = inputs[number]
        elif number in buffers:
            known[number] = ("constant", tuple(row.shape))
        else:
            read = dict(located(row.references))
            given = [
                known[read[place]] if place in read else _constant(arg)
                for place, arg in enumerate(row.args)
            ]
            several = () if row.output_index is None else (row.output_index,)
            known[number] = (row.operation.name, *given, *several)
    return [known[recording.rows[number].references[0]] for _, number in recording.outputs]
