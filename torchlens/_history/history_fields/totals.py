"""Counts, sizes, floating-point operations and times of the whole pass."""

from collections import Counter
from itertools import compress

from torchlens._history import columns
from torchlens._history.history_fields.reading import HistoryReading
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._text.numbers import bytes_text


class TotalFields(HistoryReading):
    """Counts, sizes, floating-point operations and times of the whole pass."""

    # -- counts and sizes
    # ------------------------------------------------------------------------------------------

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
        return sum(columns.has_saved_activations(self._log, self._everything))

    @property
    def tensor_fsize_total(self) -> int:
        """Bytes of all tensors."""
        return sum(self._log.sizes(self._everything))

    @property
    def tensor_fsize_total_nice(self) -> str:
        """Size of all tensors as text: `253.5 KB`."""
        return bytes_text(self.tensor_fsize_total)

    @property
    def tensor_fsize_saved(self) -> int:
        """Bytes of the tensors that were saved, as they were before `activation_postfunc`."""
        return sum(
            compress(
                self._log.sizes(self._everything),
                columns.has_saved_activations(self._log, self._everything),
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

    # -- floating-point operations
    # ---------------------------------------------------------------------------------

    @property
    def total_flops(self) -> int:
        """Floating-point operations of all calls whose cost is known; `flops_not_counted` has the
        others.
        """
        return sum(flops or 0 for flops in columns.flops(self._log, self._everything))

    @property
    def total_flops_backward(self) -> int:
        """Floating-point operations of a backward pass from the outputs."""
        return sum(flops or 0 for flops in columns.flops_backward(self._log, self._everything))

    @property
    def flops_not_counted(self) -> dict[str, int]:
        """Layer type → number of calls whose cost is not known."""
        types, costs = (
            columns.layer_type(self._log, self._everything),
            columns.flops(self._log, self._everything),
        )
        return dict(
            Counter(kind for kind, flops in zip(types, costs, strict=True) if flops is None)
        )

    # -- random numbers and time
    # -----------------------------------------------------------------------------------

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
