"""Tensors of unknown origin: given to an operation or returned by the model, but made by no logged
operation.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchlens._recording.recording import References, located
from torchlens._recording.regions import storage_of
from torchlens._recording.trees import Path as TreePath
from torchlens._recording.trees import plain_tensors

_OURS = str(Path(__file__).parents[1])
_DISTRIBUTED = str(Path(torch.__file__).parent / "distributed")


class UnexplainedTensors:
    """Finds such tensors in one run.

    One that is the same object in two runs was there before: a constant of the model's, a tensor of
    the caller's. One that is another object each time was made as the model ran, by something that
    the log did not see. They are held on to, so that no other gets their id. Of the numbers below
    0, the first `num_params` are parameters.
    """

    def __init__(self, num_params: int) -> None:
        # By the row that is being made, and the place among the arguments.
        self.found: dict[tuple[int, TreePath], torch.Tensor] = {}
        # Those of them that a backward pass inside the model left at one of the leaves.
        self.gradients: set[tuple[int, TreePath]] = set()
        # Those that torch.distributed gave to an operation of its own.
        self.distributed: set[tuple[int, TreePath]] = set()
        # Those that hold Python numbers, put there by a constructor that torch does not report
        # (`torch.IntTensor([3])`).
        self.constants: set[tuple[int, TreePath]] = set()
        self._fresh: dict[int, torch.Tensor] = {}
        self._known_ids: set[int] = set()
        self._leaves: list[torch.Tensor] = []
        self._num_params = num_params

    def know(self, number: int, tensor: torch.Tensor) -> None:
        """The tensor is entry `number`, a parameter, or (of another number below 0) one from
        outside the log.
        """
        if number >= -self._num_params:
            self._known_ids.add(id(tensor))
        if not is_lazy(tensor) and tensor.requires_grad and tensor.is_leaf:
            self._leaves.append(tensor)

    def look(self, row: int, arguments: Any, references: References) -> None:
        """Looks at what is given to the call that makes `row`.

        What the log takes for an entry or a parameter is not unexplained; whether rightly is for
        the other checks to say: a shard stands for a tensor that it looks at the memory of.
        """
        claimed = {
            location for location, number in located(references) if number >= -self._num_params
        }
        for path, tensor in plain_tensors(arguments):
            location = path[0] if len(path) == 1 else path
            if id(tensor) not in self._known_ids and location not in claimed:
                self._known_ids.add(id(tensor))
                self.found[row, path] = tensor
                if any(leaf.grad is tensor for leaf in self._leaves):
                    self.gradients.add((row, path))
                if storage_of(tensor) in self._fresh:
                    self.constants.add((row, path))
                if _DISTRIBUTED in _caller():
                    self.distributed.add((row, path))

    def note_fresh(self, tensor: torch.Tensor) -> None:
        """Python numbers became a tensor, and nobody was told."""
        self._fresh[storage_of(tensor)] = tensor

    def made_since(self, other: "UnexplainedTensors") -> list[tuple[int, TreePath]]:
        """Where these are others than those of another run."""
        return [
            place
            for place, tensor in self.found.items()
            if tensor is not other.found.get(place, tensor)
        ]


def _caller() -> str:
    """The file that the call was made from."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename
