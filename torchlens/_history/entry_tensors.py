"""The tensor that an entry is, and its gradient."""

from typing import Any

import torch

from torchlens._history.backward import backward_times
from torchlens._history.field import EntryFields, field, size_texts
from torchlens._recording.regions import shape_of


class EntryTensors(EntryFields):
    """The tensor itself, and its gradient."""

    __slots__ = ()

    @property
    def tensor_contents(self) -> Any:
        """The value at the moment the operation ended; None if it was not saved."""
        return self._log.value(self._entry)

    @field
    def has_saved_activations(self) -> list[bool]:
        """Whether its value was saved."""
        return self._log.are_saved(self._numbers)

    @field
    def tensor_shape(self) -> list[tuple[int, ...]]:
        """The shape of the tensor."""
        return list(map(tuple, self._rows.shape))

    @field
    def tensor_dtype(self) -> list[torch.dtype]:
        """The dtype of the tensor."""
        return list(self._rows.dtype)

    @field
    def tensor_fsize(self) -> list[int]:
        """The bytes of the tensor's elements."""
        return self._log.sizes(self._numbers)

    @field
    def tensor_fsize_nice(self) -> list[str]:
        """The size of the tensor as text: `253.5 KB`."""
        return size_texts(self._log.sizes(self._numbers))

    # -- its gradient ------------------------------------------------------------------------------

    @property
    def grad_contents(self) -> torch.Tensor | None:
        """The gradient that arrived in backward passes, summed over them; None if none did.

        Those of `log_backward()` always arrive, with `save_gradients=True` those of every backward
        pass.
        """
        return self._log.gradient(self._entry)

    @property
    def grad_missing_reason(self) -> str | None:
        """Why a view has no gradient although a backward pass reached it; None for all other
        entries.
        """
        return self._log.missing_gradient(self._entry)

    @field
    def has_saved_grad(self) -> list[bool]:
        """Whether a gradient arrived."""
        return [gradient is not None for gradient in self._log.gradients(self._numbers)]

    @field
    def grad_shape(self) -> list[tuple[int, ...] | None]:
        """The shape of the gradient; None without one."""
        gradients = self._log.gradients(self._numbers)
        return [None if gradient is None else tuple(shape_of(gradient)) for gradient in gradients]

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of the gradient; None without one."""
        return None if self.grad_contents is None else self.grad_contents.dtype

    @field
    def backward_time_elapsed(self) -> list[float | None]:
        """Seconds that its part of all backward passes took; None if none reached it."""
        return list(map(backward_times(self._log).seconds.get, self._numbers))

    @field
    def backward_order(self) -> list[int | None]:
        """Its place in the last backward pass that reached it, from 1."""
        return list(map(backward_times(self._log).order.get, self._numbers))
