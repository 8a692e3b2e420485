"""Programs inside a program: loops, conditions, calls and custom derivatives.

Three ways through them: run step by step while a function is logged (`INLINED`), walked without
running (`walk_program`), and compiled with some inner values as further results (`tapped`).
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


# -- walked without running
# -------------------------------------------------------------------------------------------------


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


# -- compiled, with inner values
# -------------------------------------------------------------------------------------------------


# A step, and which of its results.
Tap = tuple[Path, int]
Made = dict[Tap, Any]


def tapped(
    program: Any, taps: Sequence[Tap]
) -> Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]:
    """A compiled function of constants and arguments that gives the program's results and what each
    tap asks for.

    What a loop makes is one array of all its turns, in their order along what the loop goes along.
    """

    def run(constants: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        walker = _Tapping(frozenset(taps))
        results = walk_program(ClosedJaxpr(program.jaxpr, constants), arrays, walker)
        return results, [as_known_type(walker.made[tap]) for tap in taps]

    compiled: Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]] = jax.jit(run)
    return compiled


class _Tapping:
    """Runs each step, and keeps what is asked for."""

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
        """Stays a step of its own, which returns more: were it part of the whole, it would not be
        computed again.
        """
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
        constants, carried, along = loop_parts(equation, given)
        inside: list[Tap] = []

        def turn(
            carried: list[Any], items: list[Any]
        ) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            results, made = self._inside(body, [*constants, *carried, *items])
            inside[:] = made
            return results[: len(carried)], (results[len(carried) :], list(made.values()))

        how = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
        last, (stacked, made) = jax.lax.scan(turn, carried, along, **how)
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
