"""The call that made the tensor: the function, its arguments and its parameters."""

from collections.abc import Callable
from typing import Any

import torch

from torchlens._history import columns
from torchlens._history.backward import parameter_gradients
from torchlens._history.entry_fields.reading import EntryReading
from torchlens._recording.functions import argument_names
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.user_code import SourceLine


class CallFields(EntryReading):
    """The call that made the tensor: the function, its arguments and its parameters."""

    __slots__ = ()

    # -- the operation
    # ---------------------------------------------------------------------------------------------

    @property
    def _is_boundary(self) -> bool:
        return self._log.row(self._entry).operation in (INPUT, OUTPUT, BUFFER)

    @property
    def func_applied(self) -> Callable[..., Any] | None:
        """The torch callable; None for inputs, outputs and buffers."""
        return None if self._is_boundary else self._log.row(self._entry).operation.func

    @property
    def func_applied_name(self) -> str:
        """The callable's name as torch spells it: `max_pool2d`, `relu_`, `__iadd__`."""
        return self._one(columns.func_applied_name)

    @property
    def func_call_stack(self) -> list[SourceLine]:
        """The line of your code that called it, then those that called the modules around it,
        innermost first.
        """
        return self._log.call_stack(self._entry)

    @property
    def func_time_elapsed(self) -> float:
        """Seconds that the call took."""
        return self._one(columns.func_time_elapsed)

    @property
    def flops(self) -> int | None:
        """Floating-point operations: 0 if free by convention, None if not known."""
        return self._one(columns.flops)

    @property
    def flops_backward(self) -> int | None:
        """Floating-point operations of its part in a backward pass from the outputs; 0 if no
        gradient reaches it.
        """
        return self._one(columns.flops_backward)

    @property
    def func_argnames(self) -> tuple[str, ...]:
        """The names of the callable's parameters, if torch provides them."""
        return (
            () if self._is_boundary else argument_names(self._log.row(self._entry).operation.func)
        )

    @property
    def func_position_args_non_tensor(self) -> list[Any]:
        """Its positional arguments other than tensors."""
        return self._one(columns.func_position_args_non_tensor)

    @property
    def func_keyword_args_non_tensor(self) -> dict[str, Any]:
        """Its keyword arguments other than tensors."""
        return self._one(columns.func_keyword_args_non_tensor)

    @property
    def function_is_inplace(self) -> bool:
        """Whether the call writes to its first argument."""
        return self._one(columns.function_is_inplace)

    @property
    def gradfunc(self) -> str | None:
        """The name of its node in autograd's graph: `ConvolutionBackward0`; None if it has no
        gradient.
        """
        return self._one(columns.gradfunc)

    @property
    def is_part_of_iterable_output(self) -> bool:
        """Whether it is one of several results of a call, as with `split`."""
        return self._one(columns.is_part_of_iterable_output)

    @property
    def iterable_output_index(self) -> int | None:
        """Which of several results of a call it is, from 0; None if there is only one."""
        return self._one(columns.iterable_output_index)

    @property
    def creation_args(self) -> tuple[Any, ...] | None:
        """The positional arguments as they were at the call, with `save_function_args=True`; None
        otherwise.
        """
        saved = self._log.recording.saved_args.get(self._log.graph.recorded[self._entry])
        return None if saved is None else saved[0]

    @property
    def creation_kwargs(self) -> dict[str, Any] | None:
        """The keyword arguments as they were at the call, with `save_function_args=True`; None
        otherwise.
        """
        saved = self._log.recording.saved_args.get(self._log.graph.recorded[self._entry])
        return None if saved is None else saved[1]

    # -- parameters
    # ----------------------------------------------------------------------------------------------

    @property
    def parent_params(self) -> list[torch.nn.Parameter]:
        """The parameters it was computed with."""
        return [self._log.parameter(number) for number in self._log.graph.params[self._entry]]

    @property
    def parent_param_addresses(self) -> list[str]:
        """The addresses of the parameters it was computed with: `features.6.weight`."""
        return self._one(columns.parent_param_addresses)

    @property
    def parent_param_grads(self) -> list[torch.Tensor | None]:
        """For each of its parameters, the gradient summed over all operations; None if no backward
        pass sent one.
        """
        found = parameter_gradients(self._log)
        return [found.get(number) for number in self._log.graph.params[self._entry]]

    @property
    def parent_param_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters it was computed with."""
        return self._one(columns.parent_param_shapes)

    @property
    def computed_with_params(self) -> bool:
        """Whether it was computed with parameters of the model."""
        return self._one(columns.computed_with_params)

    @property
    def num_param_tensors(self) -> int:
        """How many parameters it was computed with, counted as tensors."""
        return self._one(columns.num_param_tensors)

    @property
    def num_params_total(self) -> int:
        """How many numbers are in the parameters it was computed with."""
        return self._one(columns.num_params_total)

    @property
    def parent_params_fsize(self) -> int:
        """The bytes of the parameters it was computed with."""
        return self._one(columns.parent_params_fsize)

    @property
    def parent_params_fsize_nice(self) -> str:
        """The size of the parameters it was computed with, as text."""
        return self._one(columns.parent_params_fsize_nice)
