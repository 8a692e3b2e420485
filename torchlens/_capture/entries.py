"""The entries of a pass by their tensors, and the arguments of a call: which entries they are, and
what is kept of them.

The key of an entry is the `id` of its tensor. While every entry keeps its tensor alive, ids are
unique; otherwise a weak reference checks that the original tensor with that id is still alive.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchlens._capture.gradients.entry_gradients import GradientHooks
from torchlens._capture.memory.saved_values import Memory
from torchlens._capture.observer import Observer
from torchlens._recording.operations import Operation
from torchlens._recording.recording import ModuleCall, References
from torchlens._recording.regions import shape_of
from torchlens._recording.symbolic import inert, inert_sizes
from torchlens._recording.trees import SLICE_BOUNDS, plain_tensors
from torchlens._recording.user_code import KNOWN_CODE, is_user_code
from torchlens._recording.wrappers import inner_of

Tensor = torch.Tensor
_known_code = KNOWN_CODE.get
# Arguments of these types are, or are not, tensors at a glance; any other is searched for tensors.
PLAIN_TYPES = frozenset({
    Tensor, torch.nn.Parameter, int, float, bool, complex, str, type(None), torch.dtype,
    torch.device, torch.Size,
    torch.layout, torch.memory_format, type(Ellipsis), torch.Generator,
})  # fmt: skip
TENSORS = frozenset({Tensor, torch.nn.Parameter})
PLAIN_KEYWORD_TYPES = PLAIN_TYPES - TENSORS - {torch.Generator}
_LEAVES = PLAIN_KEYWORD_TYPES - {torch.Size}
_PLAIN_BOUNDS = frozenset({int, type(None)})
UNKNOWN = 1 << 62  # larger than any entry number
_FIRST_CONSTANT = 1 << 32  # more than any number of parameters


# -- arguments


def take_apart(tree: Any, path: tuple[Any, ...], found: dict[Any, Tensor]) -> Any:
    """`tree` (lists, tuples, dicts, slices) with None in place of each tensor, which goes into
    `found` under its path. Symbolic sizes become inert.
    """
    kind = type(tree)
    if kind is tuple or kind is list:
        items = []
        for index, item in enumerate(tree):
            if type(item) in TENSORS:
                found[(*path, index) if path else index] = item
                item = None
            elif type(item) not in _LEAVES:
                item = take_apart(item, (*path, index), found)
            items.append(item)
        return tuple(items) if kind is tuple else items
    if kind is slice:
        if _PLAIN_BOUNDS.issuperset((type(tree.start), type(tree.stop), type(tree.step))):
            return tree
        bounds = (tree.start, tree.stop, tree.step)
        return slice(*_each_apart(bounds, SLICE_BOUNDS, path, found))
    if isinstance(tree, Mapping):
        keys = list(tree)
        return dict(zip(keys, _each_apart(tree.values(), keys, path, found), strict=True))
    if isinstance(tree, Tensor):
        found[path[0] if len(path) == 1 else path] = tree
        return None
    if kind is torch.Size:
        return inert_sizes(tree)
    if isinstance(tree, list | tuple):
        items = _each_apart(tree, range(len(tree)), path, found)
        if hasattr(kind, "_fields"):
            return kind(*items)
        return items if isinstance(tree, list) else tuple(items)
    return inert(tree)


def _each_apart(
    items: Iterable[Any], keys: Iterable[Any], path: tuple[Any, ...], found: dict[Any, Tensor]
) -> list[Any]:
    return [
        item if type(item) in _LEAVES else take_apart(item, (*path, key), found)
        for key, item in zip(keys, items, strict=True)
    ]


def without_flat_tensors(args: Iterable[Any]) -> tuple[Any, ...]:
    """Arguments with None in place of each tensor at the top."""
    return tuple([None if type(arg) in TENSORS else arg for arg in args])


def describe_arguments(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> str:
    """Arguments in a line: shapes for tensors, the rest as it is."""

    def describe(value: Any) -> str:
        if isinstance(value, Tensor):
            return (
                f"{'x'.join(map(str, shape_of(value))) or 'scalar'} "
                f"{str(value.dtype).removeprefix('torch.')}"
            )
        if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            return f"[{', '.join(map(describe, value))}]"
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."

    return ", ".join(
        [
            *map(describe, args),
            *(f"{key}={describe(value)}" for key, value in (kwargs or {}).items()),
        ]
    )


def written_by(
    operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> list[Tensor]:
    """The tensors that the call is going to write to."""
    flag = operation.writes_if
    does_write = flag is None or (len(args) > flag and args[flag])
    if operation.written == (0,) and does_write and args and type(args[0]) is Tensor:
        return [args[0]]
    named = kwargs or {}
    written = [named.get("out")]
    if does_write:
        for position in operation.written:
            is_given = position < len(args)
            written.append(args[position] if is_given else named.get(operation.name_of(position)))
    # A lazy module's parameter has no value to lose.
    return [tensor for _, tensor in plain_tensors(written) if not is_lazy(tensor)]


class TensorEntries:
    """The entries and parameters of a pass, by their tensors."""

    def __init__(
        self, memory: Memory, gradients: GradientHooks | None, observer: Observer | None
    ) -> None:
        super().__init__()
        self.observer = observer
        # While not None, calls are not recorded; this collects the entries they read.
        self.collected: dict[int, None] | None = None
        self.module_calls: list[ModuleCall] = [ModuleCall("", 1, -1, None, 0)]
        self.module_call = 0  # the current one
        # The code that calls modules. Frames further out belong to the module call, not to the
        # operation.
        self.module_code: CodeType | None = None
        # The code that runs a thread of the model, and the user code that started the thread.
        self.thread_code: CodeType | None = None
        self.thread_place: tuple[CodeType | None, int] = (None, 0)
        self.memory = memory
        self.gradients = gradients
        # By number: the model's parameters, and other tensors that no operation made.
        self.outside: dict[int, Tensor] = {}
        self._num_params = 0
        # Numbers of the tensors in `outside` that require gradients.
        self.trained: set[int] = set()
        # Other tensors through which the model reads parameters: (parameter index, tensor).
        self.param_stand_ins: list[tuple[int, Tensor]] = []
        # Tensors kept alive so that their ids stay unique.
        self._held: list[Tensor] = []
        # Numbers of parameters that were assembled from several.
        self.joint_params: set[int] = set()
        # Tensors held by tensor subclasses: id → (entry of the holder, attribute name, tensor).
        self.held: dict[int, tuple[int, str, weakref.ref[Tensor]]] = {}
        # Called with a tensor that has no entry; returns the entry it becomes, or None.
        self.on_unseen: Callable[[Any, Tensor], int | None] | None = None
        # ids of tensors that belong to several entries: some operations return their argument.
        self._twins: set[int] = set()
        # For each active module call, arguments that operations returned: (tensor, entry, entry
        # before).
        self.handed_back: dict[int, list[tuple[weakref.ref[Tensor], int, int]]] = {}
        # id of a tensor → its entry, or -1 - k for parameter k.
        self._entry_of_id: dict[int, int] = {}
        self._entry_at = self._entry_of_id.get
        self._origin_of = memory.origins.get

    def number_of(self, tensor: Tensor) -> int | None:
        """Fast version of `entry_of`; None if two lookups are not enough."""
        number = self._entry_at(id(tensor))
        if number is not None:
            origin = self._origin_of(number)
            if origin is not None and origin() is not tensor:
                return None
        return number

    def entry_of(self, tensor: Tensor) -> int | None:
        """The current entry of `tensor`; -1 - k for parameter k; None if unknown."""
        number = self._own_number(tensor)
        if number is None and type(tensor) not in TENSORS:
            inner = inner_of(tensor)
            return None if inner is None else self.entry_of(inner)
        return number

    def _own_number(self, tensor: Tensor) -> int | None:
        """As `entry_of`, without unwrapping tensor subclasses."""
        number = self._entry_at(id(tensor))
        if number is not None and number >= 0 and not self.memory.is_alive(number, tensor):
            return None  # the id was reused: its first tensor is gone
        return number

    def has_own_entry(self, tensor: Tensor) -> bool:
        """True if `tensor` itself, not its inner tensor, is an entry or a parameter."""
        return self._own_number(tensor) is not None

    def meet(self, tensor: Tensor) -> int | None:
        """As `entry_of`, but an unknown tensor may become an entry (see `on_unseen`)."""
        entry = self.entry_of(tensor)
        return (
            self.on_unseen(self, tensor) if entry is None and self.on_unseen is not None else entry
        )

    def stand_in(self, number: int, tensor: Tensor, has_gradient: bool = False) -> None:
        """Maps `tensor` to entry or parameter `number`.

        `has_gradient`: the parameter's gradient arrives at `tensor`.
        """
        self._entry_of_id[id(tensor)] = number
        if number >= 0:
            self.memory.stand_in(number, tensor)
            return
        self._held.append(tensor)
        if has_gradient:
            self.param_stand_ins.append((-1 - number, tensor))
            if self.gradients is not None:
                self.gradients.watch_source(number, tensor)

    def stand_for(self, tensor: Tensor, entry: int) -> None:
        """Maps `tensor` to `entry`, even if it is a parameter."""
        self._entry_of_id[id(tensor)] = entry

    def _become(self, entry: int, tensor: Tensor, is_written: bool) -> None:
        """Maps `tensor` to `entry`, unless it is a parameter: parameters keep their number."""
        before = self._own_number(tensor)
        if before is not None and before < 0:
            return
        self._entry_of_id[id(tensor)] = entry
        self._note_inner(entry, tensor)
        if before is not None and is_written:
            self._twins.add(id(tensor))
        elif before is not None:
            self._hand_back(tensor, entry, before)

    def _note_inner(self, number: int, tensor: Tensor) -> None:
        if type(tensor) not in TENSORS:
            inner = inner_of(tensor)
            if inner is not None:
                self.stand_in(number, inner)
                self._note_inner(number, inner)
            elif number >= 0:
                for name, part in vars(tensor).items():
                    if isinstance(part, Tensor):
                        self.held[id(part)] = (number, name, weakref.ref(part))

    def _hand_back(self, tensor: Tensor, entry: int, before: int) -> None:
        """Notes that an operation returned its argument, which is now another entry.

        The mapping lasts until the module call ends, see `undo_handing_back`.
        """
        self._twins.add(id(tensor))
        if self.module_call:
            self.handed_back.setdefault(self.module_call, []).append(
                (weakref.ref(tensor), entry, before)
            )

    def undo_handing_back(self, call: int, returned: Sequence[Tensor]) -> None:
        """At the end of a module call, maps returned arguments back to their earlier entries.

        Code outside the module holds those tensors too. Tensors that the module itself returned
        keep their new entry, and pass to the enclosing module call.
        """
        parent = self.module_calls[call].parent
        kept = {id(tensor) for tensor in returned}
        going_on = []
        for handed_back in reversed(self.handed_back.pop(call)):
            reference, entry, before = handed_back
            tensor = reference()
            if tensor is not None and id(tensor) in kept:
                going_on.append(handed_back)
            elif tensor is not None and self._entry_at(id(tensor)) == entry:  # not written since
                self._entry_of_id[id(tensor)] = before
                self._note_inner(before, tensor)
        if going_on and parent:
            self.handed_back.setdefault(parent, []).extend(reversed(going_on))

    # -- the arguments of a call

    def read_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> tuple[dict[Any, int], tuple[Any, ...], dict[str, Any] | None]:
        """The entries of the tensor arguments by position, and the arguments without tensors."""
        tensors: dict[Any, Tensor] = {}
        kept = take_apart(args, (), tensors)
        kept_kwargs = kwargs
        if kwargs:
            kept_kwargs = take_apart(kwargs, (), tensors)
            if "out" in kwargs:  # written, not read
                tensors = {
                    path: tensor
                    for path, tensor in tensors.items()
                    if (path[0] if type(path) is tuple else path) != "out"
                }
        at, origin_of = self._entry_at, self._origin_of
        references: dict[Any, int] = {}
        for path, tensor in tensors.items():
            number = at(id(tensor), UNKNOWN)
            if number == UNKNOWN or ((origin := origin_of(number)) and origin() is not tensor):
                number = self._reference_to(tensor)
            references[path] = number
        return references, kept, kept_kwargs

    def references_to(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[Any, int]:
        """The entries of the tensor arguments by position; adds unknown tensors."""
        return self.read_arguments(args, kwargs)[0]

    def _flat_references(self, args: tuple[Any, ...]) -> References:
        """The entries of flat arguments, some of which may be new or have a reused id."""
        at, origin_of = self._entry_at, self._origin_of
        references: list[int | None] = []
        for arg in args:
            number = None
            if type(arg) in TENSORS:
                number = at(id(arg), UNKNOWN)
                if number >= 0 and ((origin := origin_of(number)) is None or origin() is not arg):
                    number = self._reference_to(arg)
            references.append(number)
        return tuple(references)

    def _reference_to(self, tensor: Tensor) -> int:
        number = self._entry_at(id(tensor))  # as in `number_of`
        if number is not None:
            origin = self._origin_of(number)
            if origin is None or origin() is tensor:
                return number
        number = self.meet(tensor)
        return self.add_constant(tensor) if number is None else number

    def add_parameter(self, tensor: Tensor) -> int:
        """Adds a parameter, which is no entry; returns its number (negative)."""
        self._num_params += 1
        return self._add_outside(tensor, -self._num_params)

    def add_constant(self, tensor: Tensor) -> int:
        """Adds another tensor that no operation made; returns its number (negative)."""
        return self._add_outside(tensor, -1 - _FIRST_CONSTANT - len(self.outside))

    def _add_outside(self, tensor: Tensor, number: int) -> int:
        self.outside[number] = tensor
        self._entry_of_id[id(tensor)] = number
        self._note_inner(number, tensor)
        if tensor.requires_grad:
            self.trained.add(number)
        if self.gradients is not None:
            self.gradients.watch_source(number, tensor)
        if self.observer is not None and self.collected is None:
            self.observer.add(number, tensor)
        return number

    # -- position in the model

    def user_code(self, frame: FrameType | None) -> tuple[CodeType | None, int]:
        """The user code that led to `frame`, searched up to the call of the current module."""
        module_code, thread_code = self.module_code, self.thread_code
        while frame is not None:
            code = frame.f_code
            if code is module_code:
                call = self.module_calls[self.module_call]
                return call.code, call.instruction
            known = _known_code(id(code))
            if is_user_code(code) if known is None else known[0]:
                return code, frame.f_lasti
            if code is thread_code:
                return self.thread_place
            frame = frame.f_back
        return None, 0

    def place(self, depth: int) -> tuple[str, CodeType | None, int]:
        """The current module's address, and the user code above the frame `depth` levels up."""
        code, instruction = self.user_code(sys._getframe(1 + depth))
        return self.module_calls[self.module_call].address, code, instruction
