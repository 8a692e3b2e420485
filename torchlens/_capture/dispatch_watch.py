"""Watches what the dispatcher runs where torch reports no calls to the recorder.

That is inside an opaque call (a scripted function, a transform of torch.func), and while the model
switches the reporting off (`torch._C.DisableTorchFunction`). The watch keeps saved values that are
about to be overwritten, and notes which known tensors are read and written.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from torchlens._capture.entries import written_by
from torchlens._capture.recorder import Recorder
from torchlens._recording.operations import KNOWN_OPERATIONS
from torchlens._recording.regions import storage_of
from torchlens._recording.trees import plain_tensors
from torchlens._recording.unseen import NoTorchFunction

Tensor = torch.Tensor
# Of autograd's own bookkeeping: nothing is computed.
_BOOKKEEPING = frozenset({"detach", "alias", "lift_fresh"})
_DTYPES = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}


class DispatchWatch(TorchDispatchMode):
    """Is told of every ATen operation while it is the current mode."""

    # `torch.cond` and its like come as one operation; their parts run inside them.
    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.read: dict[int, None] = {}  # entries and parameters
        self.names: dict[str, None] = {}  # of the operations
        self._recorder = recorder
        self._written: list[Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            with self:
                return func(*args, **(kwargs or {}))
        with NoTorchFunction():
            self._look(func, args, kwargs)
            return func(*_with_constants(func, args), **(kwargs or {}))

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        operation, recorder = KNOWN_OPERATIONS[func], self._recorder
        if operation.name not in _BOOKKEEPING:
            self.names[operation.name] = None
        for _, tensor in plain_tensors((args, kwargs)):
            number = recorder.entry_of(tensor)
            if number is not None:
                self.read[number] = None
        written = written_by(operation, args, kwargs)
        if written:
            # Copies belong to the autograd graph, which the dispatcher has left.
            is_transformed = peek_interpreter_stack() is not None
            with nullcontext() if is_transformed else enable_reentrant_dispatch():
                recorder.before_write(written)
            self._written += written

    def written_among(self, arguments: Any) -> list[Tensor]:
        """The tensors that were written: arguments, or else known by their entry."""
        storages = set(map(storage_of, self._written))
        given = [tensor for _, tensor in plain_tensors(arguments) if storage_of(tensor) in storages]
        others = [tensor for tensor in self._written if self._recorder.has_own_entry(tensor)]
        return list({id(tensor): tensor for tensor in (*given, *others)}.values())


def _with_constants(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operation, with tensors in place of numbers if it is given no tensor.

    TorchScript's compiler computes with constants, which a mode receives as numbers.
    """
    if any(isinstance(arg, Tensor) for arg in args):
        return args
    return tuple(
        torch.scalar_tensor(arg, dtype=_DTYPES[type(arg)])
        if type(arg) in _DTYPES and isinstance(argument.type, torch.TensorType)
        else arg
        for argument, arg in zip(func._schema.arguments, args, strict=False)
    )


@contextmanager
def watching(watch: TorchDispatchMode) -> Iterator[None]:
    """Puts a dispatch mode in force that takes `torch.cond` and its like, too.

    Without `supports_higher_order_operators` (torch 2.6), each such operator keeps a table of
    modes.
    """
    is_asked = hasattr(TorchDispatchMode, "supports_higher_order_operators")
    tables = [
        (operator, operator.python_key_table)
        for operator in (() if is_asked else torch._ops._higher_order_ops.values())
    ]
    for operator, table in tables:
        table[type(watch)] = partial(_hand_to_mode, operator)
    try:
        with watch:
            yield
    finally:
        for _, table in tables:
            table.pop(type(watch), None)


def _hand_to_mode(operator: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), args, kwargs)
