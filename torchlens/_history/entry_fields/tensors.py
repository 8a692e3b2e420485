"""The tensor itself, and its gradient."""

from typing import Any

import torch

from torchlens._history import columns
from torchlens._history.entry_fields.reading import EntryReading


class TensorFields(EntryReading):
    """The tensor itself, and its gradient."""

    __slots__ = ()

    @property
    def tensor_contents(self) -> Any:
        """The value at the moment the operation ended; None if it was not saved."""
        return self._log.value(self._entry)

    @property
    def has_saved_activations(self) -> bool:
        """Whether its value was saved."""
        return self._one(columns.has_saved_activations)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self._one(columns.tensor_shape)

    @property
    def tensor_dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self._one(columns.tensor_dtype)

    @property
    def tensor_fsize(self) -> int:
        """The bytes of the tensor's elements."""
        return self._one(columns.tensor_fsize)

    @property
    def tensor_fsize_nice(self) -> str:
        """The size of the tensor as text: `253.5 KB`."""
        return self._one(columns.tensor_fsize_nice)

    @property
    def grad_contents(self) -> torch.Tensor | None:
        """The gradient that arrived in backward passes, summed over them; None if none did.

        Those of `log_backward()` always arrive, with `save_gradients=True` those of every backward
        pass.
        """
        return self._one(columns.grad_contents)

    @property
    def grad_missing_reason(self) -> str | None:
        """Why a view has no gradient although a backward pass reached it; None for all other
        entries.
        """
        return self._log.missing_gradient(self._entry)

    @property
    def has_saved_grad(self) -> bool:
        """Whether a gradient arrived."""
        return self._one(columns.has_saved_grad)

    @property
    def grad_shape(self) -> tuple[int, ...] | None:
        """The shape of the gradient; None without one."""
        return self._one(columns.grad_shape)

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of the gradient; None without one."""
        return None if self.grad_contents is None else self.grad_contents.dtype

    @property
    def backward_time_elapsed(self) -> float | None:
        """Seconds that its part of all backward passes took; None if none reached it."""
        return self._one(columns.backward_time_elapsed)

    @property
    def backward_order(self) -> int | None:
        """Its place in the last backward pass that reached it, from 1."""
        return self._one(columns.backward_order)
