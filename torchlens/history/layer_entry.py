"""One entry of a history: one tensor, and the operation that made it."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchlens.capture.functions import argument_names
from torchlens.capture.operations import BUFFER, INPUT, OUTPUT
from torchlens.history import columns
from torchlens.history.backward import parameter_gradients
from torchlens.history.log import Log, SourceLine
from torchlens.history.lookup import lookup_keys
from torchlens.history.text import entry_text
from torchlens.lazy_import import lazy_function

if not TYPE_CHECKING:
    classic_field = lazy_function("torchlens.history.classic", "classic_field")

__all__ = ["LayerEntry"]

_Value = TypeVar("_Value")


class LayerEntry:
    """What is known of one operation's result. Fields are worked out when they are read.

    >>> entry = history['conv2d_3_7']
    >>> entry.tensor_contents.shape
    """

    __slots__ = ("_entry", "_log")

    def __init__(self, log: Log, entry: int) -> None:
        self._log = log
        self._entry = entry

    if not TYPE_CHECKING:  # a type checker must go on telling of fields that are not there

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") and not hasattr(type(self), name):  # what copy, IPython, numpy ask every object for
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return classic_field(self, name)

    def __repr__(self) -> str:
        return f"<LayerEntry {self.layer_label}>"

    def __str__(self) -> str:
        return entry_text(self._log, self._entry)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerEntry) and self._log is other._log and self._entry == other._entry

    def __hash__(self) -> int:
        return hash((id(self._log), self._entry))

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerEntry, (self._log, self._entry)  # with all of its log, which several entries share

    def _one(self, column: Callable[[Log, Sequence[int]], list[_Value]]) -> _Value:
        return column(self._log, (self._entry,))[0]

    def _labels(self, entries: Iterable[int]) -> list[str]:
        return self._log.labels(list(entries))

    # -- labels ----------------------------------------------------------------------------------------------------

    @property
    def layer_label(self) -> str:
        """Its name: `conv2d_3_7`, or `conv2d_3_7:2` where the layer has several passes."""
        return self._one(columns.layer_label)

    @property
    def layer_label_w_pass(self) -> str:
        """Its name, always with the pass: `conv2d_3_7:1`."""
        return self._one(columns.layer_label_w_pass)

    @property
    def layer_label_no_pass(self) -> str:
        """The name of its layer: `conv2d_3_7`."""
        return self._one(columns.layer_label_no_pass)

    @property
    def layer_label_short(self) -> str:
        """Its short name: `conv2d_3`, or `conv2d_3:2` where the layer has several passes."""
        return self._one(columns.layer_label_short)

    @property
    def layer_label_w_pass_short(self) -> str:
        """Its short name, always with the pass: `conv2d_3:1`."""
        return self._one(columns.layer_label_w_pass_short)

    @property
    def layer_label_no_pass_short(self) -> str:
        """The short name of its layer: `conv2d_3`."""
        return self._one(columns.layer_label_no_pass_short)

    @property
    def _layer(self) -> Any:
        return self._log.graph.layers[self._log.graph.layer_of[self._entry]]

    @property
    def layer_type(self) -> str:
        """The kind of operation: `conv2d`."""
        return self._one(columns.layer_type)

    @property
    def layer_type_num(self) -> int:
        """The layer's number among those of its type: 3 in `conv2d_3_7`."""
        return self._one(columns.layer_type_num)

    @property
    def layer_total_num(self) -> int:
        """The layer's number among all: 7 in `conv2d_3_7`; 0 for inputs and buffers."""
        return self._one(columns.layer_total_num)

    @property
    def pass_num(self) -> int:
        """Which pass of its layer it is, from 1."""
        return self._one(columns.pass_num)

    @property
    def layer_passes_total(self) -> int:
        """How many passes its layer has."""
        return self._one(columns.layer_passes_total)

    @property
    def operation_num(self) -> int:
        """Its place in the log, from 1; inputs and buffers come first."""
        return self._one(columns.operation_num)

    @property
    def lookup_keys(self) -> list[int | str]:
        """Every key that finds this entry and no other."""
        return lookup_keys(self._log, self._entry)

    @property
    def same_layer_operations(self) -> list[str]:
        """Labels of all passes of its layer, its own among them."""
        return self._labels(self._layer.entries)

    # -- the tensor ------------------------------------------------------------------------------------------------

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

        Those of `log_backward()` always arrive, with `save_gradients=True` those of every backward pass.
        """
        return self._one(columns.grad_contents)

    @property
    def grad_missing_reason(self) -> str | None:
        """Why there is no gradient although a backward pass reached the entry, which happens to views; None where that is
        not so.
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
        """Seconds that its part of the backward passes took, all together; None if none reached it."""
        return self._one(columns.backward_time_elapsed)

    @property
    def backward_order(self) -> int | None:
        """Its place in the last backward pass that reached it, from 1."""
        return self._one(columns.backward_order)

    # -- the operation ---------------------------------------------------------------------------------------------

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
        """Where in your code it was called, then where the modules around it were, innermost first."""
        return self._log.call_stack(self._entry)

    @property
    def func_time_elapsed(self) -> float:
        """Seconds that the call took."""
        return self._one(columns.func_time_elapsed)

    @property
    def flops(self) -> int | None:
        """Floating-point operations: 0 for what is free by convention, None where they are not known."""
        return self._one(columns.flops)

    @property
    def flops_backward(self) -> int | None:
        """Floating-point operations of its part in a backward pass from the outputs; 0 where no gradient comes."""
        return self._one(columns.flops_backward)

    @property
    def func_argnames(self) -> tuple[str, ...]:
        """The names of the callable's parameters, where torch tells them."""
        return () if self._is_boundary else argument_names(self._log.row(self._entry).operation.func)

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
        """The name of its node in autograd's graph: `ConvolutionBackward0`; None without gradient."""
        return self._one(columns.gradfunc)

    @property
    def is_part_of_iterable_output(self) -> bool:
        """Whether it is one of several results of a call, as of `split`."""
        return self._one(columns.is_part_of_iterable_output)

    @property
    def iterable_output_index(self) -> int | None:
        """Which of several results of a call it is, from 0; None where there is one."""
        return self._one(columns.iterable_output_index)

    @property
    def creation_args(self) -> tuple[Any, ...] | None:
        """The positional arguments as they were, with `save_function_args=True`; None otherwise."""
        saved = self._log.recording.saved_args.get(self._log.graph.recorded[self._entry])
        return None if saved is None else saved[0]

    @property
    def creation_kwargs(self) -> dict[str, Any] | None:
        """The keyword arguments as they were, with `save_function_args=True`; None otherwise."""
        saved = self._log.recording.saved_args.get(self._log.graph.recorded[self._entry])
        return None if saved is None else saved[1]

    # -- parameters ------------------------------------------------------------------------------------------------

    @property
    def parent_params(self) -> list[torch.nn.Parameter]:
        """The parameters it was computed with."""
        return [self._log.recording.params[number] for number in self._log.graph.params[self._entry]]

    @property
    def parent_param_addresses(self) -> list[str]:
        """The addresses of the parameters it was computed with: `features.6.weight`."""
        return self._one(columns.parent_param_addresses)

    @property
    def parent_param_grads(self) -> list[torch.Tensor | None]:
        """For each of its parameters the gradient from all operations together; None where no backward pass sent one."""
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

    # -- the graph around it ---------------------------------------------------------------------------------------

    @property
    def parent_layers(self) -> list[str]:
        """Labels of the entries it reads."""
        return self._one(columns.parent_layers)

    @property
    def child_layers(self) -> list[str]:
        """Labels of the entries that read it."""
        return self._one(columns.child_layers)

    @property
    def sibling_layers(self) -> list[str]:
        """Labels of the other children of its parents."""
        graph = self._log.graph
        found = (child for parent in graph.parents[self._entry] for child in graph.children[parent])
        return self._labels(dict.fromkeys(child for child in found if child != self._entry))

    @property
    def spouse_layers(self) -> list[str]:
        """Labels of the other parents of its children."""
        graph = self._log.graph
        found = (parent for child in graph.children[self._entry] for parent in graph.parents[child])
        return self._labels(dict.fromkeys(parent for parent in found if parent != self._entry))

    @property
    def has_parents(self) -> bool:
        """Whether it reads any entry."""
        return bool(self._log.graph.parents[self._entry])

    @property
    def has_children(self) -> bool:
        """Whether any entry reads it."""
        return bool(self._log.graph.children[self._entry])

    @property
    def has_siblings(self) -> bool:
        """Whether its parents have other children."""
        return bool(self.sibling_layers)

    @property
    def has_spouses(self) -> bool:
        """Whether its children have other parents."""
        return bool(self.spouse_layers)

    @property
    def parent_layer_arg_locs(self) -> dict[str, dict[Any, Any]]:
        """Which argument each parent is: `{'args': {0: 'conv2d_1_1', (1, 0): ...}, 'kwargs': {...}}`.

        An argument that several operations wrote to has the list of them.
        """
        places: dict[str, dict[Any, Any]] = {"args": {}, "kwargs": {}}
        for location, label in self._located_parents():
            head = location[0] if isinstance(location, tuple) else location
            found = places["kwargs" if isinstance(head, str) else "args"]
            known = found.get(location)
            found[location] = label if known is None else [*([known] if isinstance(known, str) else known), label]
        return places

    def _located_parents(self) -> list[tuple[Any, str]]:
        return [(location, self._log.label(parent)) for location, parent in self._one(columns.located_parents)]

    def _reachable(self, edges: Any) -> set[int]:
        seen = {self._entry}
        pending = [self._entry]
        while pending:
            for entry in edges[pending.pop()]:
                if entry not in seen:
                    seen.add(entry)
                    pending.append(entry)
        return seen

    @property
    def input_ancestors(self) -> set[str]:
        """Labels of the inputs that lead to it."""
        reached = self._reachable(self._log.graph.parents)
        return set(self._labels(entry for entry in self._log.graph.inputs if entry in reached))

    @property
    def output_descendents(self) -> set[str]:
        """Labels of the outputs it leads to."""
        reached = self._reachable(self._log.graph.children)
        return set(self._labels(entry for entry in self._log.graph.outputs if entry in reached))

    @property
    def has_input_ancestor(self) -> bool:
        """Whether an input leads to it."""
        return self._one(columns.has_input_ancestor)

    @property
    def is_output_ancestor(self) -> bool:
        """Whether it leads to an output."""
        return self._one(columns.is_output_ancestor)

    @property
    def is_output_parent(self) -> bool:
        """Whether the model returns it."""
        return any(row.operation is OUTPUT for row in self._log.rows(self._log.graph.children[self._entry]))

    @property
    def min_distance_from_input(self) -> int | None:
        """Edges on the shortest way from an input, with `mark_input_output_distances=True`; None otherwise."""
        return self._one(columns.min_distance_from_input)

    @property
    def max_distance_from_input(self) -> int | None:
        """Edges on the longest way from an input, with `mark_input_output_distances=True`; None otherwise."""
        return self._one(columns.max_distance_from_input)

    @property
    def min_distance_from_output(self) -> int | None:
        """Edges on the shortest way to an output, with `mark_input_output_distances=True`; None otherwise."""
        return self._one(columns.min_distance_from_output)

    @property
    def max_distance_from_output(self) -> int | None:
        """Edges on the longest way to an output, with `mark_input_output_distances=True`; None otherwise."""
        return self._one(columns.max_distance_from_output)

    # -- where it begins and ends ----------------------------------------------------------------------------------

    @property
    def is_input_layer(self) -> bool:
        """Whether it is an input of the model."""
        return self._one(columns.is_input_layer)

    @property
    def is_output_layer(self) -> bool:
        """Whether it is an output of the model."""
        return self._one(columns.is_output_layer)

    @property
    def is_buffer_layer(self) -> bool:
        """Whether it is a buffer."""
        return self._one(columns.is_buffer_layer)

    @property
    def _is_boundary(self) -> bool:
        return self._log.row(self._entry).operation in (INPUT, OUTPUT, BUFFER)

    @property
    def input_output_address(self) -> str | None:
        """`input.x` or `output.logits`; None for all others."""
        return self._one(columns.input_output_address)

    @property
    def buffer_address(self) -> str | None:
        """The address of the buffer: `bn1.running_mean`; None for all others."""
        return self._one(columns.buffer_address)

    @property
    def initialized_inside_model(self) -> bool:
        """Whether it was made inside the model from nothing, like `torch.zeros`."""
        return self._one(columns.initialized_inside_model)

    @property
    def terminated_inside_model(self) -> bool:
        """Whether nothing reads it, although it is no output."""
        return self._one(columns.terminated_inside_model)

    # -- conditions ------------------------------------------------------------------------------------------------

    @property
    def is_terminal_bool_layer(self) -> bool:
        """Whether an `if` (or `while`, `and`, `not`) read it."""
        return self._one(columns.is_terminal_bool_layer)

    @property
    def atomic_bool_val(self) -> bool | None:
        """What the `if` read: True or False; None where none did."""
        return self._one(columns.atomic_bool_val)

    @property
    def in_cond_branch(self) -> bool:
        """Whether it was computed only to decide an `if`."""
        return self._one(columns.in_cond_branch)

    @property
    def cond_branch_start_children(self) -> list[str]:
        """Labels of its children with which the computation of a condition begins."""
        branch = self._log.graph.condition_entries
        children = self._log.graph.children[self._entry] if self._entry not in branch else ()
        return self._labels(child for child in children if child in branch)

    # -- modules ---------------------------------------------------------------------------------------------------

    @property
    def containing_module_origin(self) -> str | None:
        """The innermost module that was running, as `address:pass`; None in the model itself."""
        return self._one(columns.containing_module_origin)

    @property
    def containing_modules_origin_nested(self) -> list[str]:
        """All modules that were running, as `address:pass`, outermost first."""
        return self._one(columns.containing_modules_origin_nested)

    @property
    def module_nesting_depth(self) -> int:
        """How many modules were running, one inside the other."""
        return self._one(columns.module_nesting_depth)

    @property
    def modules_entered(self) -> list[str]:
        """Addresses of the modules it was given to."""
        return self._one(columns.modules_entered)

    @property
    def module_passes_entered(self) -> list[str]:
        """The module calls it was given to, as `address:pass`."""
        return self._one(columns.module_passes_entered)

    @property
    def modules_exited(self) -> list[str]:
        """Addresses of the modules that returned it, innermost first."""
        return self._one(columns.modules_exited)

    @property
    def module_passes_exited(self) -> list[str]:
        """The module calls that returned it, as `address:pass`, innermost first."""
        return self._one(columns.module_passes_exited)

    @property
    def is_submodule_input(self) -> bool:
        """Whether it was given to a module."""
        return self._one(columns.is_submodule_input)

    @property
    def is_submodule_output(self) -> bool:
        """Whether a module returned it."""
        return self._one(columns.is_submodule_output)

    @property
    def bottom_level_submodule_pass_exited(self) -> str | None:
        """The module without modules inside that returned it, as `address:pass`; None where none did."""
        return self._one(columns.bottom_level_submodule_pass_exited)

    @property
    def is_bottom_level_submodule_output(self) -> bool:
        """Whether a module without modules inside returned it."""
        return self._one(columns.is_bottom_level_submodule_output)
