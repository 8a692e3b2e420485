"""The programs inside JAX's primitives: loops, conditions, calls and custom derivatives.

`INLINED` runs them step by step while a function is logged, `walk_program` goes through one
without running it, and `tapped` compiles one that also returns some of its inner values.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from jax.extend.core import primitives as known_primitives

from torchlens._jax.arrays import as_known_type
from torchlens._jax.internals import CUSTOM_VMAP, REFERENCES, without_constants
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
        # Under vmap, each element of the batch stops at its own time and keeps its values.
        carried = (
            [_where(goes_on, new, old) for new, old in zip(results, carried, strict=True)]
            if goes_on.ndim
            else results
        )


def _where(is_new: Any, new: Any, old: Any) -> Any:
    return jax.lax.select(jax.lax.broadcast_in_dim(is_new, new.shape, range(is_new.ndim)), new, old)


def _scan(args: Arrays, params: dict[str, Any]) -> list[Any]:
    constants, carried, sequences = loop_parts(params, args)
    num_carried = len(carried)
    made: list[list[Any]] = []
    steps = range(params["length"])
    for step in reversed(steps) if params["reverse"] else steps:
        items = [jax.lax.index_in_dim(sequence, step, keepdims=False) for sequence in sequences]
        results = _run(params["jaxpr"], [*constants, *carried, *items])
        carried = results[:num_carried]
        made.append(results[num_carried:])
    if params["reverse"]:
        made.reverse()
    return [*carried, *(jax.numpy.stack(column) for column in zip(*made, strict=True))]


def _refuse(args: Arrays, params: dict[str, Any]) -> list[Any]:
    raise TorchLensError(
        "torchlens cannot log mutable references (jax.new_ref). Return a changed array instead "
        "(x = x.at[0].set(1)), or log the function without that part."
    )


_BY_NAME: dict[str, Callable[[Arrays, dict[str, Any]], list[Any]]] = {
    "jit_p": _call,
    "remat_p": _call,
    "closed_call_p": _call,
    "cond_p": _condition,
    "while_p": _while,
    "scan_p": _scan,
}

# Primitive → the function that runs it step by step.
INLINED = {
    getattr(known_primitives, name): run
    for name, run in _BY_NAME.items()
    if hasattr(known_primitives, name)
}
INLINED |= dict.fromkeys(CUSTOM_VMAP, _call) | dict.fromkeys(REFERENCES, _refuse)


# -- walking without running
# -------------------------------------------------------------------------------------------------


_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
)
_REPEATED = frozenset({"remat2", "checkpoint"})
# A loop with more steps than this remains one step.
_MOST_STEPS = 10_000

# The ids of the equations around a step, and its own. One program may occur in several places.
Path = tuple[int, ...]
# Walks the program inside a step: from its arguments to its results.
Body = Callable[[Sequence[Any]], list[Any]]


class Walker(Protocol):
    """Handles each step of a program. Values may be of any type; each method returns the results of
    its step.
    """

    def constant(self, value: Any) -> Any:
        """The value that represents a constant."""

    def step(self, equation: Any, path: Path, given: list[Any]) -> Sequence[Any]:
        """A step without an inner program, or one that remains one step."""

    def call(self, equation: Any, path: Path, given: list[Any], body: Body) -> Sequence[Any]:
        """A step that only calls a program."""

    def repeat(self, equation: Any, path: Path, given: list[Any], body: Body) -> Sequence[Any]:
        """The part that `jax.checkpoint` computes again in a backward pass."""

    def loop(self, equation: Any, path: Path, given: list[Any], body: Body) -> Sequence[Any]:
        """A scan; `body` is one iteration."""


def walk_program(program: Any, args: Sequence[Any], walker: Walker, above: Path = ()) -> list[Any]:
    """The results of a program, from the results that `walker` returns for its steps."""
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


def loop_parts(
    params: dict[str, Any], args: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """The arguments of a scan: constants, the initial carry, and the sequences that it slices."""
    first = params["num_consts"]
    second = first + params["num_carry"]
    return list(args[:first]), list(args[first:second]), list(args[second:])


def _body(inner: Any, walker: Walker, path: Path) -> Body:
    return lambda given: walk_program(inner, given, walker, path)


def _program_in(equation: Any) -> Any:
    """The program inside a step; None if the step remains one step."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["jaxpr"] if 0 < _num_steps(equation) <= _MOST_STEPS else None
    if name not in _CALLS and name not in _REPEATED:
        return None
    inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
    return inner if inner is None or isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


