"""Which entry a tensor is.

A tensor is told by its `id`. As long as every entry keeps its tensor, ids stay theirs; otherwise it
is asked whether the tensor that had the id is still alive.
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
        self.module_call = 0  # the one that is running
        # The code that calls modules: what is further out on the stack called the module, not the
        # operation.
        self.module_code: CodeType | None = None
        # Likewise the code that runs a thread of the model's; and where that was started.
        self.thread_code: CodeType | None = None
        self.thread_place: tuple[CodeType | None, int] = (None, 0)
        self.memory = memory
        self.gradients = gradients
        # The model's parameters, then tensors it found elsewhere.
        self.outside: list[Tensor] = []
        # Those of them that gradients are computed for, by the numbers that they are referred to
        # by.
        self.trained: set[int] = set()
        # Other tensors by which the model reads its parameters: (number of the parameter, tensor).
        self.param_stand_ins: list[tuple[int, Tensor]] = []
        # Those and others, kept so that their ids stay theirs.
        self._held: list[Tensor] = []
        # Numbers of parameters that were put together from several.
        self.joint_params: set[int] = set()
        # What tensors of other classes hold: by id, the entry that holds it, the name it is held
        # by, the tensor.
        self.held: dict[int, tuple[int, str, weakref.ref[Tensor]]] = {}
        # Asked for the entry that a tensor becomes which the log has not seen before; None if it
        # becomes none.
        self.on_unseen: Callable[[Any, Tensor], int | None] | None = None
        # ids of tensors that are more than one entry: some operations hand back what they were
        # given.
        self._twins: set[int] = set()
        # For each module call that is running: what operations in it handed back, as what, and what
        # it was before.
        self.handed_back: dict[int, list[tuple[weakref.ref[Tensor], int, int]]] = {}
        # id of a tensor → the entry it is, or -1 - k for parameter k.
        self._entry_of_id: dict[int, int] = {}
        self._entry_at = self._entry_of_id.get
        self._origin_of = memory.origins.get

    def number_of(self, tensor: Tensor) -> int | None:
        """As `entry_of`, but quick; None where that takes more than two lookups."""
        number = self._entry_at(id(tensor))
        if number is not None:
            origin = self._origin_of(number)
            if origin is not None and origin() is not tensor:
                return None
        return number

    def entry_of(self, tensor: Tensor) -> int | None:
        """The entry that `tensor` is now, -1 - k for parameter k, None if it is not known."""
        number = self._own_number(tensor)
        if number is None and type(tensor) not in TENSORS:
            inner = inner_of(tensor)
            return None if inner is None else self.entry_of(inner)
        return number

    def _own_number(self, tensor: Tensor) -> int | None:
        """As `entry_of`, for `tensor` itself and not for the tensor that it stands for."""
        number = self._entry_at(id(tensor))
        if number is not None and number >= 0 and not self.memory.is_alive(number, tensor):
            return None  # the id belonged to a tensor that is gone
        return number

    def has_own_entry(self, tensor: Tensor) -> bool:
        """Whether `tensor` itself is an entry or a parameter."""
        return self._own_number(tensor) is not None

    def meet(self, tensor: Tensor) -> int | None:
        """As `entry_of`; but a tensor that the log has not seen before may become an entry now."""
        entry = self.entry_of(tensor)
        return (
            self.on_unseen(self, tensor) if entry is None and self.on_unseen is not None else entry
        )

    def stand_in(self, number: int, tensor: Tensor, has_gradient: bool = False) -> None:
        """From now on `tensor` passes for entry or parameter `number`, whose gradient may be the
        one that arrives there.
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
        """From now on `tensor` is `entry`, unless it is a parameter: those stay what they are."""
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
        """An operation returned a tensor that was there before, and it now is another entry; for
        how long, see below.
        """
        self._twins.add(id(tensor))
        if self.module_call:
            self.handed_back.setdefault(self.module_call, []).append(
                (weakref.ref(tensor), entry, before)
            )

    def undo_handing_back(self, call: int, returned: Sequence[Tensor]) -> None:
        """A module call is over: what was handed back in it is again what it was before, for it is
        others who hold it.

        But what the module returned goes on as it is, as if it had been handed back in the module
        around.
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

    # -- where the model is

    def user_code(self, frame: FrameType | None) -> tuple[CodeType | None, int]:
        """The user's code that led to `frame`, no further out than the call of the module we are
        in.
        """
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
        """The module that is running, and the user's code that led to the caller of the caller
        `depth` frames up.
        """
        code, instruction = self.user_code(sys._getframe(1 + depth))
        return self.module_calls[self.module_call].address, code, instruction
