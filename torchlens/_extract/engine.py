"""Runs a model on one batch after another and returns the values of the chosen layers.

The first batch is logged in full, which says what the keys mean. If a light run along the same
program gives the same bits, all later batches run that way; an input that takes another way through
the model is logged, and its program learned as well. Models that a light run cannot follow, and
those that change their own state or their inputs, are logged for every batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from torchlens._capture.light_run import (
    Deviation,
    LightRun,
    Program,
    find_rows,
    learn,
)
from torchlens._capture.options import LogOptions, checked_layers, named_inputs
from torchlens._capture.patches.patching import apply_patches, undo_patches
from torchlens._capture.selection import keys_in
from torchlens._capture.session import generator_states, restore_generators
from torchlens._extract.compiled import CannotCompileError, CompiledValues
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log_model import log_model
from torchlens._history.model_history import ModelHistory
from torchlens._history.sites import Place, Site, Sites
from torchlens._recording.origin import version_of
from torchlens._recording.regions import storage_of
from torchlens._recording.trees import named_tensors
from torchlens._recording.unseen import GradMode
from torchlens._recording.user_code import warn_caller
from torchlens._text.error_wording import got

Values: TypeAlias = dict[str, torch.Tensor]
# After so many ways through the model, each further input is logged instead of learned.
_MAX_PROGRAMS = 32


class LayersError(ValueError):
    """The layers that were asked for are not in the model."""


@dataclass(frozen=True, slots=True)
class _Way:
    """One way through the model: its program, and where the chosen values are."""

    program: Program
    places: dict[str, Place]
    inputs: dict[str, int]  # chosen inputs of the model: name → number among them

    def agrees(self, other: "_Way", deviation: Deviation) -> bool:
        """True if it is as the other up to the deviation, and there as the model was."""
        calls, at = self.program.calls, deviation.at
        return calls[:at] == other.program.calls[:at] and calls[at : at + 1] == [deviation.call]


class Engine:
    """The model and the chosen layers; `run` gives their values for one batch."""

    def __init__(self, model: torch.nn.Module, layers: Any, compiles: bool = False) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {got(model)}.")
        if any(tensor.is_meta for tensor in model.parameters()):
            raise ValueError(
                "The model is on the meta device, where tensors have no values. Load its weights, "
                "or log it by torchlens.log_forward_pass, which needs none."
            )
        self.model = model
        self._compiles = compiles
        self._compiled: CompiledValues | None = None
        self._layers = _checked(layers)
        self._ways: dict[Any, _Way] = {}  # by the shapes of the inputs
        self._deviation: tuple[_Way, Deviation]  # of the last attempt
        self._storages = {storage_of(t) for t in (*model.parameters(), *model.buffers())}
        self.is_careful = False  # every batch is logged
        self.changes_state = False  # a run changes the model or its inputs
        self.first: ModelHistory | None = None  # the log of the first batch, without its values
        self.names: list[str] = []

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], who: str) -> Values:
        """The chosen values for one batch; `who` names it in messages."""
        if self.first is None or self.is_careful:
            return self._run_logged(args, kwargs, who)
        if self._compiled is not None and self._compiled.takes(args, kwargs):
            return self._compiled(args, kwargs)
        before = generator_states()
        for way in self._likely_ways(args, kwargs):
            try:
                return self._run_light(way, args, kwargs)
            except Deviation as deviation:
                restore_generators(before)
                self._deviation = way, deviation
        return self._run_logged(args, kwargs, who)

    def _likely_ways(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[_Way]:
        """The way that inputs of these shapes took, then those that agree with what the model has
        done in the last attempt.
        """
        shapes = _shapes(args, kwargs)
        rest = [way for key, way in self._ways.items() if key != shapes]
        way = self._ways[shapes] if shapes in self._ways else rest.pop()
        while True:
            yield way
            rest = [other for other in rest if other.agrees(*self._deviation)]
            if not rest:
                return
            way = rest.pop()

    def _run_light(
        self, way: _Way, args: Sequence[Any], kwargs: Mapping[str, Any], is_first: bool = False
    ) -> Values:
        given = named_inputs(self.model, list(args), dict(kwargs))
        values = {name: given[number][1].clone() for name, number in way.inputs.items()}
        light = LightRun(way.program)
        light.run(self.model, args, kwargs)
        if is_first:
            way.program.pass_on(light.copied)
        lasting = self._storages | {storage_of(tensor) for _, tensor in given}
        for name, value in light.values.items():  # a view of an input or a buffer may change later
            values[name] = value.clone() if storage_of(value) in lasting else value
        return {name: place.read(values[name].detach()) for name, place in way.places.items()}

    def _run_logged(self, args: Sequence[Any], kwargs: Mapping[str, Any], who: str) -> Values:
        """Logs the model on a batch, and learns its program if there is one to learn."""
        before, versions = generator_states(), self._versions(args, kwargs)
        history, places = self._log(args, kwargs, who)
        log = history._log
        values = {
            name: place.read(LayerEntry(log, place.entry).tensor_contents)
            for name, place in places.items()
        }
        self.changes_state |= versions != self._versions(args, kwargs)
        self.is_careful |= self.changes_state or len(self._ways) >= _MAX_PROGRAMS
        if not self.is_careful:
            after = generator_states()
            try:
                self.is_careful = not self._learn(history, places, values, args, kwargs, before)
            finally:
                restore_generators(after)
        if self._compiles:
            self._compile(values, args, kwargs)
        log.recording.values[:] = [None] * len(log.recording.values)
        return values

    def _log(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], who: str
    ) -> tuple[ModelHistory, dict[str, Place]]:
        """The log of a batch, and the places of the chosen values in it."""
        layers = "all" if _has_sites(self._layers) else self._layers
        options = LogOptions(layers_to_save=layers, detach_saved_tensors=True)
        try:
            history = log_model(self.model, list(args), list(args), dict(kwargs), options)
            places = places_of(history, self._layers)
        except ValueError as error:
            text = str(error).replace("layers_to_save names", "layers names")
            if not text.startswith("layers names"):
                raise
            if self.first is None:
                raise LayersError(text) from None
            raise ValueError(
                f"{who} does not reach a layer that other inputs reach: {text}"
            ) from None
        self._check_names(list(places), who)
        self.first = self.first or history
        return history, places

    def _check_names(self, names: list[str], who: str) -> None:
        self.names = self.names or names
        if names != self.names:
            different = sorted(set(names) ^ set(self.names))
            raise ValueError(
                f"{who} takes another way through the model than the first batch: the chosen "
                f"layers differ in {', '.join(different[:6])}. Choose layers that every input "
                "reaches, by their full labels or modules."
            )

    def _learn(
        self,
        history: ModelHistory,
        places: dict[str, Place],
        values: Values,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        generators: Any,
    ) -> bool:
        """Learns the program of a logged batch; False if a light run is not the same as the log."""
        log = history._log
        restore_generators(generators)
        steps = learn(self.model, args, kwargs)
        rows = find_rows(log.recording, steps)
        numbers = {name: log.graph.recorded[place.entry] for name, place in places.items()}
        given = {number: place for place, (_, number) in enumerate(log.recording.inputs)}
        if rows is None or not rows.keys() | given.keys() >= set(numbers.values()):
            return False
        inputs = {name: given[number] for name, number in numbers.items() if number in given}
        chosen = {name: rows[number] for name, number in numbers.items() if name not in inputs}
        way = _Way(Program(self.model, steps, chosen), places, inputs)
        restore_generators(generators)
        try:
            found = self._run_light(way, args, kwargs, is_first=True)
        except Deviation:
            return False
        is_same = all(same_bits(values[name], found[name]) for name in values)
        if is_same:
            self._ways[_shapes(args, kwargs)] = way
        return is_same

    def _compile(self, values: Values, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compiles the run of the first batch, or warns why it cannot be."""
        self._compiles = False
        try:
            if self.is_careful:
                raise CannotCompileError("it changes its own state, or is no sequence of calls")
            way = self._ways[_shapes(args, kwargs)]
            made = CompiledValues(partial(self._run_light, way), args, kwargs)
            found = made(args, kwargs)
            for name, value in values.items():
                if not are_close(value, found[name]):
                    raise CannotCompileError(f"{name!r} has other values if it is compiled")
            self._compiled = made
        except CannotCompileError as reason:
            warn_caller(f"torchlens: the model runs without compile=True: {reason}.")

    def _versions(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
        """The version counters of what a run may change."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [tensor for _, tensor in named_tensors((list(args), dict(kwargs)))]
        return list(map(version_of, tensors))


# -- the chosen layers -----------------------------------------------------------------------------


def _has_sites(layers: Any) -> bool:
    return any(isinstance(key, Site) for key in keys_in(layers))


def _checked(layers: Any) -> Any:
    """`layers`, checked: keys as for a log, and sites."""
    keys = [key for key in keys_in(layers) if not isinstance(key, Site)]
    if keys or not _has_sites(layers):
        try:
            checked = checked_layers(keys if _has_sites(layers) else layers)
        except TypeError as error:
            raise TypeError(str(error).replace("layers_to_save", "layers")) from None
        if checked == "none":
            raise ValueError(
                "layers must name at least one layer: a label, a module, a list of them, or a "
                f"function of a layer entry, got {got(layers)}."
            )
    return keys_in(layers) if _has_sites(layers) else checked


def places_of(history: ModelHistory, layers: Any) -> dict[str, Place]:
    """Name → place of each chosen layer or site. The name is the key if it means one layer, and
    otherwise the label.
    """
    log = history._log
    if layers == "all" or callable(layers):
        chosen = [entry for entry in history if layers == "all" or layers(entry)]
        return {entry.layer_label: _whole(entry._entry) for entry in chosen}
    found: dict[str, Place] = {}
    for key in keys_in(layers):
        entries = [] if isinstance(key, Site) else history._lookup.many(key, "layers")
        if isinstance(key, Site):
            found.setdefault(str(key), Sites(log, history._lookup).place(key))
        elif isinstance(key, str) and len(entries) == 1:
            found.setdefault(key, _whole(entries[0]))
        else:
            found |= {log.label(entry): _whole(entry) for entry in entries}
    return found


def _whole(entry: int) -> Place:
    return Place(entry, {}, Site(entry))


def _shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return tuple(tensor.shape for _, tensor in named_tensors((list(args), dict(kwargs))))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors have the same shape, dtype and values, NaN where the other has NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    is_same = torch.equal(a.isnan(), b.isnan())
    return is_same and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def are_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True up to rounding, which the many layers of a model may have made large."""
    if a.shape != b.shape:
        return False
    if not a.dtype.is_floating_point:
        return a.dtype.is_complex or float((a != b).float().mean()) < 0.02
    tolerance = 0.02 if a.dtype.itemsize > 2 else 0.1
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return bool((a - b).norm() <= tolerance * max(float(b.norm()), 1e-30))


# -- the model -------------------------------------------------------------------------------------


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The context of an extraction: evaluation mode and no gradients; the modes are put back.

    Not inference mode, whose tensors do not count the writes to them.
    """
    modes = [(module, module.training) for module in model.modules()]
    user = object()
    try:
        # Once for all batches: each change of a class makes Python look up its attributes anew.
        apply_patches(user)
        model.eval()
        with GradMode(False, inference=False):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        try:
            undo_patches(user)
        finally:  # again, because an interrupt may cut the first call short
            undo_patches(user)
