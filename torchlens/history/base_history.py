"""The log of one forward pass: lookups, counts and lists. What is done with it later hangs on `ModelHistory`."""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import torch

from torchlens.capture.operations import BUFFER, INPUT, OUTPUT
from torchlens.capture.session import CaptureOptions
from torchlens.capture.valueless import outside_fake_mode
from torchlens.history import columns
from torchlens.history.backward import BackwardPass, backward_passes, parameter_gradients
from torchlens.history.first_nonfinite import first_nonfinite
from torchlens.history.layer_entry import LayerEntry
from torchlens.history.log import Log, nice_bytes
from torchlens.history.log_backward import log_backward
from torchlens.history.lookup import Lookup
from torchlens.history.rerun import rerun, select_numbers
from torchlens.history.summary import Summary, summarize
from torchlens.history.tables import entries_to_pandas
from torchlens.history.text import history_text
from torchlens.history.vocabulary import Measure
from torchlens.lazy_import import lazy_function
from torchlens.nonfinite import NonFinite

if TYPE_CHECKING:
    import pandas
else:
    classic_field = lazy_function("torchlens.history.classic", "classic_field")

__all__ = ["BaseHistory", "LayersToSave"]

# 'all', 'none', a key or several (label, module address, number, part of a label), or a function of an entry.
LayersToSave: TypeAlias = str | int | Sequence[str | int] | AbstractSet[str | int] | Callable[[LayerEntry], bool] | None


