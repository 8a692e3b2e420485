"""Runs a model on one batch after another and returns the values of the chosen layers.

The first batch is logged in full, which says what the keys mean. If a light run along the same
program gives the same bits, all later batches run that way; an input that takes another way through
the model is logged, and its program learned as well. Models that a light run cannot follow, and
those that change their own state or their inputs, are logged for every batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from torchlens._capture.light_run import Deviation, LightRun, Program, find_rows, learn
from torchlens._capture.memory.saved_values import version_of
from torchlens._capture.options import LogOptions, checked_layers, named_inputs
from torchlens._capture.selection import keys_in
from torchlens._capture.session import generator_states, restore_generators
from torchlens._history.log_model import log_model
from torchlens._history.model_history import LayersToSave, ModelHistory
from torchlens._recording.regions import storage_of
from torchlens._recording.trees import named_tensors
from torchlens._text.error_wording import got

Values: TypeAlias = dict[str, torch.Tensor]
# After so many ways through the model, each further input is logged instead of learned.
_MAX_PROGRAMS = 32


class Engine:
    """The model and the chosen layers; `run` gives their values for one batch."""

    def __init__(self, model: torch.nn.Module, layers: LayersToSave) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {got(model)}.")
        self.model = model
        self._layers = _checked(layers)
        # By the shapes of the inputs: the program, and the chosen inputs by name and number.
        self._programs: dict[Any, tuple[Program, dict[str, int]]] = {}
        self._storages = {storage_of(t) for t in (*model.parameters(), *model.buffers())}
        self.is_careful = False  # every batch is logged
        self.changes_state = False  # a run changes the model or its inputs
        self.first: ModelHistory | None = None  # the log of the first batch, without its values
        self.names: list[str] = []

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], who: str) -> Values:
        """The chosen values for one batch; `who` names it in messages."""
        if self.first is None or self.is_careful:
            return self._run_logged(args, kwargs, who)
        before = generator_states()
        shapes = _shapes(args, kwargs)
        rest = [known for key, known in self._programs.items() if key != shapes]
        program, inputs = self._programs[shapes] if shapes in self._programs else rest.pop()
        while True:
            try:
                return self._run_light(program, inputs, args, kwargs)
            except Deviation as deviation:
                restore_generators(before)
                at, call = deviation.at, deviation.call
            # Those that agree with what the model did up to there, and then did.
            rest = [
                known
                for known in rest
                if known[0].calls[:at] == program.calls[:at] and known[0].calls[at] == call
            ]
            if not rest:
                return self._run_logged(args, kwargs, who)
            program, inputs = rest.pop()

    def _run_light(
        self,
        program: Program,
        inputs: Mapping[str, int],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Values:
        own: Values = {}
        if inputs:
            given = named_inputs(self.model, list(args), dict(kwargs))
            own = {name: given[number][1].clone() for name, number in inputs.items()}
        light = LightRun(program)
        light.run(self.model, args, kwargs)
        values = own | light.values
        lasting = self._storages | {
            storage_of(tensor) for _, tensor in named_tensors((list(args), dict(kwargs)))
        }
        for name, value in light.values.items():  # a view of an input or a buffer may change later
            if storage_of(value) in lasting:
                values[name] = value.clone()
        return {name: values[name].detach() for name in self.names}

    def _run_logged(self, args: Sequence[Any], kwargs: Mapping[str, Any], who: str) -> Values:
        """Logs the model on a batch, and learns its program if there is one to learn."""
        before, versions = generator_states(), self._versions(args, kwargs)
        options = LogOptions(
            layers_to_save=self._layers,
            detach_saved_tensors=True,
            mark_input_output_distances=False,
        )
        try:
            history = log_model(self.model, list(args), list(args), dict(kwargs), options)
            entries = entries_of(history, self._layers)
        except ValueError as error:
            text = str(error).replace("layers_to_save names", "layers names")
            if not text.startswith("layers names"):
                raise
            if self.first is None:
                raise LayersError(text) from None
            raise ValueError(
                f"{who} does not reach a layer that other inputs reach: {text}"
            ) from None
        listed = history.layer_list
        values: Values = {name: listed[at].tensor_contents for name, at in entries.items()}
        self._check_names(list(entries), who)
        if self.first is None:
            self.first = history
        self.changes_state |= versions != self._versions(args, kwargs)
        self.is_careful |= self.changes_state or len(self._programs) >= _MAX_PROGRAMS
        if not self.is_careful:
            after = generator_states()
            try:
                self.is_careful = not self._learn(history, entries, values, args, kwargs, before)
            finally:
                restore_generators(after)
        history._log.recording.values[:] = [None] * len(history._log.recording.values)
        return values

    def _learn(
        self,
        history: ModelHistory,
        entries: Mapping[str, int],
        values: Values,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        generators: Any,
    ) -> bool:
        """Learns the program of a logged batch; False if a light run is not the same as the log."""
        restore_generators(generators)
        steps = learn(self.model, args, kwargs)
        rows = find_rows(history._log.recording, steps)
        log = history._log
        numbers = {name: log.graph.recorded[log.visible[at]] for name, at in entries.items()}
        given = {number: place for place, (_, number) in enumerate(log.recording.inputs)}
        inputs = {name: given[number] for name, number in numbers.items() if number in given}
        if rows is None or not rows.keys() | given.keys() >= set(numbers.values()):
            return False
        program = Program(
            steps, {name: rows[number] for name, number in numbers.items() if name not in inputs}
        )
        restore_generators(generators)
        try:
            found = self._run_light(program, inputs, args, kwargs)
        except Deviation:
            return False
        if not all(same_bits(values[name], found[name]) for name in values):
            return False
        self._programs[_shapes(args, kwargs)] = program, inputs
        return True

    def _check_names(self, names: list[str], who: str) -> None:
        if not self.names:
            self.names = names
        if names != self.names:
            extra = sorted(set(names) ^ set(self.names))
            raise ValueError(
                f"{who} takes another way through the model than the first batch: the chosen "
                f"layers differ in {', '.join(extra[:6])}. Choose layers that every input reaches, "
                "by their full labels or modules."
            )

    def _versions(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
        """The version counters of what a run may change."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [tensor for _, tensor in named_tensors((list(args), dict(kwargs)))]
        return list(map(version_of, tensors))


