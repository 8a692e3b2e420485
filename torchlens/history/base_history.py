"""The log of one forward pass: lookups, counts and lists. `ModelHistory` adds drawing, exporting and saving."""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import torch

from torchlens.capture.collector import without_collector
from torchlens.capture.session import CaptureOptions
from torchlens.capture.valueless import outside_fake_mode
from torchlens.frameworks import Model
from torchlens.history.backward import BackwardPass, backward_passes, parameter_gradients
from torchlens.history.classic_access import ClassicAccess
from torchlens.history.history_fields import LayerFields, ModuleFields, TotalFields
from torchlens.history.layer_entry import LayerEntry
from torchlens.history.log import Log
from torchlens.history.lookup import Lookup
from torchlens.history.rerun import rerun, select_numbers
from torchlens.lazy_import import lazy_function

if TYPE_CHECKING:
    import pandas

    from torchlens.history.first_nonfinite import first_nonfinite
    from torchlens.history.log_backward import log_backward
    from torchlens.history.summary import Summary, summarize
    from torchlens.history.tables import entries_to_pandas
    from torchlens.history.text import history_text
    from torchlens.history.vocabulary import Measure
    from torchlens.nonfinite import NonFinite
else:
    first_nonfinite = lazy_function("torchlens.history.first_nonfinite", "first_nonfinite")
    log_backward = lazy_function("torchlens.history.log_backward", "log_backward")
    summarize = lazy_function("torchlens.history.summary", "summarize")
    entries_to_pandas = lazy_function("torchlens.history.tables", "entries_to_pandas")
    history_text = lazy_function("torchlens.history.text", "history_text")

__all__ = ["BaseHistory", "LayersToSave"]

# 'all', 'none', a key or several (label, module address, number, part of a label), or a function of an entry.
LayersToSave: TypeAlias = str | int | Sequence[str | int] | AbstractSet[str | int] | Callable[[LayerEntry], bool] | None


class BaseHistory(LayerFields, TotalFields, ModuleFields, ClassicAccess):
    """Every operation of a forward pass, in order."""

    def __init__(self, log: Log, options: CaptureOptions, keeps_unsaved: bool = True) -> None:
        self._log = log
        self._options = options
        log.history, log.history_type, log.options = weakref.ref(self), type(self), options
        log.keeps_unsaved = keeps_unsaved
        log.show_anew()

    def _show_anew(self) -> None:
        """Updates the lists after the saved values have changed."""
        self._log.show_anew()
        self.__dict__.pop("_lookup", None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _history_of, (self._log, type(self))

    def __copy__(self) -> Self:
        """Another history of the same tensors; saving or releasing values in one does not affect the other."""
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

    @property
    def layer_list(self) -> list[LayerEntry]:
        """All entries, in the order they were made."""
        return without_collector(lambda: list(self))

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
        return without_collector(lambda: history_text(self._log, self.model_name))

    def __repr__(self) -> str:
        return f"<ModelHistory of {self.model_name}: {len(self)} layers; print() it to see them>"

    def to_pandas(self) -> "pandas.DataFrame":
        """A table with one row per entry and one column per field that is not a tensor."""
        return entries_to_pandas(self._log, self._log.visible)

    def summary(
        self, depth: int | None = None, sort_by: "Measure | None" = None, width: int | None = None, limit: int | None = None
    ) -> "Summary":
        """Shapes, parameters, FLOPs, time and memory as a table that fits the terminal, with totals; print it.

        One line per layer, or, with `depth`, per module down to that depth (0 is the model alone). `sort_by` puts the
        largest first: 'flops', 'time', 'backward_time', 'total_time', 'memory', 'params', 'calls'. `limit` shortens the
        list.

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
        model: Model,
        input_args: Any = None,
        input_kwargs: Mapping[str, Any] | None = None,
        layers_to_save: LayersToSave = "all",
        random_seed: int | None = None,
    ) -> None:
        """Runs a new input through the same graph and replaces the saved tensors with the new ones.

        Raises DifferentGraphError, and keeps the values saved before, if the model does different operations.
        """
        numbers = select_numbers(self._log, self._lookup, layers_to_save, self.layer_list)
        options = self._options
        self._log.take(rerun(self._log, options, model, input_args, input_kwargs, numbers, random_seed, type(self)))
        self._show_anew()

    def cleanup(self) -> None:
        """Releases all saved tensors, gradients and arguments, even of entries that something still holds."""
        self._log.free_values()
        self._show_anew()

    def clear_params(self) -> None:
        """Releases the values of the model's parameters; their shapes, sizes and addresses stay.

        A history refers to the parameters, so a pickle includes them unless you call this first.
        """
        recording = self._log.recording
        recording.params = [
            torch.nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad) for param in recording.params
        ]

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

        Works without `save_gradients=True` if the tensors that the loss was computed from are saved.

        >>> loss = history['output_1'].tensor_contents.square().mean()
        >>> history.log_backward(loss)
        >>> history['conv2d_1'].grad_contents
        """
        has_transform = self._options.transform is not None
        log_backward(self._log, loss, gradient, retain_graph, create_graph, inputs, has_transform)

    def clear_gradients(self) -> None:
        """Forgets the gradients and times of all backward passes, so that the next one starts from zero."""
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

    def first_nonfinite(self, include_constants: bool = False) -> "NonFinite | None":
        """The first operation that made NaN or Inf, in the forward pass or else in a recorded backward pass.

        None if everything is finite. Intended infinity (`masked_fill(mask, -inf)`, a mask passed as an input) is ignored
        unless `include_constants` is True.

        >>> print(history.first_nonfinite())
        """
        with outside_fake_mode():
            return first_nonfinite(self._log, include_constants)


_History = TypeVar("_History", bound=BaseHistory)


def _history_of(log: Log, kind: type[_History]) -> _History:
    """A history of a copied log."""
    return kind(log, log.options, log.keeps_unsaved)
