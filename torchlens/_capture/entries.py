"""Maps tensors to entries.

The key is the `id` of a tensor. While every entry keeps its tensor alive, ids are unique; otherwise
a weak reference checks that the original tensor with that id is still alive.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from torchlens._capture.arguments import TENSORS
from torchlens._capture.gradients.entry_gradients import GradientHooks
from torchlens._capture.memory.saved_values import Memory
from torchlens._recording.recording import ModuleCall
from torchlens._recording.user_code import KNOWN_CODE, is_user_code
from torchlens._recording.wrappers import inner_of

Tensor = torch.Tensor
_known_code = KNOWN_CODE.get


class TensorEntries:
    """The entries and parameters of a pass, by their tensors."""

    def __init__(self, memory: Memory, gradients: GradientHooks | None) -> None:
        super().__init__()
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
        # The model's parameters, then other tensors that no operation made.
        self.outside: list[Tensor] = []
        # Numbers (-1 - index) of the tensors in `outside` that require gradients.
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
