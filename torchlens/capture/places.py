"""Where in the user's code something happened."""

import sys
from types import CodeType, FrameType

from torchlens.capture.entries import Entries
from torchlens.capture.gradients import GradientHooks
from torchlens.capture.memory import Memory
from torchlens.capture.user_code import KNOWN_CODE, is_user_code

__all__ = ["Places"]

_known_code = KNOWN_CODE.get


class Places(Entries):
    """Finds the user's code on the stack, no further out than what runs modules or threads."""

    def __init__(self, memory: Memory, gradients: GradientHooks | None) -> None:
        super().__init__(memory, gradients)
        # The code that calls modules: what is further out on the stack called the module, not the operation.
        self.module_code: CodeType | None = None
        # Likewise the code that runs a thread of the model's; and where that was started.
        self.thread_code: CodeType | None = None
        self.thread_place: tuple[CodeType | None, int] = (None, 0)

    def user_code(self, frame: FrameType | None) -> tuple[CodeType | None, int]:
        """The user's code that led to `frame`, no further out than the call of the module we are in."""
        module_code = self.module_code
        while frame is not None:
            code = frame.f_code
            known = _known_code(id(code))
            if is_user_code(code) if known is None else known[0]:
                return code, frame.f_lasti
            if code is module_code:
                call = self.module_calls[self.module_call]
                return call.code, call.instruction
            if code is self.thread_code:
                return self.thread_place
            frame = frame.f_back
        return None, 0

    def place(self, depth: int) -> tuple[str, CodeType | None, int]:
        """The module that is running, and the user's code that led to the caller of the caller `depth` frames up."""
        code, instruction = self.user_code(sys._getframe(1 + depth))
        return self.module_calls[self.module_call].address, code, instruction
