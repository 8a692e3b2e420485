"""One entry of a history: one tensor, and the operation that made it."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchlens.capture.arguments import shape_of
from torchlens.capture.functions import argument_names
from torchlens.capture.operations import BUFFER, INPUT, OUTPUT
from torchlens.graph.costs import flops_of
from torchlens.graph.edges import located
from torchlens.history.backward import backward_times, parameter_gradients
from torchlens.history.log import Log, SourceLine, nice_bytes
from torchlens.history.lookup import lookup_keys
from torchlens.history.text import entry_text
from torchlens.lazy_import import lazy_function

if not TYPE_CHECKING:
    classic_field = lazy_function("torchlens.history.classic", "classic_field")

__all__ = ["LayerEntry"]

_Place = TypeVar("_Place", int, str)


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

    def _labels(self, entries: Any) -> list[str]:
        return [self._log.label(entry) for entry in entries]

    # -- labels ----------------------------------------------------------------------------------------------------

    @property
    def layer_label(self) -> str:
        """Its name: `conv2d_3_7`, or `conv2d_3_7:2` where the layer has several passes."""
        return self._log.label(self._entry)

    @property
    def layer_label_w_pass(self) -> str:
        """Its name, always with the pass: `conv2d_3_7:1`."""
        return self._log.label_w_pass(self._entry)

    @property
    def layer_label_no_pass(self) -> str:
        """The name of its layer: `conv2d_3_7`."""
        return self._log.label_no_pass(self._entry)

    @property
    def layer_label_short(self) -> str:
        """Its short name: `conv2d_3`, or `conv2d_3:2` where the layer has several passes."""
        short = self.layer_label_no_pass_short
        return f"{short}:{self.pass_num}" if self.layer_passes_total > 1 else short

    @property
    def layer_label_w_pass_short(self) -> str:
        """Its short name, always with the pass: `conv2d_3:1`."""
        return f"{self.layer_label_no_pass_short}:{self.pass_num}"

    @property
    def layer_label_no_pass_short(self) -> str:
        """The short name of its layer: `conv2d_3`."""
        return self._layer.label_short

    @property
    def _layer(self) -> Any:
        return self._log.graph.layers[self._log.graph.layer_of[self._entry]]

    @property
    def layer_type(self) -> str:
        """The kind of operation: `conv2d`."""
        return self._layer.type

    @property
    def layer_type_num(self) -> int:
        """The layer's number among those of its type: 3 in `conv2d_3_7`."""
        return self._layer.type_num

    @property
    def layer_total_num(self) -> int:
        """The layer's number among all: 7 in `conv2d_3_7`; 0 for inputs and buffers."""
        return self._layer.total_num

    @property
    def pass_num(self) -> int:
        """Which pass of its layer it is, from 1."""
        return self._log.graph.pass_of[self._entry]

    @property
    def layer_passes_total(self) -> int:
        """How many passes its layer has."""
        return self._log.num_passes(self._entry)

    @property
    def operation_num(self) -> int:
        """Its place in the log, from 1; inputs and buffers come first."""
        return self._entry + 1

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
        return self._log.is_saved(self._entry)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self._log.row(self._entry).shape)

    @property
    def tensor_dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self._log.row(self._entry).dtype

    @property
    def tensor_fsize(self) -> int:
        """The bytes of the tensor's elements."""
        return self._log.num_bytes(self._entry)

    @property
    def tensor_fsize_nice(self) -> str:
        """The size of the tensor as text: `253.5 KB`."""
        return nice_bytes(self.tensor_fsize)

    @property
    def grad_contents(self) -> torch.Tensor | None:
        """The gradient that arrived in backward passes, summed over them; None if none did.

        Those of `log_backward()` always arrive, with `save_gradients=True` those of every backward pass.
        """
        return self._log.gradient(self._entry)

    @property
    def grad_missing_reason(self) -> str | None:
        """Why there is no gradient although a backward pass reached the entry, which happens to views; None where that is
        not so.
        """
        return self._log.missing_gradient(self._entry)

    @property
    def has_saved_grad(self) -> bool:
        """Whether a gradient arrived."""
        return self.grad_contents is not None

    @property
    def grad_shape(self) -> tuple[int, ...] | None:
        """The shape of the gradient; None without one."""
        return None if self.grad_contents is None else tuple(shape_of(self.grad_contents))

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of the gradient; None without one."""
        return None if self.grad_contents is None else self.grad_contents.dtype

    @property
    def backward_time_elapsed(self) -> float | None:
        """Seconds that its part of the backward passes took, all together; None if none reached it."""
        return backward_times(self._log).seconds.get(self._entry)

    @property
    def backward_order(self) -> int | None:
        """Its place in the last backward pass that reached it, from 1."""
        return backward_times(self._log).order.get(self._entry)

    # -- the operation ---------------------------------------------------------------------------------------------

    @property
    def func_applied(self) -> Callable[..., Any] | None:
        """The torch callable; None for inputs, outputs and buffers."""
        return None if self._is_boundary else self._log.row(self._entry).operation.func

    @property
    def func_applied_name(self) -> str:
        """The callable's name as torch spells it: `max_pool2d`, `relu_`, `__iadd__`."""
        return self._log.row(self._entry).operation.name

    @property
    def func_call_stack(self) -> list[SourceLine]:
        """Where in your code it was called, then where the modules around it were, innermost first."""
        return self._log.call_stack(self._entry)

    @property
    def func_time_elapsed(self) -> float:
        """Seconds that the call took."""
        return self._log.row(self._entry).seconds

    @property
    def flops(self) -> int | None:
        """Floating-point operations: 0 for what is free by convention, None where they are not known."""
        return flops_of(self._log.recording, self._log.row(self._entry))

    @property
    def flops_backward(self) -> int | None:
        """Floating-point operations of its part in a backward pass from the outputs; 0 where no gradient comes."""
        return self._log.flops_backward(self._entry)

    @property
    def func_argnames(self) -> tuple[str, ...]:
        """The names of the callable's parameters, where torch tells them."""
        return () if self._is_boundary else argument_names(self._log.row(self._entry).operation.func)

    @property
    def func_position_args_non_tensor(self) -> list[Any]:
        """Its positional arguments other than tensors."""
        return (
            [] if self._is_boundary else [arg for _, arg in self._non_tensors(enumerate(self._log.row(self._entry).args))]
        )

    @property
    def func_keyword_args_non_tensor(self) -> dict[str, Any]:
        """Its keyword arguments other than tensors."""
        return dict(self._non_tensors((self._log.row(self._entry).kwargs or {}).items()))

    def _non_tensors(self, arguments: Iterable[tuple[_Place, Any]]) -> list[tuple[_Place, Any]]:
        """Those that are no tensor and no list of nothing but tensors, which stand there as None."""
        tensors = {location for location, _ in located(self._log.row(self._entry).references)}

        def is_tensors(place: _Place, argument: Any) -> bool:
            if not isinstance(argument, list | tuple) or not argument:
                return place in tensors
            return all((place, index) in tensors for index in range(len(argument)))

        return [(place, argument) for place, argument in arguments if not is_tensors(place, argument)]

    @property
    def function_is_inplace(self) -> bool:
        """Whether the call writes to its first argument."""
        return self._log.row(self._entry).operation.is_inplace

    @property
    def gradfunc(self) -> str | None:
        """The name of its node in autograd's graph: `ConvolutionBackward0`; None without gradient."""
        return self._log.row(self._entry).gradfunc

    @property
    def is_part_of_iterable_output(self) -> bool:
        """Whether it is one of several results of a call, as of `split`."""
        return self._log.row(self._entry).output_index is not None

    @property
    def iterable_output_index(self) -> int | None:
        """Which of several results of a call it is, from 0; None where there is one."""
        return self._log.row(self._entry).output_index

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
        return [self._log.recording.param_addresses[number] for number in self._log.graph.params[self._entry]]

    @property
    def parent_param_grads(self) -> list[torch.Tensor | None]:
        """For each of its parameters the gradient from all operations together; None where no backward pass sent one."""
        found = parameter_gradients(self._log)
        return [found.get(number) for number in self._log.graph.params[self._entry]]

    @property
    def parent_param_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters it was computed with."""
        return [tuple(parameter.shape) for parameter in self.parent_params]

    @property
    def computed_with_params(self) -> bool:
        """Whether it was computed with parameters of the model."""
        return bool(self._log.graph.params[self._entry])

    @property
    def num_param_tensors(self) -> int:
        """How many parameters it was computed with, counted as tensors."""
        return len(self._log.graph.params[self._entry])

    @property
    def num_params_total(self) -> int:
        """How many numbers are in the parameters it was computed with."""
        return sum(parameter.numel() for parameter in self.parent_params)

    @property
    def parent_params_fsize(self) -> int:
        """The bytes of the parameters it was computed with."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parent_params)

    @property
    def parent_params_fsize_nice(self) -> str:
        """The size of the parameters it was computed with, as text."""
        return nice_bytes(self.parent_params_fsize)

    # -- the graph around it ---------------------------------------------------------------------------------------

    @property
    def parent_layers(self) -> list[str]:
        """Labels of the entries it reads."""
        return self._labels(self._log.graph.parents[self._entry])

    @property
    def child_layers(self) -> list[str]:
        """Labels of the entries that read it."""
        return self._labels(self._log.graph.children[self._entry])

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
        graph = self._log.graph
        number = graph.recorded[self._entry]
        reads = graph.located_reads.get(number)
        if reads is None:
            reads = located(self._log.row(self._entry).references)
        return [(location, self._log.label(graph.entry_of[parent])) for location, parent in reads if parent >= 0]

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
        return self._log.graph.has_input_ancestor[self._entry]

    @property
    def is_output_ancestor(self) -> bool:
        """Whether it leads to an output."""
        return self._log.graph.is_output_ancestor[self._entry]

    @property
    def is_output_parent(self) -> bool:
        """Whether the model returns it."""
        outputs = set(self._log.graph.outputs)
        return any(child in outputs for child in self._log.graph.children[self._entry])

    @property
    def min_distance_from_input(self) -> int | None:
        """Edges on the shortest way from an input, with `mark_input_output_distances=True`; None otherwise."""
        return _distance(self._log.from_input, self._entry, 0)

    @property
    def max_distance_from_input(self) -> int | None:
        """Edges on the longest way from an input, with `mark_input_output_distances=True`; None otherwise."""
        return _distance(self._log.from_input, self._entry, 1)

    @property
    def min_distance_from_output(self) -> int | None:
        """Edges on the shortest way to an output, with `mark_input_output_distances=True`; None otherwise."""
        return _distance(self._log.to_output, self._entry, 0)

    @property
    def max_distance_from_output(self) -> int | None:
        """Edges on the longest way to an output, with `mark_input_output_distances=True`; None otherwise."""
        return _distance(self._log.to_output, self._entry, 1)

    # -- where it begins and ends ----------------------------------------------------------------------------------

    @property
    def is_input_layer(self) -> bool:
        """Whether it is an input of the model."""
        return self._log.row(self._entry).operation is INPUT

    @property
    def is_output_layer(self) -> bool:
        """Whether it is an output of the model."""
        return self._log.row(self._entry).operation is OUTPUT

    @property
    def is_buffer_layer(self) -> bool:
        """Whether it is a buffer."""
        return self._log.row(self._entry).operation is BUFFER

    @property
    def _is_boundary(self) -> bool:
        return self._log.row(self._entry).operation in (INPUT, OUTPUT, BUFFER)

    @property
    def input_output_address(self) -> str | None:
        """`input.x` or `output.logits`; None for all others."""
        addresses = self._log.boundary_addresses.get(self._entry)
        return addresses[0] if addresses and not self.is_buffer_layer else None

    @property
    def buffer_address(self) -> str | None:
        """The address of the buffer: `bn1.running_mean`; None for all others."""
        return self._log.boundary_addresses[self._entry][0] if self.is_buffer_layer else None

    @property
    def initialized_inside_model(self) -> bool:
        """Whether it was made inside the model from nothing, like `torch.zeros`."""
        return not self.has_parents and not self._is_boundary

    @property
    def terminated_inside_model(self) -> bool:
        """Whether nothing reads it, although it is no output."""
        return not self.has_children and not self.is_output_layer

    # -- conditions ------------------------------------------------------------------------------------------------

    @property
    def is_terminal_bool_layer(self) -> bool:
        """Whether an `if` (or `while`, `and`, `not`) read it."""
        return self._entry in self._log.graph.booleans

    @property
    def atomic_bool_val(self) -> bool | None:
        """What the `if` read: True or False; None where none did."""
        return self._log.recording.booleans.get(self._log.graph.recorded[self._entry])

    @property
    def in_cond_branch(self) -> bool:
        """Whether it was computed only to decide an `if`."""
        return self._entry in self._log.graph.condition_entries

    @property
    def cond_branch_start_children(self) -> list[str]:
        """Labels of its children with which the computation of a condition begins."""
        return self._labels(child for parent, child in self._log.graph.condition_edges if parent == self._entry)

    # -- modules ---------------------------------------------------------------------------------------------------

    def _addresses(self, calls: Any) -> list[str]:
        return [self._log.recording.module_calls[call].address for call in calls]

    def _passes(self, calls: Any) -> list[str]:
        return [self._log.module_pass(call) for call in calls]

    @property
    def containing_module_origin(self) -> str | None:
        """The innermost module that was running, as `address:pass`; None in the model itself."""
        chain = self._log.module_chain(self._entry)
        return self._log.module_pass(chain[-1]) if chain else None

    @property
    def containing_modules_origin_nested(self) -> list[str]:
        """All modules that were running, as `address:pass`, outermost first."""
        return self._passes(self._log.module_chain(self._entry))

    @property
    def module_nesting_depth(self) -> int:
        """How many modules were running, one inside the other."""
        return len(self._log.module_chain(self._entry))

    @property
    def modules_entered(self) -> list[str]:
        """Addresses of the modules it was given to."""
        return self._addresses(self._log.graph.modules_entered.get(self._entry, ()))

    @property
    def module_passes_entered(self) -> list[str]:
        """The module calls it was given to, as `address:pass`."""
        return self._passes(self._log.graph.modules_entered.get(self._entry, ()))

    @property
    def modules_exited(self) -> list[str]:
        """Addresses of the modules that returned it, innermost first."""
        return self._addresses(self._log.graph.modules_exited.get(self._entry, ()))

    @property
    def module_passes_exited(self) -> list[str]:
        """The module calls that returned it, as `address:pass`, innermost first."""
        return self._passes(self._log.graph.modules_exited.get(self._entry, ()))

    @property
    def is_submodule_input(self) -> bool:
        """Whether it was given to a module."""
        return self._entry in self._log.graph.modules_entered

    @property
    def is_submodule_output(self) -> bool:
        """Whether a module returned it."""
        return self._entry in self._log.graph.modules_exited

    @property
    def bottom_level_submodule_pass_exited(self) -> str | None:
        """The module without modules inside that returned it, as `address:pass`; None where none did."""
        children = self._log.graph.module_tree.children
        calls = self._log.graph.modules_exited.get(self._entry, ())
        bottom = [call for call in calls if not children[self._log.recording.module_calls[call].address]]
        return self._log.module_pass(bottom[0]) if bottom else None

    @property
    def is_bottom_level_submodule_output(self) -> bool:
        """Whether a module without modules inside returned it."""
        return self.bottom_level_submodule_pass_exited is not None


def _distance(distances: Any, entry: int, which: int) -> int | None:
    known = None if distances is None else distances[entry]
    return None if known is None else known[which]