def _num_steps(equation: Any) -> int:
    """The number of steps with every loop in it unrolled."""
    name = equation.primitive.name
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if inner is None or (name != "scan" and name not in _CALLS | _REPEATED):
        return 1
    turns: int = equation.params["length"] if name == "scan" else 1
    return turns * (1 + sum(map(_num_steps, getattr(inner, "jaxpr", inner).eqns)))


# -- compiling with inner values
# -------------------------------------------------------------------------------------------------


# A step, and the index of one of its results.
Tap = tuple[Path, int]
Made = dict[Tap, Any]


def tapped(
    program: Any, taps: Sequence[Tap]
) -> Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]:
    """A compiled function of constants and arguments that returns the program's results, and the
    value of each tap.

    A tap inside a loop is one array with the values of all iterations, in the order of the slices.
    """

    def run(constants: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        walker = _Tapping(frozenset(taps))
        results = walk_program(ClosedJaxpr(program.jaxpr, constants), arrays, walker)
        return results, [as_known_type(walker.made[tap]) for tap in taps]

    compiled: Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]] = jax.jit(run)
    return compiled


class _Tapping:
    """Runs each step, and keeps the values of the taps."""

    def __init__(self, taps: frozenset[Tap]) -> None:
        self.made: Made = {}
        self._taps = taps

    def constant(self, value: Any) -> Any:
        return value

    def step(self, equation: Any, path: Path, given: list[Any]) -> Sequence[Any]:
        params = equation.primitive.get_bind_params(equation.params)
        result = equation.primitive.bind(*given, **params)
        return self._keep(path, list(result) if equation.primitive.multiple_results else [result])

    def call(self, equation: Any, path: Path, given: list[Any], body: Body) -> Sequence[Any]:
        return body(given)

    def repeat(self, equation: Any, path: Path, given: list[Any], body: Body) -> Sequence[Any]:
        """Remains one step, with further results: inlined, it would not be computed again."""
        inside: list[Tap] = []

        def run(*arrays: Any) -> tuple[list[Any], list[Any]]:
            results, made = self._inside(body, arrays)
            inside[:] = made
            return results, list(made.values())

        program, constants = without_constants(jax.make_jaxpr(run)(*given))
        made = equation.primitive.bind(*constants, *given, **(equation.params | {"jaxpr": program}))
        num_results = len(equation.outvars)
        self.made |= dict(zip(inside, made[num_results:], strict=True))
        return list(made[:num_results])

    def loop(self, equation: Any, path: Path, given: list[Any], body: Body) -> Sequence[Any]:
        constants, carried, sequences = loop_parts(equation.params, given)
        inside: list[Tap] = []

        def turn(
            carried: list[Any], items: list[Any]
        ) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            results, made = self._inside(body, [*constants, *carried, *items])
            inside[:] = made
            return results[: len(carried)], (results[len(carried) :], list(made.values()))

        how = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
        last, (stacked, made) = jax.lax.scan(turn, carried, sequences, **how)
        self.made |= dict(zip(inside, made, strict=True))
        return self._keep(path, [*last, *stacked])

    def _inside(self, body: Body, given: Sequence[Any]) -> tuple[list[Any], Made]:
        outer, self.made = self.made, {}
        try:
            return body(given), self.made
        finally:
            self.made = outer

    def _keep(self, path: Path, results: list[Any]) -> list[Any]:
        self.made |= {
            (path, place): value
            for place, value in enumerate(results)
            if (path, place) in self._taps
        }
        return results
