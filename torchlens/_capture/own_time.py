"""What observing a model costs: counted while it runs, so that it can be subtracted from the
model's times.
"""

from collections.abc import Hashable, Iterable

# Whatever an operation takes beyond this is not lengthened by our looking.
SHORT = 20e-6
# Where handling an operation took longer than this, somebody else had the processor meanwhile.
LONGEST_HANDLING = 100e-6
# An operation that has not run among the last so many finds all it needs driven out of the
# processor's caches.
WHILE = 16


class OwnTime:
    """Seconds of a thread that went to us and not to the model, and how often something was looked
    at.

    The seconds are those between our first line and our last. What lies before and after them
    (torch finding out that somebody looks, and calling us) is not in them, and is about the same
    each time: that is what the numbers are for.
    """

    __slots__ = (
        "coldness", "handling_seconds", "look_seconds", "num_cells", "num_modules", "num_nodes",
        "num_operations",
        "num_plain", "num_reads", "seconds", "short_seconds",
    )  # fmt: skip

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_operations = 0  # calls that left a row
        # How many of those had plain arguments and one result, so that handling one took what
        # handling another does; and what that took, without checks, each no more than
        # LONGEST_HANDLING: how fast the machine is just now.
        self.num_plain = 0
        self.handling_seconds = 0.0
        self.look_seconds = 0.0  # what the checks took
        self.short_seconds = 0.0  # what those took, each no more than SHORT
        # how many of those had not run for a WHILE; one that ran not long ago counts in part
        self.coldness = 0.0
        self.num_cells = (
            0  # how many of those are cells of recurrent networks: a dozen short operations in one
        )
        self.num_reads = 0  # calls that left none
        self.num_modules = 0
        self.num_nodes = 0  # of autograd's graph, that ran


def coldness_of(names: Iterable[Hashable]) -> list[float]:
    """Of things that ran one after the other: 1 for one that had not run for a WHILE, less for one
    that had.
    """
    last_runs: dict[Hashable, int] = {}
    found = []
    for number, name in enumerate(names):
        others = number - last_runs.get(name, -1 - WHILE) - 1
        last_runs[name] = number
        found.append(min(others / WHILE, 1.0))
    return found
