"""What is written down while a model is measured, shared by those who write it.

Nobody here holds another of those who write: each holds the ledger.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from torchlens._capture.own_time import OwnTime
from torchlens._profile.measuring.backward_times import Owners
from torchlens._profile.measuring.calls import Call, Step
from torchlens._profile.measuring.kept_tensors import storages_of
from torchlens._profile.measuring.logged_session import Mark
from torchlens._profile.measuring.model_modules import ModelModules
from torchlens._profile.measuring.operations import Operation
from torchlens._profile.options import ProfileOptions
from torchlens._recording.trees import plain_tensors
from torchlens._text.problems import Problems


class Ledger:
    """Steps, calls and operations of one model, in the order in which they began."""

    def __init__(self, model: torch.nn.Module, options: ProfileOptions, problems: Problems) -> None:
        self.model = model
        self.options = options
        self.problems = problems
        self.modules = ModelModules(model)
        self.start_ns = 0
        self.steps: list[Step] = []
        self.calls: list[Call] = []
        self.current: Call | None = None  # the innermost call that is running
        self.operations: list[Operation] = []  # at operation level
        self.owners = Owners()
        self.own_time = OwnTime()
        self.own_spans: list[
            tuple[int, int]
        ] = []  # of this step, by `time_ns`: what is allocated then is ours
        self.arrived: Counter[int] = (
            Counter()
        )  # where gradients arrived, as in `TensorFacts`, and how often
        self.left_out: set[int] = (
            set()
        )  # numbers of nodes that did not compute all gradients that they can
        self.num_gradients: dict[int, int] = {}  # id of a parameter → how often it got a gradient
        self._sequences: list[int] = []  # of the operations
        self._function_operations: dict[
            int, Operation
        ] = {}  # by number of the node of a custom autograd function
        self._parameter_calls: dict[int, Call] = {}
        self._num_calls_then = 0  # how many calls there were when that was found

    def add_operations(self, operations: list[Operation]) -> None:
        """Adds the operations of a step, in the order in which they ran."""
        self.operations += operations
        for operation in operations:
            self._function_operations.update(
                dict.fromkeys(operation.mark.function_nodes, operation)
            )
        self._sequences += [operation.mark.sequence for operation in operations]

    def operation_at(self, sequence: int) -> Operation | None:
        """The operation that made a backward node."""
        if sequence in self._function_operations:
            return self._function_operations[sequence]
        position = bisect_right(self._sequences, sequence) - 1
        if position < 0:
            return None
        operation = self.operations[position]
        return operation if sequence < operation.mark.sequence_end else None

    def num_backward_passes(self, mark: Mark) -> int:
        """How often gradients went through an operation.

        One without backward nodes of its own ran in a checkpoint, which made them later: its module
        tells for it.
        """
        nodes = [*range(mark.sequence, mark.sequence_end), *mark.function_nodes]
        if not nodes:
            return min(len(self.calls[mark.call].spans), 1)
        return max(self.arrived[node] for node in nodes)

    def backward_flops(self, mark: Mark, each: int | None) -> int | None:
        """FLOPs of all backward passes through an operation, `each` being those of one that
        computes all gradients.
        """
        if each is None or (
            each and not self.left_out.isdisjoint(range(mark.sequence, mark.sequence_end))
        ):
            return None
        return each * self.num_backward_passes(mark)

    def parameter_call(self, parameter: int) -> Call | None:
        """The call that the gradient of a parameter (its id) belongs to."""
        if self._num_calls_then != len(self.calls):
            self._num_calls_then = len(self.calls)
            self._parameter_calls = self.modules.calls_of_parameters(self.steps[-1])
        return self._parameter_calls.get(parameter)

    def keep(self, tree: Any) -> None:
        """The call that is running keeps what is in `tree` for its backward pass, though no node of
        autograd does.
        """
        call = self.current
        if call is not None and call.original is None:
            with torch._C.DisableTorchFunction():
                for _, tensor in plain_tensors(tree):
                    self.note_saved(call, storages_of(tensor))

    def note_saved(self, call: Call, storages: Iterable[tuple[int, int]]) -> None:
        """Storages, with their bytes, that are kept for the backward pass of a call; parameters are
        there anyway.
        """
        for storage, num_bytes in storages:
            if storage not in self.modules.storages:
                if call.saved is None:
                    call.saved = {}
                call.saved[storage] = num_bytes

    def repeated_call(self, address: str) -> Call | None:
        """The call that a call inside a backward pass does again."""
        for step in reversed(self.steps):
            if address in step.passes:
                calls = [call for call in step.calls if call.address == address]
                first = [call for call in calls if call.original is None]
                again = len(calls) - len(first)
                # Backward goes from the last to the first.
                return first[-1 - again % len(first)] if first else None
        return None

    def forget_since(self, num_calls: int) -> None:
        """Takes back all but so many calls: the model is run once more."""
        for call in self.calls[num_calls:]:
            call.step.calls.remove(call)
            call.step.passes.clear()
        del self.calls[num_calls:]

    def forget_all(self) -> None:
        """Takes back everything that was written down."""
        self.steps, self.calls, self.operations, self._sequences = [], [], [], []
