"""A program that also returns what some of its steps make."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from torchlens._jax.arrays import as_known_type
from torchlens._jax.internals import without_constants
from torchlens._jax.jaxprs import Body, Path, loop_parts, walk_program

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
