"""What a forward pass left behind: plain data, from capture to graph.

Entries are numbered as they came: the model's inputs, its buffers, one per tensor that an operation
made, the model's outputs. A reference to an entry is its number. A reference to parameter `k` is
`-1 - k`; with `k` beyond the parameters it is a tensor that the model found somewhere else (an
attribute, a closure), told apart only where memory is written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import torch

from torchlens._recording.operations import Operation
from torchlens._recording.regions import Region
from torchlens._recording.trees import Path
from torchlens._recording.view_tree import Slice


class Branch(NamedTuple):
    """What one thread, or one job of a pool, wrote into a list. The first branch is the thread that
    the log began in.
    """

    parent: int  # the branch that began it
    at: int  # how long the list was then
    own: list[int]  # the places it wrote, rising; of the first branch: all that no other did


def in_program_order(branches: Sequence[Branch], length: int) -> list[int]:
    """The places of the list as if each branch had run to its end where it began."""
    if not branches:
        return list(range(length))
    begun: dict[int, list[int]] = {}
    claimed: set[int] = set()
    for number, branch in enumerate(branches[1:], start=1):
        begun.setdefault(branch.parent, []).append(number)
        claimed.update(branch.own)
    order: list[int] = []
    # Places still to come, and branches still to be put between them: the last first.
    pending: list[tuple[list[int], list[int]]] = []

    def enter(number: int) -> None:
        own = (
            [place for place in range(length) if place not in claimed]
            if number == 0
            else branches[number].own
        )
        pending.append((own[::-1], begun.get(number, [])[::-1]))

    enter(0)
    while pending:
        own, inside = pending[-1]
        if inside and (not own or branches[inside[-1]].at <= own[-1]):
            enter(inside.pop())
        elif own:
            order.append(own.pop())
        else:
            pending.pop()
    return order


# Which arguments were which entries: aligned with flat positional arguments, or by location where
# they are nested or named: position, keyword, or (position or keyword, index, ...).
References = tuple[int | None, ...] | dict[Any, int]


def located(references: References) -> list[tuple[Any, int]]:
    """References as (location, entry) pairs."""
    if isinstance(references, dict):
        return list(references.items())
    return [(position, entry) for position, entry in enumerate(references) if entry is not None]


class MadeCall(NamedTuple):
    """A call that was made, as it is written down: the first fields of the rows it leaves."""

    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    references: References
    module_call: int
    code: CodeType | None
    instruction: int
    seconds: float


class Row(NamedTuple):
    """One tensor that one call made."""

    operation: Operation
    args: tuple[Any, ...]  # with None in place of tensors
    kwargs: dict[str, Any] | None
    references: References
    module_call: int  # index into Recording.module_calls
    code: CodeType | None  # where the user's code called it
    instruction: int
    seconds: float
    output_index: int | None  # which of several outputs
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradfunc: str | None


class RowFields(NamedTuple):
    """The fields of many rows: what each has as its operation, as its arguments, and so on."""

    operation: tuple[Operation, ...]
    args: tuple[tuple[Any, ...], ...]
    kwargs: tuple[dict[str, Any] | None, ...]
    references: tuple[References, ...]
    module_call: tuple[int, ...]
    code: tuple[CodeType | None, ...]
    instruction: tuple[int, ...]
    seconds: tuple[float, ...]
    output_index: tuple[int | None, ...]
    shape: tuple[tuple[int, ...], ...]
    dtype: tuple[torch.dtype, ...]
    gradfunc: tuple[str | None, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "RowFields":
        return cls._make(zip(*rows, strict=True) if rows else [()] * len(cls._fields))


make_call: Callable[[tuple[Any, ...]], MadeCall] = partial(
    tuple.__new__, MadeCall
)  # as `_make`, at half the price
make_row: Callable[[tuple[Any, ...]], Row] = partial(tuple.__new__, Row)


class ModuleCall(NamedTuple):
    """One call of one module: which, which pass of it, from inside which other call."""

    address: str
    pass_num: int
    parent: int
    code: CodeType | None
    instruction: int


class Write(NamedTuple):
    """Entry `entry` wrote to `region` of `storage`."""

    entry: int
    storage: int
    region: Region


@dataclass(frozen=True, slots=True)
class Failure:
    """Where the model raised: the innermost module and, if it was one, the operation with its
    argument shapes.
    """

    message: str
    module_call: int
    code: CodeType | None
    instruction: int
    operation: Operation | None
    arguments: str
    references: References


@dataclass(slots=True)
class Recording:
    """Everything the recorder wrote down, in the order it happened."""

    model_name: str
    rows: list[Row]
    values: list[Any]
    versions: list[int]
    storages: list[int]
    regions: dict[int, Region]
    writes: list[Write]
    inputs: list[tuple[Path, int]]
    outputs: list[tuple[Path, int]]
    buffers: list[tuple[str, int]]
    params: list[torch.nn.Parameter]
    param_addresses: list[str]
    module_params: dict[str, tuple[int, ...]]
    outside_storages: list[int]  # of what is referred to by -1 - k
    module_calls: list[ModuleCall]
    module_classes: dict[str, str]
    module_entries: list[tuple[int, list[int]]]  # (module call, entries it was given)
    module_exits: list[tuple[int, list[int]]]  # (module call, entries it returned)
    booleans: dict[int, bool]
    leaves: set[
        int
    ]  # gradients are computed for these, although they come from no differentiable operation
    saved_args: dict[int, tuple[Any, Any]]
    gradients: dict[int, torch.Tensor]
    seconds_forward: float = 0.0
    seconds_total: float = 0.0
    seconds_setup: float = 0.0
    started_at: float = 0.0  # since 1970
    random_seed: int | None = None
    failure: Failure | None = None
    warnings: list[str] = field(default_factory=list)
    copies: set[int] = field(
        default_factory=set
    )  # entries whose value is a copy of the tensor they made
    slices: list[Slice] = field(default_factory=list)
    hidden_writes: set[int] = field(
        default_factory=set
    )  # entries that wrote to views, but autograd shows no node for it
    reads: set[int] = field(
        default_factory=set
    )  # entries whose value the model took out of torch (`item`, `numpy`)
    branches: list[Branch] = field(
        default_factory=list
    )  # who wrote which rows, where there was more than one thread
    returns_data: bool = (
        False  # whether the model returned numbers, text or arrays, beside tensors or instead
    )
    # Other tensors that passed for a parameter, and that gradients arrive at instead: (number of
    # the parameter, tensor).
    param_stand_ins: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    # What is referred to by -1 - k and wanted gradients as the model ran; None: the parameters
    # tell.
    trained: set[int] | None = None
    joint_params: set[int] = field(
        default_factory=set
    )  # numbers of parameters that were put together from several
    received: set[int] = field(
        default_factory=set
    )  # entries that came from another process, and from no operation here
    sent: set[int] = field(
        default_factory=set
    )  # entries that went to another process, and to no operation here
    framework: str = "torch"  # that ran it, by the name of its package
    is_copy: bool = False  # pickled or copied deeply: its tensors are part of no autograd graph

    def is_trained(self, number: int) -> bool:
        """Whether gradients were computed for parameter `number` as the model ran. It may be frozen
        or not since.
        """
        return (
            self.params[number].requires_grad
            if self.trained is None
            else -1 - number in self.trained
        )
