"""Where the model is: the module that is running, and the user's code that led to a call."""

import sys
from types import CodeType, FrameType

from torchlens._recording.recording import ModuleCall
from torchlens._recording.user_code import KNOWN_CODE, is_user_code

_known_code = KNOWN_CODE.get


class Places:
    """The calls of modules so far, and how far out on the stack an operation is looked for in the
    user's code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.module_calls: list[ModuleCall] = [ModuleCall("", 1, -1, None, 0)]
        self.module_call = 0  # the one that is running
        # The code that calls modules: what is further out on the stack called the module, not the
        # operation.
        self.module_code: CodeType | None = None
        # Likewise the code that runs a thread of the model's; and where that was started.
        self.thread_code: CodeType | None = None
        self.thread_place: tuple[CodeType | None, int] = (None, 0)

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
