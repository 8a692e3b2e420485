"""Going through a program of JAX step by step, into the programs inside it: calls, loops, what is
computed again.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jax.extend.core import ClosedJaxpr, Literal

_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
)
_REPEATED = frozenset({"remat2", "checkpoint"})
# A loop that would take more steps than this stays one step.
_MOST_STEPS = 10_000

# Which step it is: those that it stands in and itself, each by its id. One program may stand in
# several places.
Path = tuple[int, ...]
# Goes through the program inside a step: from what that is given to what it gives.
Body = Callable[[Sequence[Any]], list[Any]]


class Walker(Protocol):
    """What is done at each step. Values may stand for anything, and each method gives the results
    of its step.
    """

    def constant(self, value: Any) -> Any:
        """What stands for a constant."""

    def step(self, equation: Any, path: Path, given: list[Any]) -> Sequence[Any]:
        """A step that is no program, or is not looked into."""

    def call(self, equation: Any, path: Path, given: list[Any], body: Body) -> Sequence[Any]:
        """A step that only runs a program."""

    def repeat(self, equation: Any, path: Path, given: list[Any], body: Body) -> Sequence[Any]:
        """What `jax.checkpoint` computes again in a backward pass, instead of keeping it."""

    def loop(self, equation: Any, path: Path, given: list[Any], body: Body) -> Sequence[Any]:
        """A scan; the body is one turn of it."""


def walk_program(program: Any, args: Sequence[Any], walker: Walker, above: Path = ()) -> list[Any]:
    """The results of a program, as `walker` gives those of its steps."""
    known: dict[Any, Any] = dict(zip(program.jaxpr.invars, args, strict=True))
    known |= {
        var: walker.constant(value)
        for var, value in zip(program.jaxpr.constvars, program.consts, strict=True)
    }

    def read(atom: Any) -> Any:
        return walker.constant(atom.val) if isinstance(atom, Literal) else known[atom]

    for equation in program.jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        path = (*above, id(equation))
        name, inner = equation.primitive.name, _program_in(equation)
        if inner is None:
            results = walker.step(equation, path, given)
        else:
            body = _body(inner, walker, path)
            if name == "scan":
                results = walker.loop(equation, path, given, body)
            elif name in _REPEATED and equation.params.get("differentiated"):
                results = walker.repeat(equation, path, given, body)
            else:
                results = walker.call(equation, path, given, body)
        known |= dict(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in program.jaxpr.outvars]


def loop_parts(equation: Any, given: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """What a scan is given: what is the same at each turn, what is carried, and what it goes
    along.
    """
    num_constants, num_carried = equation.params["num_consts"], equation.params["num_carry"]
    first, second = num_constants, num_constants + num_carried
    return list(given[:first]), list(given[first:second]), list(given[second:])


def _body(inner: Any, walker: Walker, path: Path) -> Body:
    return lambda given: walk_program(inner, given, walker, path)


def _program_in(equation: Any) -> Any:
    """The program inside a step, if it is one to look into."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["jaxpr"] if 0 < _num_steps(equation) <= _MOST_STEPS else None
    if name not in _CALLS and name not in _REPEATED:
        return None
    inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
    return inner if inner is None or isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


def _num_steps(equation: Any) -> int:
    """How many steps it takes where every loop in it is gone through turn by turn."""
    name = equation.primitive.name
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if inner is None or (name != "scan" and name not in _CALLS | _REPEATED):
        return 1
    turns: int = equation.params["length"] if name == "scan" else 1
    return turns * (1 + sum(map(_num_steps, getattr(inner, "jaxpr", inner).eqns)))
