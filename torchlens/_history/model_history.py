"""The log of one forward pass, as the user holds it.

A method that belongs to a feature (drawing, exporting, saving, ...) imports it when it is called.
"""

import copy
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, overload

import torch

from torchlens._history.backward import BackwardPass, backward_passes, parameter_gradients
from torchlens._history.field import ClassicAccess, ManyEntries
from torchlens._history.history_fields import HistoryFields
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._history.lookup import Lookup
from torchlens._recording.frameworks import Model
from torchlens._recording.garbage_collector import without_collector
from torchlens._recording.unseen import NoTorchFunction, unseen

if TYPE_CHECKING:
    import networkx
    import pandas
    import pyarrow

    from torchlens._attention.attention import Attention
    from torchlens._draw.draw_options import DrawKeywords, VisOpt
    from torchlens._draw.drawing import Drawing
    from torchlens._edit.replayer import Replayed, Replayer
    from torchlens._edit.sweep import Sweep
    from torchlens._health.nonfinite import NonFinite
    from torchlens._history.queries import Kinds, Layers, Modules, Shape
    from torchlens._history.receipt import Receipt
    from torchlens._history.residuals import Residual
    from torchlens._history.sites import Site, SiteKind
    from torchlens._history.summary import Summary
    from torchlens._page.page import Exploration
    from torchlens._receptive.field_table import FieldTable
    from torchlens._receptive.fields import Field, Unit
    from torchlens._text.measures import Measure

# 'all', 'none', a key or several (label, module address, number, part of a label), or a function of
# an entry.
LayersToSave: TypeAlias = (
    str | int | Sequence[str | int] | AbstractSet[str | int] | Callable[[LayerEntry], bool] | None
)


