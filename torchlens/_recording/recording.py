"""The data of a forward pass that capture hands to the graph.

Entries are numbered in this order: the model's inputs, its buffers, one per tensor that an
operation made, the model's outputs. A reference to an entry is its number. A reference to parameter
`k` is `-1 - k`; a `k` beyond the parameters is a tensor from elsewhere (an attribute, a closure),
which matters only where memory is written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import torch

from torchlens._recording.operations import Operation
from torchlens._recording.origin import LiveOrigin, Origin, version_of
from torchlens._recording.regions import Region
from torchlens._recording.trees import Path
from torchlens._recording.view_tree import Slice


class Branch(NamedTuple):
    """The items of a list that one thread or pool job wrote; branch 0 is the thread of the log."""

    parent: int  # the branch that started it
    at: int  # the length of the list at that time
    own: list[int]  # indices it wrote, ascending; for branch 0, all that no other branch wrote


def in_program_order(branches: Sequence[Branch], length: int) -> list[int]:
    """The indices of the list, as if each branch had run to its end where it started."""
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


# The entries of arguments: a tuple aligned with flat positional arguments, or a dict by location if
# any is nested or named: position, keyword, or (position or keyword, index, ...).
References = tuple[int | None, ...] | dict[Any, int]


def located(references: References) -> list[tuple[Any, int]]:
    """References as (location, entry) pairs."""
    if isinstance(references, dict):
        return list(references.items())
    return [(position, entry) for position, entry in enumerate(references) if entry is not None]


def reads_elsewhere(references: References, num_params: int) -> bool:
    """True if an argument is a tensor that is neither an entry nor a parameter."""
    return any(number < -num_params for _, number in located(references))


class MadeCall(NamedTuple):
    """A call that was made: the first fields of its rows."""

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
    code: CodeType | None  # the user code that called it
    instruction: int
    seconds: float
    output_index: int | None  # the index, if there are several outputs
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradfunc: str | None


class RowFields(NamedTuple):
    """The fields of many rows, by column."""

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


# Faster than `_make`.
make_call: Callable[[tuple[Any, ...]], MadeCall] = partial(tuple.__new__, MadeCall)
make_row: Callable[[tuple[Any, ...]], Row] = partial(tuple.__new__, Row)


class ModuleCall(NamedTuple):
    """One call of a module: its address, its pass number, and the enclosing call."""

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
    """The place where the model raised: the innermost module, and the operation if one raised."""

    message: str
    module_call: int
    code: CodeType | None
    instruction: int
    operation: Operation | None
    arguments: str
    references: References


@dataclass(slots=True)
class Recording:
    """Everything that the recorder recorded, in order."""

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
    outside_storages: dict[int, int]  # storages of tensors from outside, by their references
    module_calls: list[ModuleCall]
    module_classes: dict[str, str]
    module_entries: list[tuple[int, list[int]]]  # (module call, entries it was given)
    module_exits: list[tuple[int, list[int]]]  # (module call, entries it returned)
    booleans: dict[int, bool]
    # Leaf entries that require gradients.
    leaves: set[int]
    saved_args: dict[int, tuple[Any, Any]]
    gradients: dict[int, torch.Tensor]
    seconds_forward: float = 0.0
    seconds_total: float = 0.0
    seconds_setup: float = 0.0
    started_at: float = 0.0  # since 1970
    random_seed: int | None = None
    failure: Failure | None = None
    warnings: list[str] = field(default_factory=list)
    # Entries whose saved value is a copy of their tensor.
    copies: set[int] = field(default_factory=set)
    slices: list[Slice] = field(default_factory=list)
    # Entries that wrote to views without a node in autograd's graph.
    hidden_writes: set[int] = field(default_factory=set)
    # Entries whose value the model read into Python (`item`, `numpy`).
    reads: set[int] = field(default_factory=set)
    # The branches with the rows of each; [] if there was one thread.
    branches: list[Branch] = field(default_factory=list)
    # True if the model returned numbers, strings or arrays.
    returns_data: bool = False
    # Other tensors at which the gradients of parameters arrive: (number of the parameter, tensor).
    # (module call, path, entry) of each tensor in a tuple, dict or object that a module returned.
    module_parts: list[tuple[int, Path, int]] = field(default_factory=list)
    param_stand_ins: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    # References -1 - k to tensors that required gradients in the pass; None: see the parameters.
    trained: set[int] | None = None
    # Numbers of parameters that were assembled from several.
    joint_params: set[int] = field(default_factory=set)
    # By row, parameters that it reads through something else: weights that were made or loaded
    # during the pass, and the packed weights of quantized modules.
    other_params: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # Entries received from another process, without a parent here.
    received: set[int] = field(default_factory=set)
    # Entries sent to another process, without a child here.
    sent: set[int] = field(default_factory=set)
    # Entries whose value an edit changed.
    edited: set[int] = field(default_factory=set)
    # Tensors from outside, by their references (-1 - k), apart from parameters; and the version and
    # the memory of all of them, with the parameters, when the pass ended.
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    outside_states: dict[int, tuple[int, int]] = field(default_factory=dict)
    # The states of torch's generators before the pass: the CPU's, then one for each GPU.
    generators: tuple[torch.Tensor, ...] = ()
    framework: str = "torch"  # the package name of the framework
    # Another address of a shared module or parameter → the address that the log uses.
    module_aliases: dict[str, str] = field(default_factory=dict)
    origin: Origin | LiveOrigin = field(default_factory=Origin)
    # What the model returned, if the log keeps it.
    output: Any = None
    is_copy: bool = False  # pickled or deep-copied: its tensors have no autograd graph

    def is_trained(self, number: int) -> bool:
        """True if parameter `number` required gradients in the pass; it may differ now."""
        return (
            self.params[number].requires_grad
            if self.trained is None
            else -1 - number in self.trained
        )

    def changed_param(self, number: int) -> int | None:
        """A parameter that the call of a row was given, and that was changed since; or None."""
        for _, reference in located(self.rows[number].references):
            state, place = self.outside_states.get(reference), -1 - reference
            if state is None or not 0 <= place < len(self.params):
                continue
            if state[0] not in (-1, version_of(self.params[place])):
                return place
        return None
