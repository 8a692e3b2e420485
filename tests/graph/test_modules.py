"""Which module calls an entry went into and came out of."""

from torchlens._graph.build import calls_by_entry


class Counted(int):
    """A number that counts how often one like it is compared."""

    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.num_comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_a_tensor_that_every_module_is_given_costs_no_comparison_of_calls():
    calls = [(Counted(call), [7, 7, 9]) for call in range(1000)]
    found = calls_by_entry(calls, {7: 0})
    assert found == {0: list(range(1000))}
    Counted.num_comparisons = 0
    calls_by_entry(calls, {7: 0})
    assert Counted.num_comparisons == 0
