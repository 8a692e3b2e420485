"""The fields of a history, a sentence each; every one is computed when it is read."""

from collections import Counter
from collections.abc import Iterable
from itertools import compress
from typing import TypeVar

from torchlens._history.field import ManyEntries, field
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._text.numbers import bytes_text

_Value = TypeVar("_Value")


class HistoryFields:
    """The fields of a history: of the model, its layers, its modules, their sizes and times."""

    _log: Log

    def _labels(self, entries: Iterable[int]) -> list[str]:
        return self._log.labels(list(entries))

    @property
    def _everything(self) -> range:
        """All entries, whether listed or not."""
        return range(len(self._log.graph.recorded))

    def _column(self, column: field[_Value]) -> list[_Value]:
        """The values of all entries, whether listed or not."""
        return column.of(ManyEntries(self._log, self._everything))

    def _labels_where(self, fact: field[bool]) -> list[str]:
        return self._labels(compress(self._everything, self._column(fact)))

    # -- the model ---------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The class of the model."""
        return self._log.recording.model_name

    @property
    def model_is_recurrent(self) -> bool:
        """Whether a result of some layer leads to a later pass of that layer."""
        return self.model_max_recurrent_loops > 1

    @property
    def model_max_recurrent_loops(self) -> int:
        """The largest number of passes of a layer whose result leads to a later pass of it."""
        return self._log.most_loops

    @property
    def model_is_branching(self) -> bool:
        """Whether some entry is read by more than one other."""
        return any(len(children) > 1 for children in self._log.graph.children)

    @property
    def model_has_conditional_branching(self) -> bool:
        """Whether an `if` (or `while`, `and`, `not`) read a tensor."""
        return bool(self._log.graph.booleans)

    # -- the layers --------------------------------------------------------------------------------

    @property
    def layer_labels(self) -> list[str]:
        """The label of each entry, with the pass if its layer has several."""
        return self._labels(self._log.visible)

    @property
    def layer_labels_w_pass(self) -> list[str]:
        """The label of each entry, always with the pass."""
        return self._log.labels_w_pass(self._log.visible)

    @property
    def layer_labels_no_pass(self) -> list[str]:
        """The label of each layer, without the pass: every layer once."""
        return list(self.layer_num_passes)

    @property
    def layer_num_passes(self) -> dict[str, int]:
        """Layer → its number of passes."""
        graph = self._log.graph
        layers = dict.fromkeys(graph.layer_of[entry] for entry in self._log.visible)
        return {graph.layers[number].label: graph.layers[number].num_passes for number in layers}

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
    def internally_initialized_layers(self) -> list[str]:
        """Entries made inside the model from nothing, like `torch.zeros`."""
        return self._labels_where(LayerEntry.initialized_inside_model)

    @property
    def internally_terminated_layers(self) -> list[str]:
        """Entries that nothing reads and that are not outputs."""
        return self._labels_where(LayerEntry.terminated_inside_model)

    @property
    def internally_terminated_bool_layers(self) -> list[str]:
        """Entries that an `if` read."""
        return self._labels_where(LayerEntry.is_terminal_bool_layer)

    @property
    def conditional_branch_edges(self) -> list[tuple[str, str]]:
        """The (parent, child) pairs at which the computation of a condition begins."""
        return [
            (self._log.label(parent), self._log.label(child))
            for parent, child in self._log.graph.condition_edges
        ]

    @property
    def layers_with_saved_activations(self) -> list[str]:
        """Entries with a saved tensor."""
        return self._labels_where(LayerEntry.has_saved_activations)

    @property
    def layers_with_saved_gradients(self) -> list[str]:
        """Entries with a saved gradient."""
        return self._labels_where(LayerEntry.has_saved_grad)

    @property
    def unlogged_layers(self) -> list[str]:
        """Entries that `keep_unsaved_layers=False` left out of the list."""
        listed = set(self._log.visible)
        return self._labels(entry for entry in self._everything if entry not in listed)

    # -- counts and sizes --------------------------------------------------------------------------

    @property
    def num_operations(self) -> int:
        """How many calls of torch functions are in the log; a call with several results counts
        once.
        """
        rows = self._log.rows(self._everything)
        return sum(
            not row.output_index and row.operation not in (INPUT, OUTPUT, BUFFER) for row in rows
        )

    @property
    def num_operations_left_out(self) -> int:
        """How many results of operations are not in the log because they are connected to neither
        input nor output.
        """
        return self._log.graph.num_left_out

    @property
    def num_tensors_total(self) -> int:
        """How many entries there are, including those that are not listed."""
        return len(self._log.graph.recorded)

    @property
    def num_tensors_saved(self) -> int:
        """How many entries have a saved tensor."""
        return sum(self._column(LayerEntry.has_saved_activations))

    @property
    def tensor_fsize_total(self) -> int:
        """Bytes of all tensors."""
        return sum(self._column(LayerEntry.tensor_fsize))

    @property
    def tensor_fsize_total_nice(self) -> str:
        """Size of all tensors as text: `253.5 KB`."""
        return bytes_text(self.tensor_fsize_total)

    @property
    def tensor_fsize_saved(self) -> int:
        """Bytes of the tensors that were saved, as they were before `activation_postfunc`."""
        return sum(
            compress(
                self._column(LayerEntry.tensor_fsize),
                self._column(LayerEntry.has_saved_activations),
            )
        )

    @property
    def tensor_fsize_saved_nice(self) -> str:
        """Size of the tensors that were saved, as text."""
        return bytes_text(self.tensor_fsize_saved)

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
        return len(
            {
                self._log.graph.layer_of[entry]
                for entry, own in enumerate(self._log.graph.params)
                if own
            }
        )

    @property
    def total_params_fsize(self) -> int:
        """Bytes of all parameters."""
        return sum(
            parameter.numel() * parameter.element_size() for parameter in self._log.recording.params
        )

    @property
    def total_params_fsize_nice(self) -> str:
        """Size of all parameters as text."""
        return bytes_text(self.total_params_fsize)

    # -- floating-point operations -----------------------------------------------------------------

    @property
    def total_flops(self) -> int:
        """Floating-point operations of all calls whose cost is known; `flops_not_counted` has the
        others.
        """
        return sum(flops or 0 for flops in self._column(LayerEntry.flops))

    @property
    def total_flops_backward(self) -> int:
        """Floating-point operations of a backward pass from the outputs."""
        return sum(flops or 0 for flops in self._column(LayerEntry.flops_backward))

    @property
    def flops_not_counted(self) -> dict[str, int]:
        """Layer type → number of calls whose cost is not known."""
        types, costs = self._column(LayerEntry.layer_type), self._column(LayerEntry.flops)
        return dict(
            Counter(kind for kind, flops in zip(types, costs, strict=True) if flops is None)
        )

    # -- random numbers and time -------------------------------------------------------------------

    @property
    def random_seed_used(self) -> int | None:
        """The `random_seed` given to the call, or None."""
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

    # -- the modules -------------------------------------------------------------------------------

    @property
    def module_addresses(self) -> list[str]:
        """The modules that ran, in the order of their first call."""
        return list(self._log.graph.module_tree.num_passes)

    @property
    def module_types(self) -> dict[str, str]:
        """Module address → its class."""
        return {
            address: self._log.recording.module_classes[address]
            for address in self.module_addresses
        }

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
        return {
            address: list(below) for address, below in self._log.graph.module_tree.children.items()
        }

    @property
    def top_level_modules(self) -> list[str]:
        """The modules that the model itself calls."""
        return list(self._log.graph.module_tree.top_level)

    @property
    def module_nparams(self) -> dict[str, int]:
        """Module address → how many numbers are in its parameters and in those of all modules below
        it.

        A parameter that is shared counts once in each.
        """
        own, params = self._log.recording.module_params, self._log.recording.params
        found: dict[str, set[int]] = {}
        for address, numbers in own.items():
            parts = address.split(".")
            for end in range(1, len(parts) + 1):
                found.setdefault(".".join(parts[:end]), set()).update(numbers)
        return {
            address: sum(params[number].numel() for number in found.get(address, ()))
            for address in self.module_addresses
        }

    @property
    def module_layers(self) -> dict[str, list[str]]:
        """Module address → labels of the entries computed inside it."""
        calls = self._log.recording.module_calls
        found: dict[str, dict[str, None]] = {address: {} for address in self.module_addresses}
        for label, row in zip(
            self._log.labels(self._everything), self._log.rows(self._everything), strict=True
        ):
            for call in self._log.graph.module_chains[row.module_call]:
                found[calls[call].address][label] = None
        return {address: list(labels) for address, labels in found.items()}
