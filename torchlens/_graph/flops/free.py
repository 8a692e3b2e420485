"""The operations that count as free: a few steps for each number that they read or write, or none
at all.

Beside the products of a model they hardly count, and `torch.utils.flop_counter` leaves them out as
well. They are listed rather than guessed, so that an operation nobody has thought about is
reported, not taken for nothing.
"""

from torchlens._recording.operation_kinds import (
    ACTIVATIONS,
    ARRANGEMENTS,
    BOUNDARIES,
    COLLECTIVES,
    COMPARISONS,
    CONVERSIONS,
    CREATIONS,
    DISTANCES,
    DROPOUTS,
    ELEMENTWISE,
    INDEXING,
    LOSSES,
    NORMALISATIONS,
    POOLING,
    RANDOM,
    REDUCTIONS,
    UNINITIALISED,
    VIEWS,
)

FREE: frozenset[str] = frozenset().union(
    ACTIVATIONS, ARRANGEMENTS, BOUNDARIES, COLLECTIVES, COMPARISONS, CONVERSIONS, CREATIONS,
    DISTANCES, DROPOUTS,
    ELEMENTWISE, INDEXING, LOSSES, NORMALISATIONS, POOLING, RANDOM, REDUCTIONS, UNINITIALISED,
    VIEWS,
)  # fmt: skip
