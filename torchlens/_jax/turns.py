"""The calls of modules inside loops that were traced once: each turn of a loop has calls of its
own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torchlens._recording.recording import ModuleCall

# The turns of the loops around a step, outermost first.
Turn = tuple[int, ...]


class Turns:
    """Which turns are being gone through, and the module calls of each. `calls` are those that were
    traced.
    """

    def __init__(self, calls: list[ModuleCall]) -> None:
        self.current: Turn = ()
        self._calls = calls
        self._around: list[int] = []  # the call that each of the loops stands in
        self._at: dict[int, dict[Turn, int]] = {}  # a call that was traced → each turn's own

    @contextmanager
    def turn(self, around: int, index: int) -> Iterator[None]:
        """While one turn of a loop that stands in the call `around` is gone through."""
        outer = self.current
        self._around.append(around)
        self.current = (*outer, index)
        try:
            yield
        finally:
            self._around.pop()
            self.current = outer

    def call_at(self, call: int) -> int:
        """The call at the current turn. What stands around a loop is the same at each turn of
        it.
        """
        num_inside = 0
        while num_inside < len(self._around) and self._is_inside(call, self._around[num_inside]):
            num_inside += 1
        if not num_inside:
            return call
        turn, own = self.current[:num_inside], self._at.setdefault(call, {})
        if turn not in own:
            record = self._calls[call]
            above = self.call_at(record.parent)
            own[turn] = len(self._calls)
            self._calls.append(record._replace(parent=above))
        return own[turn]

    def calls_of(self, call: int) -> list[tuple[Turn, int]]:
        """The turns at which a call that was traced ran, and the call at each."""
        return list(self._at[call].items()) if call in self._at else [((), call)]

    def _is_inside(self, call: int, other: int) -> bool:
        while call > other:
            call = self._calls[call].parent
            if call == other:
                return True
        return False

    @property
    def traced(self) -> list[int]:
        """The calls that were traced in a loop: those of its turns stand for them."""
        return list(self._at)