class BaseHistory:
    """Every operation of a forward pass, in order."""

    def __init__(self, log: Log, options: CaptureOptions, keeps_unsaved: bool = True) -> None:
        self._log = log
        self._options = options
        log.history, log.history_type, log.options = weakref.ref(self), type(self), options
        log.keeps_unsaved = keeps_unsaved
        log.show_anew()

    if not TYPE_CHECKING:  # a type checker must go on telling of fields that are not there

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") and not hasattr(type(self), name):  # what copy, IPython, numpy ask every object for
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return classic_field(self, name)

    def _show_anew(self) -> None:
        """What is saved has changed, and so may what is listed."""
        self._log.show_anew()
        self.__dict__.pop("_lookup", None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _history_of, (self._log, type(self))

    def __copy__(self) -> Self:
        """Another history of the same tensors; what is saved anew, or let go of, in the one stays in the other."""
        return _history_of(copy.copy(self._log), type(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return _history_of(copy.deepcopy(self._log, memo), type(self))

    # -- looking things up -----------------------------------------------------------------------------------------

    @cached_property
    def _lookup(self) -> Lookup:
        return Lookup(self._log)

    def __len__(self) -> int:
        return len(self._log.visible)

    def __iter__(self) -> Iterator[LayerEntry]:
        return (LayerEntry(self._log, entry) for entry in self._log.visible)

    def __getitem__(self, key: int | str) -> LayerEntry:
        return LayerEntry(self._log, self._lookup.one(key))

    def __contains__(self, key: object) -> bool:
        if isinstance(key, LayerEntry):
            return key._log is self._log and key._entry in self._log.visible
        try:
            self._lookup.one(key)  # type: ignore[arg-type]
        except (KeyError, IndexError, TypeError):
            return False
        return True

    def __str__(self) -> str:
        return history_text(self._log, self.model_name)

    def __repr__(self) -> str:
        return f"<ModelHistory of {self.model_name}: {len(self)} layers; print() it to see them>"

    def to_pandas(self) -> "pandas.DataFrame":
        """One row per entry, one column per field that is no tensor."""
        return entries_to_pandas(self._log, self._log.visible)

    def summary(
        self, depth: int | None = None, sort_by: Measure | None = None, width: int | None = None, limit: int | None = None
    ) -> Summary:
        """Shapes, parameters, FLOPs, time and memory as a table that fits the terminal, with totals; print it.

        One line per layer, or, with a depth, per module down to that depth (0 is the model alone). `sort_by` puts the most
        first: 'flops', 'time', 'backward_time', 'total_time', 'memory', 'params', 'calls'. `limit` cuts the list.

        >>> print(history.summary(sort_by='flops', limit=10))
        """
        return summarize(self, depth, sort_by, width, limit)

    def print_all_fields(self) -> None:
        """Prints every field of the history with its value."""
        for name in sorted(name for name in dir(type(self)) if not name.startswith("_")):
            value = getattr(self, name)
            if not callable(value):
                print(f"{name}: {value}")  # noqa: T201 (printing is what it is for)

    # -- doing it again --------------------------------------------------------------------------------------------

    def save_new_activations(
        self,
        model: torch.nn.Module,
        input_args: Any = None,
        input_kwargs: Mapping[str, Any] | None = None,
        layers_to_save: LayersToSave = "all",
        random_seed: int | None = None,
    ) -> None:
        """Runs a new input through the same graph and replaces the saved tensors by its own.

        Raises DifferentGraphError, and keeps what was saved before, if the model does other operations than it did.
        """
        numbers = select_numbers(self._log, self._lookup, layers_to_save, self.layer_list)
        options = self._options
        self._log.take(rerun(self._log, options, model, input_args, input_kwargs, numbers, random_seed, type(self)))
        self._show_anew()

    def cleanup(self) -> None:
        """Lets go of all saved tensors, gradients and arguments, also for entries that somebody still holds."""
        self._log.free_values()
        self._show_anew()

    def clear_params(self) -> None:
        """Lets go of the values of the model's parameters; their shapes, sizes and addresses stay.

        A history refers to them, so they go along where it is pickled or saved, unless this was called before.
        """
        recording = self._log.recording
        recording.params = [
            torch.nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad) for param in recording.params
        ]

    # -- the model -------------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The class of the model."""
        return self._log.recording.model_name

    @property
    def model_is_recurrent(self) -> bool:
        """Whether some layer has more than one pass."""
        return self.model_max_recurrent_loops > 1

    @property
    def model_max_recurrent_loops(self) -> int:
        """The largest number of passes that a layer has."""
        return max((len(layer.entries) for layer in self._log.graph.layers), default=1)

    @property
    def model_is_branching(self) -> bool:
        """Whether some entry is read by more than one other."""
        return any(len(children) > 1 for children in self._log.graph.children)

    @property
    def model_has_conditional_branching(self) -> bool:
        """Whether an `if` (or `while`, `and`, `not`) read a tensor."""
        return bool(self._log.graph.booleans)

    # -- the layers ------------------------------------------------------------------------------------------------

    @property
    def layer_list(self) -> list[LayerEntry]:
        """All entries, in the order they were made."""
        return list(self)

    def _labels(self, entries: Any) -> list[str]:
        return self._log.labels(list(entries))

    @property
    def layer_labels(self) -> list[str]:
        """The label of each entry, with the pass where its layer has several."""
        return self._labels(self._log.visible)

    @property
    def layer_labels_w_pass(self) -> list[str]:
        """The label of each entry, always with the pass."""
        return self._log.labels_w_pass(self._log.visible)

    @property
    def layer_labels_no_pass(self) -> list[str]:
        """The label of each layer, without the pass: every layer once."""
        return list(dict.fromkeys(columns.layer_label_no_pass(self._log, self._log.visible)))

    @property
    def layer_num_passes(self) -> dict[str, int]:
        """Layer → its number of passes."""
        labels = columns.layer_label_no_pass(self._log, self._log.visible)
        return dict(zip(labels, columns.layer_passes_total(self._log, self._log.visible), strict=True))

    @property
    def input_layers(self) -> list[str]:
        """Labels of the inputs."""
        return self._labels(self._log.graph.inputs)

    @property
    def output_layers(self) -> list[str]:
        """Labels of the outputs."""
        return self._labels(self._log.graph.outputs)

    @property
    def buffer_layers(self) -> list[str]:
        """Labels of the buffers that an operation reads."""
        return self._labels(self._log.graph.buffers)

    @property
    def _everything(self) -> range:
        """All entries, whether listed or not."""
        return range(self.num_tensors_total)

    def _labels_where(self, fact: Callable[[Log, Sequence[int]], list[bool]]) -> list[str]:
        return self._labels(compress(self._everything, fact(self._log, self._everything)))

    @property
    def internally_initialized_layers(self) -> list[str]:
        """Entries made inside the model from nothing, like `torch.zeros`."""
        return self._labels_where(columns.initialized_inside_model)

    @property
    def internally_terminated_layers(self) -> list[str]:
        """Entries that nothing reads and that are no output."""
        return self._labels_where(columns.terminated_inside_model)

    @property
    def internally_terminated_bool_layers(self) -> list[str]:
        """Entries that an `if` read."""
        return self._labels_where(columns.is_terminal_bool_layer)

    @property
    def conditional_branch_edges(self) -> list[tuple[str, str]]:
        """(parent, child) where the computation of a condition begins."""
        return [(self._log.label(parent), self._log.label(child)) for parent, child in self._log.graph.condition_edges]

    @property
    def layers_with_saved_activations(self) -> list[str]:
        """Entries with a saved tensor."""
        return self._labels_where(columns.has_saved_activations)

    @property
    def layers_with_saved_gradients(self) -> list[str]:
        """Entries with a saved gradient."""
        return self._labels_where(columns.has_saved_grad)

    @property
    def unlogged_layers(self) -> list[str]:
        """Entries that `keep_unsaved_layers=False` left out of the list."""
        listed = set(self._log.visible)
        return self._labels(entry for entry in self._everything if entry not in listed)

    # -- counts and sizes ------------------------------------------------------------------------------------------

    @property
    def num_operations(self) -> int:
        """How many calls of torch functions are in the log; a call with several results counts once."""
        rows = self._log.rows(self._everything)
        return sum(not row.output_index and row.operation not in (INPUT, OUTPUT, BUFFER) for row in rows)

    @property
    def num_operations_left_out(self) -> int:
        """How many results of operations are not in the log: no input leads to them, and they lead to no output."""
        return self._log.graph.num_left_out

    @property
    def num_tensors_total(self) -> int:
        """How many entries there are, whether listed or not."""
        return len(self._log.graph.recorded)

    @property
    def num_tensors_saved(self) -> int:
        """How many entries have a saved tensor."""
        return sum(columns.has_saved_activations(self._log, self._everything))

    @property
    def tensor_fsize_total(self) -> int:
        """Bytes of all tensors."""
        return sum(self._log.sizes(self._everything))

    @property
    def tensor_fsize_total_nice(self) -> str:
        """Size of all tensors as text: `253.5 KB`."""
        return nice_bytes(self.tensor_fsize_total)

    @property
    def tensor_fsize_saved(self) -> int:
        """Bytes of the tensors that were saved, as they were before `activation_postfunc`."""
        return sum(compress(self._log.sizes(self._everything), columns.has_saved_activations(self._log, self._everything)))

    @property
    def tensor_fsize_saved_nice(self) -> str:
        """Size of the tensors that were saved, as text."""
        return nice_bytes(self.tensor_fsize_saved)

    @property
    def total_params(self) -> int:
        """How many numbers are in the parameters of the model."""
        return sum(parameter.numel() for parameter in self._log.recording.params)

    @property
    def total_param_tensors(self) -> int:
        """How many parameters the model has, counted as tensors."""
        return len(self._log.recording.params)

    @property
    def total_param_layers(self) -> int:
        """How many layers compute with parameters."""
        return len({self._log.graph.layer_of[entry] for entry, own in enumerate(self._log.graph.params) if own})

    @property
    def total_params_fsize(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self._log.recording.params)

    @property
    def total_params_fsize_nice(self) -> str:
        """Size of all parameters as text."""
        return nice_bytes(self.total_params_fsize)

    # -- floating-point operations ---------------------------------------------------------------------------------

    @property
    def total_flops(self) -> int:
        """Floating-point operations of all calls whose cost is known; `flops_not_counted` has the others."""
        return sum(flops or 0 for flops in columns.flops(self._log, self._everything))

    @property
    def total_flops_backward(self) -> int:
        """Floating-point operations of a backward pass from the outputs."""
        return sum(flops or 0 for flops in columns.flops_backward(self._log, self._everything))

    @property
    def flops_not_counted(self) -> dict[str, int]:
        """Layer type → number of calls whose cost is not known."""
        types, costs = columns.layer_type(self._log, self._everything), columns.flops(self._log, self._everything)
        return dict(Counter(kind for kind, flops in zip(types, costs, strict=True) if flops is None))

    # -- modules ---------------------------------------------------------------------------------------------------

    @property
    def module_addresses(self) -> list[str]:
        """The modules that ran, in the order of their first call."""
        return list(self._log.graph.module_tree.num_passes)

    @property
    def module_types(self) -> dict[str, str]:
        """Module address → its class."""
        return {address: self._log.recording.module_classes[address] for address in self.module_addresses}

    @property
    def module_passes(self) -> list[str]:
        """Every call of a module, as `address:pass`, in order."""
        return self._log.module_passes(range(1, len(self._log.recording.module_calls)))

    @property
    def module_num_passes(self) -> dict[str, int]:
        """Module address → how often it was called."""
        return dict(self._log.graph.module_tree.num_passes)

    @property
    def module_children(self) -> dict[str, list[str]]:
        """Module address → the modules called inside it."""
        return {address: list(below) for address, below in self._log.graph.module_tree.children.items()}

    @property
    def top_level_modules(self) -> list[str]:
        """The modules that the model itself calls."""
        return list(self._log.graph.module_tree.top_level)

    @property
    def module_nparams(self) -> dict[str, int]:
        """Module address → how many numbers are in its parameters and in those of all modules below it.

        A parameter that is shared counts once in each.
        """
        own, params = self._log.recording.module_params, self._log.recording.params
        found: dict[str, set[int]] = {}
        for address, numbers in own.items():
            parts = address.split(".")
            for end in range(1, len(parts) + 1):
                found.setdefault(".".join(parts[:end]), set()).update(numbers)
        return {
            address: sum(params[number].numel() for number in found.get(address, ())) for address in self.module_addresses
        }

    @property
    def module_layers(self) -> dict[str, list[str]]:
        """Module address → labels of the entries computed inside it."""
        calls = self._log.recording.module_calls
        found: dict[str, dict[str, None]] = {address: {} for address in self.module_addresses}
        for label, row in zip(self._log.labels(self._everything), self._log.rows(self._everything), strict=True):
            for call in self._log.graph.module_chains[row.module_call]:
                found[calls[call].address][label] = None
        return {address: list(labels) for address, labels in found.items()}

    # -- backward passes -------------------------------------------------------------------------------------------

    def log_backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Runs `loss.backward(...)` and records it: gradients, times and order.

        Needs no `save_gradients=True`, as long as what the loss was computed from is saved.

        >>> loss = history['output_1'].tensor_contents.square().mean()
        >>> history.log_backward(loss)
        >>> history['conv2d_1'].grad_contents
        """
        has_transform = self._options.transform is not None
        log_backward(self._log, loss, gradient, retain_graph, create_graph, inputs, has_transform)

    def clear_gradients(self) -> None:
        """Forgets the gradients and times of all backward passes, so that those of the next one stand alone."""
        self._log.recording.gradients.clear()

    @property
    def backward_passes(self) -> list[BackwardPass]:
        """A record of each backward pass through this log: `number`, `seconds`, `num_nodes`, `layer_seconds`,
        `layer_order`, `nodes_outside`, `seconds_outside`.
        """
        return backward_passes(self._log)

    @property
    def param_grads(self) -> dict[str, torch.Tensor]:
        """Address of a parameter → the gradient that backward passes through this log sent to it."""
        addresses = self._log.recording.param_addresses
        found = parameter_gradients(self._log)
        return {address: found[number] for number, address in enumerate(addresses) if number in found}

    def first_nonfinite(self, include_constants: bool = False) -> NonFinite | None:
        """The first operation that made a NaN or an Inf, in the forward pass or else in a backward pass that was recorded.

        None if all is finite. Infinity that was asked for (`masked_fill(mask, -inf)`, a mask handed in) is passed over,
        unless `include_constants`.

        >>> print(history.first_nonfinite())
        """
        with outside_fake_mode():
            return first_nonfinite(self._log, include_constants)

    # -- random numbers and time -----------------------------------------------------------------------------------

    @property
    def random_seed_used(self) -> int | None:
        """The `random_seed` that was given; None if none was."""
        return self._log.recording.random_seed

    @property
    def elapsed_time_total(self) -> float:
        """Seconds that the logged forward pass took, with its preparation and clean-up."""
        return self._log.recording.seconds_total

    @property
    def elapsed_time_forward_pass(self) -> float:
        """Seconds that the call of the model took, with the logging inside it."""
        return self._log.recording.seconds_forward

    @property
    def elapsed_time_function_calls(self) -> float:
        """Seconds that the torch functions alone took."""
        rows = self._log.recording.rows
        return sum(row.seconds for row in rows if not row.output_index)

    @property
    def elapsed_time_torchlens_logging(self) -> float:
        """Seconds of the total outside torch functions: the logging, and the model's own Python."""
        return max(0.0, self.elapsed_time_total - self.elapsed_time_function_calls)


_History = TypeVar("_History", bound=BaseHistory)


def _history_of(log: Log, kind: type[_History]) -> _History:
    """A history of a copied log."""
    return kind(log, log.options, log.keeps_unsaved)
