"""The one list of operation kinds."""

from itertools import combinations

from torchlens._health import activations
from torchlens._recording import operation_kinds as kinds

GROUPS = [
    name
    for name in vars(kinds)
    if name.isupper() and not name.startswith("_")
    if name not in ("COMMUTATIVE", "MAY_RETURN_ARGUMENT", "SAME_NUMBERS")
]  # each operation is in one of these


def test_an_operation_is_of_one_kind():
    for one, other in combinations(GROUPS, 2):
        shared = getattr(kinds, one) & getattr(kinds, other)
        assert shared <= {"rand"}, (
            f"{one} and {other} share {shared}"
        )  # `__rand__` and `torch.rand` have one name


def test_what_else_is_said_is_said_of_operations_of_some_kind():
    everything = frozenset().union(*(getattr(kinds, name) for name in GROUPS))
    for name in ("COMMUTATIVE", "MAY_RETURN_ARGUMENT", "SAME_NUMBERS"):
        assert getattr(kinds, name) <= everything


def test_the_activations_that_are_looked_at_are_activations():
    assert activations.ZEROING | activations.BOUNDED.keys() <= kinds.ACTIVATIONS