def _checked(layers: LayersToSave) -> Any:
    checked = checked_layers(layers)
    if checked == "none":
        raise ValueError(
            "layers must name at least one layer: a label, a module, a list of them, or a function "
            f"of a layer entry, got {got(layers)}."
        )
    return checked


class LayersError(ValueError):
    """The layers that were asked for are not in the model."""


def entries_of(history: ModelHistory, layers: Any) -> dict[str, int]:
    """Name → number of each chosen layer: the key itself if it means one layer, or the labels."""
    if layers == "all":
        return {entry.layer_label: at for at, entry in enumerate(history)}
    if callable(layers):
        listed = enumerate(history)
        return {entry.layer_label: at for at, entry in listed if layers(entry)}
    found: dict[str, int] = {}
    place = {entry: at for at, entry in enumerate(history._log.visible)}
    for key in keys_in(layers):
        entries = history._lookup.many(key, "layers")
        for entry in entries:
            is_name = isinstance(key, str) and len(entries) == 1
            found.setdefault(key if is_name else history._log.label(entry), place[entry])
    return found


def _shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return tuple(tensor.shape for _, tensor in named_tensors((list(args), dict(kwargs))))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors have the same shape, dtype and values, NaN where the other has NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(
        torch.equal(a, b)
        or (
            torch.equal(a.isnan(), b.isnan())
            and (torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0)))
        )
    )


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The context of an extraction: evaluation mode and no gradients; the modes are put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def device_of(model: torch.nn.Module) -> torch.device | None:
    """The device of the model's first parameter or buffer; None if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return None
