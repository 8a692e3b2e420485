"""Going through a program of JAX step by step, into the programs inside it that only give a part of it a name."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

__all__ = ["walk_program"]

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"})

# Gives the results of one step, from the step and what it is given.
Step = Callable[[Any, list[Any]], Sequence[Any]]


def walk_program(program: Any, args: Sequence[Any], constant: Callable[[Any], Any], step: Step, enter: Step) -> list[Any]:
    """The results of a program, where `step` gives those of each step and `constant` what stands for a constant.

    `enter` is told of each step that is itself a program, before that is gone through.
    """
    known: dict[Any, Any] = dict(zip(program.jaxpr.invars, args, strict=True))
    known |= {var: constant(value) for var, value in zip(program.jaxpr.constvars, program.consts, strict=True)}

    def read(atom: Any) -> Any:
        return constant(atom.val) if isinstance(atom, Literal) else known[atom]

    for equation in program.jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        inner = _program_in(equation)
        if inner is None:
            results: Sequence[Any] = step(equation, given)
        else:
            enter(equation, given)
            results = walk_program(inner, given, constant, step, enter)
            enter(None, [])
        known |= dict(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in program.jaxpr.outvars]


def _program_in(equation: Any) -> Any:
    """The program that a step does nothing but run; None for any other step.

    What `jax.checkpoint` repeats in a backward pass stays a step of its own, or it would not be repeated.
    """
    name, params = equation.primitive.name, equation.params
    is_checkpoint = name in ("remat2", "checkpoint") and not params.get("differentiated")
    if name not in _CALLS and not is_checkpoint:
        return None
    inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
    return inner if inner is None or isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