class ModelHistory(HistoryFields, ClassicAccess):
    """Every operation of a forward pass, in order. Index it by label, module, address or number.

    >>> history['conv2d_3_7'].tensor_contents
    >>> history['features.6'], history[7], history[-17]
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        log.history = weakref.ref(self)

    def _note_values_changed(self) -> None:
        self._log.note_values_changed()
        self.__dict__.pop("_lookup", None)
        self.__dict__.pop("_replayer", None)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelHistory, (self._log,)

    def __copy__(self) -> "ModelHistory":
        """Another history of the same tensors; saving or releasing values in one does not affect
        the other.
        """
        return ModelHistory(copy.copy(self._log))

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelHistory":
        return ModelHistory(copy.deepcopy(self._log, memo))

    # -- looking things up -------------------------------------------------------------------------

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

    @overload
    def __getitem__(self, key: int | str) -> LayerEntry: ...

    @overload
    def __getitem__(self, key: list[int | str] | list[str] | list[int]) -> list[LayerEntry]: ...

    def __getitem__(self, key: Any) -> LayerEntry | list[LayerEntry]:
        if isinstance(key, list):
            return self._entries(entry for one in key for entry in self._meant("the key", one))
        return LayerEntry(self._log, self._lookup.one(key))

    def _entries(self, numbers: Iterable[int]) -> list[LayerEntry]:
        """The entries with these numbers, as far as the history lists them."""
        return [LayerEntry(self._log, entry) for entry in numbers if self._lookup.lists(entry)]

    def _meant(self, name: str, layers: "Layers") -> list[int]:
        from torchlens._history.queries import meant

        return meant(self._log, self._lookup, name, layers)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, LayerEntry):
            return key._log is self._log and key._entry in self._log.visible
        try:
            self._lookup.one(key)  # type: ignore[arg-type]
        except (KeyError, IndexError, TypeError):
            return False
        return True

    def __str__(self) -> str:
        return self._text(is_whole=False)

    def to_text(self) -> str:
        """What `print(history)` shows, with every layer: of more than 10,000 layers, `print` shows
        the first and the last 500.
        """
        return self._text(is_whole=True)

    def _text(self, *, is_whole: bool) -> str:
        from torchlens._history.printing import history_text

        return without_collector(
            lambda: history_text(self._log, self.model_name, is_whole=is_whole)
        )

    def __repr__(self) -> str:
        return f"<ModelHistory of {self.model_name}: {len(self)} layers; print() it to see them>"

    def to_pandas(self) -> "pandas.DataFrame":
        """A table with one row per entry; docs/fields.md lists the columns."""
        from torchlens._history.tables import entries_to_pandas

        return entries_to_pandas(ManyEntries(self._log, self._log.visible))

    def summary(
        self,
        depth: int | None = None,
        sort_by: "Measure | None" = None,
        width: int | None = None,
        limit: int | None = None,
    ) -> "Summary":
        """Shapes, parameters, FLOPs, time and memory as a table that fits the terminal, with
        totals; print it.

        One line per layer, or, with `depth`, per module down to that depth (0 is the model alone).
        `sort_by` puts the largest first: 'flops', 'time', 'backward_time', 'total_time', 'memory',
        'params', 'calls'. `limit` shortens the list.

        >>> print(history.summary(sort_by='flops', limit=10))
        """
        from torchlens._history.summary import summarize

        return summarize(self, depth, sort_by, width, limit)

    def describe(self, lines: int = 40) -> str:
        """The model in at most one screen: inputs, outputs and the tree of its modules, with
        repeated blocks folded, their shapes, parameters and FLOPs.

        >>> print(history.describe())
        """
        from torchlens._export.description import describe

        return describe(self, lines)

    def to_markdown(self, lines: int = 40) -> str:
        """What `describe` says, as Markdown for an issue, a README or a language model."""
        from torchlens._export.description import to_markdown

        return to_markdown(self, lines)

    @property
    def output(self) -> Any:
        """What the model returned, itself: whatever object it is.

        None where it was not kept: if it would hold tensors that are not to be kept
        (`layers_to_save='none'`, `detach_saved_tensors=True`), in a copy or a file, and after
        `cleanup()`.
        """
        return self._log.recording.output

    @property
    def structure_hash(self) -> str:
        """32 digits that are the same for models that do the same: docs/structure.md says what
        counts.
        """
        from torchlens._history.structure_hash import structure_hash

        return structure_hash(self._log)

    @property
    def receipt(self) -> "Receipt":
        """What made this history: the model, its structure, digests of weights and inputs,
        versions.

        >>> print(history.receipt)
        """
        from torchlens._history.receipt import receipt_of

        return receipt_of(self._log)

    def print_all_fields(self) -> None:
        """Prints every field of the history with its value."""
        for name in sorted(name for name in dir(type(self)) if not name.startswith("_")):
            value = getattr(self, name)
            if not callable(value):
                print(f"{name}: {value}")  # noqa: T201 (printing is what it is for)

    # -- asking the graph --------------------------------------------------------------------------

    def find(
        self,
        type: "Kinds | None" = None,  # noqa: A002 (it filters `layer_type`)
        *,
        module: "Modules | None" = None,
        shape: "Shape | None" = None,
        param: str | Sequence[str] | None = None,
        where: Callable[[LayerEntry], Any] | None = None,
    ) -> list[LayerEntry]:
        """The entries for which all given conditions hold, in order.

        `*` in a name stands for any part of it, and a list means any of its elements.

        >>> history.find('conv*', shape=(None, 64, ...))
        >>> history.find('linear', module='h.*.mlp')
        >>> history.find(param='wte.weight')
        >>> history.find(where=lambda entry: entry.flops and entry.flops > 1e9)

        type: the type of layer ('conv2d'), or the function (`torch.relu`).
        module: a module in which the entry was computed, at any depth, or the class of one.
        shape: the sizes of the tensor; None is any size, `...` any number of sizes.
        param: the address of a parameter that the entry was computed with.
        where: a function of an entry.
        """
        from torchlens._history.queries import found

        return self._entries(found(self._log, type, module, shape, param, where))

    def between(self, a: "Layers", b: "Layers") -> list[LayerEntry]:
        """The entries on all paths from `a` to `b`, both included; empty if no path leads there.

        >>> history.between('layer1', 'layer2')
        """
        from torchlens._history.queries import between

        return self._entries(between(self._log, self._meant("a", a), self._meant("b", b)))

    def modules_between(self, a: "Layers", b: "Layers") -> list[str]:
        """The addresses of the modules that lie wholly between `a` and `b`, in the order in which
        they ran.
        """
        from torchlens._history.queries import between, modules_between

        entries = between(self._log, self._meant("a", a), self._meant("b", b))
        return modules_between(self._log, entries)

    def paths(self, a: "Layers", b: "Layers", limit: int = 1_000) -> list[list[LayerEntry]]:
        """Every path from `a` to `b`, as a list of entries, the shortest first.

        Raises ValueError if there are more than `limit`: with each residual connection, their
        number doubles.
        """
        from torchlens._history.queries import all_paths

        found = all_paths(self._log, self._meant("a", a), self._meant("b", b), limit)
        return [self._entries(path) for path in found]

    def longest_path(
        self, a: "Layers | None" = None, b: "Layers | None" = None
    ) -> list[LayerEntry]:
        """The path with the most entries from `a` to `b`; by default, from any input to any
        output.
        """
        from torchlens._history.queries import longest_path

        graph = self._log.graph
        starts = graph.inputs if a is None else self._meant("a", a)
        ends = graph.outputs if b is None else self._meant("b", b)
        return self._entries(longest_path(self._log, starts, ends))

    def residuals(self) -> "list[Residual]":
        """The residual connections: where the input of a block is added to its output.

        >>> [(each.start, each.end) for each in history.residuals()]
        """
        from torchlens._history.residuals import residuals

        return residuals(self._log)

    def sites(self, kind: "SiteKind | None" = None, within: str = "*") -> "list[Site]":
        """The places that can be read and edited, for `rerun`, `replay`, `sweep` and
        `torchlens.edit`.

        >>> history.sites('head', within='h.3.*')

        kind: 'module' (what modules return), 'residual' (the stream around the blocks), 'head',
            'q', 'k', 'v' (of attentions), 'operation', 'neuron' (of activations), 'channel' (of
            convolutions). None is all but the last three.
        within: a module in which they are, with `*` for any part of the name.
        """
        from torchlens._history.sites import Sites

        return Sites(self._log, self._lookup).listed(kind, within)

    def passes(self, key: int | str) -> torch.Tensor:
        """The saved values of all passes of a layer or of all calls of a module, stacked along a
        new first dimension.

        >>> history.passes('cell').shape
        torch.Size([10, 2, 64])
        """
        from torchlens._history.queries import stacked_passes

        return stacked_passes(self._log, key, self._meant("key", key))

    def attention(self, key: int | str, head: int | None = None) -> "Attention":
        """The attention weights of a module or of an operation, also where a fused kernel computes
        them without returning them, with query, key and value.

        They are rebuilt from the logged arguments and checked against the logged result; raises
        ValueError if they do not give it.

        >>> history.attention('layers.3').weights
        >>> history.attention('layers.3', head=3).plot('head.png')
        """
        from torchlens._attention.choice import chosen_attention

        return chosen_attention(self._log, self._lookup, key, head)

    def receptive_field(
        self, key: int | str, unit: "Unit | None" = None, of: "Layers | None" = None
    ) -> "Field":
        """Which elements of the inputs, or of other layers, a unit of a layer can depend on.

        >>> field = history.receptive_field('layer2.0', unit=(0, 3, 14, 14))
        >>> field.mask, field.size, field.centre, field.gradient

        It follows the operations back from the unit, whatever the values were; `field.gradient` is
        the derivative, checked to be zero outside.

        unit: an index of the layer's tensor; by default, the element in the middle.
        of: the layers in which the field is; by default, the inputs.
        """
        from torchlens._receptive.fields import receptive_field

        sources = self._log.graph.inputs if of is None else self._meant("of", of)
        return receptive_field(self._log, self._lookup.one(key), unit, sources)

    def projective_field(
        self, key: int | str, unit: "Unit | None" = None, of: "Layers | None" = None
    ) -> "Field":
        """Which elements of the outputs, or of other layers, a unit of a layer can change.

        >>> history.projective_field('input.x', unit=(0, 0, 5, 5), of='layer2').size
        """
        from torchlens._receptive.fields import projective_field

        targets = self._log.graph.outputs if of is None else self._meant("of", of)
        return projective_field(self._log, self._lookup.one(key), unit, targets)

    def receptive_fields(self, of: int | str | None = None) -> "FieldTable":
        """The size, stride and centre of the receptive fields of all layers, as a table.

        >>> print(history.receptive_fields())
        >>> history.receptive_fields()['layer4.1.conv2'].size

        of: the input or layer in which the fields are; by default, the only input.
        """
        from torchlens._receptive.field_table import table_of

        source = None if of is None else self._lookup.one(of)
        return table_of(self._log, source)

    def subgraph(self, layers: "Layers") -> "ModelHistory":
        """A history of these layers alone, under the same labels: print it, draw it, explore it.

        >>> history.subgraph(history.find(module='h.3.attn')).render_graph()
        >>> history.subgraph(history.between('layer1', 'layer2'))
        """
        from torchlens._history.subgraph import restricted

        return ModelHistory(restricted(self._log, self._meant("layers", layers)))

    # -- doing it again ----------------------------------------------------------------------------

    def save_new_activations(
        self,
        model: Model,
        input_args: Any = None,
        input_kwargs: Mapping[str, Any] | None = None,
        layers_to_save: LayersToSave = "all",
        random_seed: int | None = None,
    ) -> None:
        """Runs a new input through the same graph and replaces the saved tensors with the new ones.

        Raises DifferentGraphError, and keeps the values saved before, if the model does different
        operations.
        """
        from torchlens._history.log_model import rerun, select_numbers

        numbers = select_numbers(self._log, self._lookup, layers_to_save)
        options = self._log.options
        self._log.take(
            rerun(self._log, options, model, input_args, input_kwargs, numbers, random_seed)
        )
        self._note_values_changed()

    def rerun(
        self,
        model: torch.nn.Module,
        input_args: Any = None,
        input_kwargs: Mapping[str, Any] | None = None,
        *,
        edits: Mapping[Any, Any],
        layers_to_save: LayersToSave = "all",
        save_gradients: bool = False,
        random_seed: int | None = None,
    ) -> "ModelHistory":
        """Runs the model again with edits on the way, and returns the new history.

        >>> new = history.rerun(model, x, edits={'relu_3_8': lambda t: t * 0})
        >>> new.edited_layers

        Sites are looked up in this history; the input may be another one. The edits are those of
        `torchlens.edit`, and the other options those of `log_forward_pass`.
        """
        from torchlens._edit.rerun import rerun
        from torchlens.api import log_forward_pass

        def log_again() -> ModelHistory:
            return log_forward_pass(
                model,
                input_args,
                input_kwargs,
                layers_to_save,
                save_gradients=save_gradients,
                random_seed=random_seed,
            )

        return rerun(self, model, edits, log_again)

    def replay(
        self,
        edits: Mapping[Any, Any],
        outputs: Any = None,
        hold: Any = (),
        grad: bool = False,
    ) -> "Replayed":
        """What the model would return with edits, from the recorded calls behind them: no model
        and no input are needed, and only what depends on the edits runs again.

        >>> out = history.replay({'h.4.attn': 0.0})
        >>> out['output_1'], out.certificate

        The result equals that of `rerun` bit for bit, or NotReplayableError says why it would not:
        docs/interventions.md.

        edits: as for `rerun`.
        outputs: keys or sites to return; by default, the outputs of the model.
        hold: keys or sites that keep their recorded values (for path patching).
        grad: keep the autograd graph from the edits and the parameters to the outputs.
        """
        return self._replayer.replay(edits, outputs, hold, grad=grad)

    def sweep(
        self,
        sites: Iterable[Any],
        edit: Any,
        metric: Callable[[Any], Any] | None = None,
        *,
        outputs: Any = None,
        hold: Any = (),
        batched: bool | int = False,
    ) -> "Sweep":
        """Replays an edit at each of many sites, and measures what follows: a table with the
        certificate and the cost of each.

        >>> grid = history.sweep(history.sites('head'), 0.0, lambda logits: logits[0, -1, 42])
        >>> grid.to_pandas()

        sites: keys, entries or sites.
        edit: as for `rerun`; another history stands for its values at the same sites; a list is
            several edits, each tried at every site.
        metric: a function of the output (of the list of outputs, if `outputs` names several) that
            returns a number, or a dict of them. By default, the relative distance of the output
            from the recorded one.
        outputs, hold: as for `replay`.
        batched: several edits of one entry in one run, stacked along a new dimension; a number is
            how many at most. Some rows are checked against single runs, and the certificates say
            how far batching alone moved them.
        """
        from torchlens._edit.sweep import sweep

        return sweep(self._replayer, sites, edit, metric, outputs, hold, batched)

    @cached_property
    def _replayer(self) -> "Replayer":
        from torchlens._edit.replayer import Replayer

        return Replayer(self._log, self._lookup)

    @property
    def edited_layers(self) -> list[str]:
        """Labels of the entries whose value an edit changed."""
        entry_of = self._log.graph.entry_of
        return self._log.labels(sorted(entry_of[n] for n in self._log.recording.edited))

    def cleanup(self) -> None:
        """Releases all saved tensors, gradients and arguments, even of entries that something still
        holds.
        """
        self._log.free_values()
        self._note_values_changed()

    def clear_params(self) -> None:
        """Releases the values of the model's parameters; their shapes, sizes and addresses stay.

        A history refers to the parameters, so a pickle includes them unless you call this first.
        """
        self._log.settle_origin()
        recording = self._log.recording
        recording.params = [
            torch.nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            for param in recording.params
        ]

    # -- backward passes ---------------------------------------------------------------------------

    def log_backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Runs `loss.backward(...)` and records it: gradients, times and order.

        Works without `save_gradients=True` if the tensors that the loss was computed from are
        saved.

        >>> loss = history['output_1'].tensor_contents.square().mean()
        >>> history.log_backward(loss)
        >>> history['conv2d_1'].grad_contents
        """
        from torchlens._history.log_backward import log_backward

        has_transform = self._log.options.transform is not None
        log_backward(self._log, loss, gradient, retain_graph, create_graph, inputs, has_transform)

    def clear_gradients(self) -> None:
        """Forgets the gradients and times of all backward passes, so that the next one starts from
        zero.
        """
        self._log.recording.gradients.clear()

    @property
    def backward_passes(self) -> list[BackwardPass]:
        """A record of each backward pass through this log: `number`, `seconds`, `num_nodes`,
        `layer_seconds`, `layer_order`, `nodes_outside`, `seconds_outside`.
        """
        return backward_passes(self._log)

    @property
    def param_grads(self) -> dict[str, torch.Tensor]:
        """Address of a parameter → the gradient that backward passes through this log sent to
        it.
        """
        addresses = self._log.recording.param_addresses
        found = parameter_gradients(self._log)
        return {
            address: found[number] for number, address in enumerate(addresses) if number in found
        }

    def first_nonfinite(self, include_constants: bool = False) -> "NonFinite | None":
        """The first operation that made NaN or Inf, in the forward pass or else in a recorded
        backward pass.

        None if everything is finite. Intended infinity (`masked_fill(mask, -inf)`, a mask passed as
        an input) is ignored unless `include_constants` is True.

        >>> print(history.first_nonfinite())
        """
        from torchlens._health.first_nonfinite import first_nonfinite

        with unseen(), NoTorchFunction():
            return first_nonfinite(self._log, include_constants)

    # -- drawing, exporting, saving ----------------------------------------------------------------

    def render_graph(
        self,
        vis_opt: "VisOpt" = "unrolled",
        *by_position: Any,
        **vis_options: "Unpack[DrawKeywords]",
    ) -> "Drawing | None":
        """Draws the graph; the drawing options are those of `log_forward_pass`.

        >>> history.render_graph(vis_opt='rolled', vis_outpath='model.svg')
        """
        from torchlens._draw.drawing import render_graph

        return render_graph(self, vis_opt, *by_position, **vis_options)

    def explore(
        self,
        path: str | os.PathLike[str] | None = "model.html",
        *,
        overlays: Mapping[str, Mapping[str, float]] | None = None,
        title: str | None = None,
    ) -> "Exploration":
        """Writes one HTML file in which you can explore the model; in a notebook it shows inline.

        >>> history.explore('model.html', overlays={'importance': {'conv2d_1_1': 0.7}})
        """
        from torchlens._page.page import explore

        return explore(self, path, overlays=overlays, title=title)

    @overload
    def to_json(self, path: None = None, indent: int | None = None) -> str: ...

    @overload
    def to_json(self, path: str | os.PathLike[str], indent: int | None = None) -> None: ...

    def to_json(
        self, path: str | os.PathLike[str] | None = None, indent: int | None = None
    ) -> str | None:
        """Returns the graph as JSON, or writes it to `path`."""
        from torchlens._export.json_graph import to_json

        return to_json(self, path, indent)

    def save(
        self,
        path: str | os.PathLike[str],
        params: bool = False,
        *,
        max_shard_bytes: int = 5_000_000_000,
    ) -> None:
        """Writes the history to a safetensors file, which `torchlens.load(path)` opens.

        With `params=True`, the file includes the values of the model's parameters. Beyond
        `max_shard_bytes`, the tensors are split among several files, with an index beside them.

        >>> history.save('trace.safetensors')
        """
        from torchlens._trace.save import save_history

        save_history(self._log, path, params, max_shard_bytes)

    @overload
    def to_model_explorer(self, path: None = None, indent: int | None = None) -> str: ...

    @overload
    def to_model_explorer(
        self, path: str | os.PathLike[str], indent: int | None = None
    ) -> None: ...

    def to_model_explorer(
        self, path: str | os.PathLike[str] | None = None, indent: int | None = None
    ) -> str | None:
        """Returns the graph as JSON for Model Explorer, or writes it to `path`."""
        from torchlens._export.model_explorer import to_model_explorer

        return to_model_explorer(self, path, indent)

    def to_mermaid(self, depth: int | None = None) -> str:
        """Returns the graph as a Mermaid flowchart.

        depth: modules at this depth are one node each; 0 is the model alone. By default, the
            deepest with at most 120 nodes.
        """
        from torchlens._export.mermaid import to_mermaid

        return to_mermaid(self, depth)

    def to_arrow(self) -> "pyarrow.Table":
        """Returns the table of `to_pandas` as an Arrow table; pyarrow must be installed."""
        from torchlens._export.arrow_table import to_arrow

        return to_arrow(self)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Writes the table of `to_pandas` to a Parquet file; pyarrow must be installed."""
        from torchlens._export.arrow_table import to_parquet

        to_parquet(self, path)

    def to_networkx(self) -> "networkx.MultiDiGraph":
        """Returns the graph as a networkx graph; networkx must be installed."""
        from torchlens._export.networkx_graph import to_networkx

        return to_networkx(self)

    def _repr_svg_(self) -> str | None:
        from torchlens._draw.drawing import notebook_svg

        return notebook_svg(self)
