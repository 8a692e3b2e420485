"""Builds the scene of a history: its nodes, edges and boxes, in words and colours."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torchlens._draw.colors import (
    BUFFER_FILL,
    CONDITION_FILL,
    FAILURE_FILL,
    INPUT_FILL,
    OUTPUT_FILL,
    PARAMS_FILL,
    PLAIN_FILL,
    Shading,
    shade,
)
from torchlens._draw.draw_options import DrawOptions
from torchlens._draw.items import Choices, Grouping, Item, ItemKind
from torchlens._draw.links import DrawnLink, argument_text, closing_loops, find_links
from torchlens._draw.repeated_modules import find_repeats
from torchlens._draw.scene import Box, Edge, EdgeKind, Node, NodeShape, Scene
from torchlens._draw.simplify import group_within, thin_out
from torchlens._history.argument_words import argument_words
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import Failure, located
from torchlens._text.error_wording import got
from torchlens._text.numbers import bytes_text, shape_text


def build_scene(
    history: Any, options: DrawOptions, max_nodes: int | None = None, reason: str | None = None
) -> Scene:
    """Everything that is drawn of a history, in words and colours but without positions.

    `max_nodes` is below that of the options where a larger drawing would not do, for that `reason`.
    """
    log: Log = history._log
    choices = Choices(
        is_rolled=options.is_rolled,
        depth=options.vis_nesting_depth,
        shows_buffers=options.vis_buffer_layers,
        is_collapsed=_collapse_rule(history, options),
        folding=find_repeats(log, options.is_rolled) if options.vis_fold_repeats else None,
    )
    grouping, simplification = group_within(
        log, choices, max_nodes or options.vis_max_nodes, reason
    )
    shading = None if options.vis_color_by is None else shade(history, grouping, options)
    builder = _Builder(history, options, grouping)
    nodes = [builder.node(number, shading) for number in range(len(grouping.items))]
    edges = builder.edges()
    if log.recording.failure is not None:
        failure, failure_edges = builder.failure(len(nodes))
        nodes.append(failure)
        edges += failure_edges
    nodes, edges, note = thin_out(nodes, edges)
    return Scene(
        title=log.recording.model_name + (" (failed)" if log.recording.failure is not None else ""),
        lines=_caption(log),
        simplification=simplification,
        notes=() if note is None else (note,),
        direction=options.vis_direction,
        nodes=nodes,
        edges=edges,
        boxes=builder.boxes,
        legend=None if shading is None else shading.legend,
        attributes=_resolved(options.vis_graph_overrides, history),
    )


def _collapse_rule(history: Any, options: DrawOptions) -> Callable[[str], bool] | None:
    rule = options.vis_collapse
    if rule is None:
        return None

    @cache
    def is_collapsed(address: str) -> bool:
        return bool(rule(history, address))

    return is_collapsed


def _caption(log: Log) -> tuple[str, ...]:
    entries, params = range(len(log.graph.recorded)), log.recording.params
    param_bytes = sum(parameter.numel() * parameter.element_size() for parameter in params)
    return (
        f"{len(entries):,} tensors total ({bytes_text(sum(map(log.num_bytes, entries)))})",
        (
            f"{sum(parameter.numel() for parameter in params):,} params total "
            f"({bytes_text(param_bytes)})"
        ),
    )


def _resolved(overrides: Any, *about: Any) -> dict[str, Any]:
    """The attributes that the caller's overrides give for one thing; those that are None are left
    out.
    """
    if overrides is None:
        return {}
    wanted = overrides(*about) if callable(overrides) else overrides
    if wanted is None:
        return {}
    if not isinstance(wanted, Mapping):
        raise TypeError(
            "A function given as an override must return a dict of graphviz attributes, got "
            f"{got(wanted)}."
        )
    found = {name: value(*about) if callable(value) else value for name, value in wanted.items()}
    return {name: value for name, value in found.items() if value is not None}


class _Builder:
    """Makes the nodes, edges and boxes of one scene."""

    def __init__(self, history: Any, options: DrawOptions, grouping: Grouping) -> None:
        self.history = history
        self.log: Log = history._log
        self.options = options
        self.grouping = grouping
        self.is_rolled = grouping.choices.is_rolled
        self.boxes: list[Box] = []
        self.box_of: dict[Any, int] = {}
        self.nparams: dict[str, int] = {}

    # -- nodes
    # ----------------------------------------------------------------------------------------------

    def node(self, number: int, shading: Shading | None) -> Node:
        """The node of one item."""
        item = self.grouping.items[number]
        texts = {
            ItemKind.MODULE: self._module_text,
            ItemKind.RUN: self._run_text,
            ItemKind.BUNDLE: self._bundle_text,
            ItemKind.OPERATION: self._operation_text,
        }
        title, lines, shape = texts[item.kind](item)
        is_nested = item.kind in (ItemKind.MODULE, ItemKind.RUN)
        overrides = (
            self.options.vis_nested_node_overrides if is_nested else self.options.vis_node_overrides
        )
        fill, has_light_text = self._fill(item), False
        if shading is not None:
            fill, has_light_text, words = shading.of_item[number] or (PLAIN_FILL, False, "")
            lines = [*lines, words] if words else lines
        entry = self._result_of(item)
        about = None if overrides is None else LayerEntry(self.log, entry)
        return Node(
            name=title.replace("\n", " "),
            title=title,
            lines=tuple(lines),
            shape=shape,
            fill=fill,
            box=self._box(item.path),
            is_dashed=not any(self.log.graph.has_input_ancestor[entry] for entry in item.entries),
            has_light_text=has_light_text,
            attributes=_resolved(overrides, self.history, about),
        )

    def _result_of(self, item: Item) -> int:
        """The entry that stands for an item: a module's output, a layer's first pass."""
        if item.call is not None:
            return self.log.graph.first_exit.get(item.call, item.entries[-1])
        return item.entries[-1] if item.kind is ItemKind.RUN else item.entries[0]

    def _operation_text(self, item: Item) -> tuple[str, list[str], NodeShape]:
        log, entry = self.log, item.entries[0]
        lines = [
            self._tensor_text(entry),
            *self._arguments_lines(entry),
            *self._params_lines(entry),
        ]
        values = {log.graph.booleans[one] for one in item.entries if one in log.graph.booleans}
        if values:
            lines.append(f"is {' or '.join(map(str, sorted(values, reverse=True)))}")
        children = log.graph.module_tree.children
        exited = log.graph.modules_exited.get(entry, ())
        bottom = [call for call in exited if not children[log.recording.module_calls[call].address]]
        if bottom:
            lines.append(self._module_name(bottom[0]))
        elif entry in log.boundary_addresses:
            lines.append(f"@{log.boundary_addresses[entry][0]}")
        shape = NodeShape.MODULE_OUTPUT if bottom else NodeShape.OPERATION
        return self._operation_title(item), lines, shape

    def _operation_title(self, item: Item) -> str:
        log, entry = self.log, item.entries[0]
        title = log.label(entry)
        if self.is_rolled:
            title, last = log.label_no_pass(entry), log.label_no_pass(item.entries[-1])
            if last != title:  # layers that a loop makes with an index of its own in each step
                title += f" … {last}"
            if len(item.passes) > 1:
                title += f" (x{len(item.passes)})"
        copies = "" if item.call is None else self._copies(item.call)
        return f"{title} {copies}" if copies else title

    def _arguments_lines(self, entry: int) -> list[str]:
        """What the operation was given besides tensors, by name, if that is wanted."""
        if not self.options.vis_arguments or entry in self.log.boundary_addresses:
            return []
        return _wrapped(argument_words(self.log.recording, self.log.row(entry)))

    def _params_lines(self, entry: int) -> list[str]:
        recording, numbers = self.log.recording, self.log.graph.params[entry]
        words = [shape_text(recording.params[number].shape) for number in numbers]
        if self.options.vis_arguments:
            names = [recording.param_addresses[number].rpartition(".")[2] for number in numbers]
            words = [f"{name} {shape}" for name, shape in zip(names, words, strict=True)]
        return [f"params: {', '.join(words)}"] if words else []

    def _bundle_text(self, item: Item) -> tuple[str, list[str], NodeShape]:
        log, entries = self.log, item.entries
        shapes = list(dict.fromkeys(shape_text(log.row(entry).shape) for entry in entries))
        size = bytes_text(sum(map(log.num_bytes, entries)))
        address = ".".join(log.boundary_addresses[entries[0]][0].split(".")[:2])
        of_shapes = f" of {shapes[0]}" if len(shapes) == 1 else ""
        title = f"{log.label(entries[0])} … {log.label(entries[-1])}"
        return (
            title,
            [f"{len(entries)} tensors{of_shapes} ({size})", f"@{address}"],
            NodeShape.OPERATION,
        )

    def _fill(self, item: Item) -> str:
        graph = self.log.graph
        if item.kind in (ItemKind.MODULE, ItemKind.RUN):
            return PARAMS_FILL if any(graph.params[entry] for entry in item.entries) else PLAIN_FILL
        if any(entry in graph.booleans for entry in item.entries):
            return CONDITION_FILL
        plain = PARAMS_FILL if graph.params[item.entries[0]] else PLAIN_FILL
        fills = {INPUT: INPUT_FILL, OUTPUT: OUTPUT_FILL, BUFFER: BUFFER_FILL}
        return fills.get(self.log.row(item.entries[0]).operation, plain)

    def _module_text(self, item: Item) -> tuple[str, list[str], NodeShape]:
        assert item.call is not None
        log = self.log
        address = log.recording.module_calls[item.call].address
        if not self.nparams:
            self.nparams = self.history.module_nparams
        title = self._module_name(item.call)
        if self.is_rolled and len(item.passes) > 1:
            title += f" (x{len(item.passes)})"
        if copies := self._copies(item.call):
            title += f" {copies}"
        layers = (
            {log.graph.layer_of[entry] for entry in item.entries}
            if self.is_rolled
            else item.entries
        )
        lines = [log.recording.module_classes[address]]
        if item.call in log.graph.first_exit:
            lines.append(self._tensor_text(log.graph.first_exit[item.call]))
        lines.append(f"{len(layers):,} {'layer' if len(layers) == 1 else 'layers'}")
        lines.append(f"{self.nparams[address]:,} params" if self.nparams[address] else "no params")
        return title, lines, NodeShape.COLLAPSED

    def _run_text(self, item: Item) -> tuple[str, list[str], NodeShape]:
        first, last = item.entries[0], item.entries[-1]
        title = (
            self.log.label(first)
            if first == last
            else f"{self.log.label(first)} … {self.log.label(last)}"
        )
        return (
            title,
            [self._tensor_text(last), f"{len(item.entries):,} operations"],
            NodeShape.COLLAPSED,
        )

    def _tensor_text(self, entry: int) -> str:
        return f"{shape_text(self.log.row(entry).shape)} ({bytes_text(self.log.num_bytes(entry))})"

    def _module_name(self, call: int) -> str:
        """`@features.0`; with the pass where there are several and each has its own node."""
        address = self.log.recording.module_calls[call].address
        if self.is_rolled or self.log.graph.module_tree.num_passes[address] == 1:
            return f"@{address}"
        return f"@{self.log.module_pass(call)}"

    def _copies(self, call: int) -> str:
        """`× 12` where the call is drawn for twelve."""
        folding = self.grouping.choices.folding
        number = None if folding is None else folding.fold_of_call.get(call)
        if folding is None or number is None:
            return ""
        fold = folding.folds[number]
        return f"× {len(fold.calls)}" if fold.is_chain else f"× {len(fold.calls)} side by side"

    # -- boxes
    # ----------------------------------------------------------------------------------------------

    def _box(self, path: tuple[int, ...]) -> int:
        """The number of the innermost box of a path; makes it, and those around it, if they are
        new.
        """
        calls, parent = self.log.recording.module_calls, -1
        for depth, call in enumerate(path):
            key: Any = (
                tuple(calls[above].address for above in path[: depth + 1])
                if self.is_rolled
                else call
            )
            if key not in self.box_of:
                self.box_of[key] = len(self.boxes)
                self.boxes.append(self._new_box(call, parent, depth))
            parent = self.box_of[key]
        return parent

    def _new_box(self, call: int, parent: int, depth: int) -> Box:
        log = self.log
        address = log.recording.module_calls[call].address
        title = self._module_name(call)
        num_passes = log.graph.module_tree.num_passes[address]
        if self.is_rolled and num_passes > 1:
            title += f" (x{num_passes})"
        copies = self._copies(call)
        if copies:
            folding = self.grouping.choices.folding
            assert folding is not None
            last = folding.folds[folding.fold_of_call[call]].calls[-1]
            title = f"{title} … {self._module_name(last)} {copies}"
        attributes = _resolved(self.options.vis_module_overrides, self.history, address)
        kind = log.recording.module_classes[address]
        return Box(title, f"({kind})", parent, depth, is_stack=bool(copies), attributes=attributes)

    # -- edges
    # ----------------------------------------------------------------------------------------------

    def edges(self) -> list[Edge]:
        """Forward edges, then those of gradients."""
        links = find_links(self.log, self.grouping)
        loops = closing_loops(links)
        forward, backward = [], []
        for ends, link in links.items():
            is_loop = ends in loops
            attributes = self._about(self.options.vis_edge_overrides, link)
            forward.append(
                Edge(*ends, link.lines(self.grouping, *ends), EdgeKind.FORWARD, is_loop, attributes)
            )
            if link.has_gradient:
                attributes = self._about(self.options.vis_gradient_edge_overrides, link)
                backward.append(Edge(*ends, (), EdgeKind.GRADIENT, is_loop, attributes))
        return forward + backward

    def _about(self, overrides: Any, link: DrawnLink) -> dict[str, Any]:
        if overrides is None:
            return {}
        return _resolved(
            overrides,
            self.history,
            LayerEntry(self.log, link.parent),
            LayerEntry(self.log, link.child),
        )

    # -- the failure
    # ----------------------------------------------------------------------------------------------

    def failure(self, number: int) -> tuple[Node, list[Edge]]:
        """The node of the operation that raised, and the edges into it."""
        failure = self.log.recording.failure
        assert failure is not None
        chain = self.log.graph.module_chains[failure.module_call]
        name = "raised here" if failure.operation is None else failure.operation.layer_type
        lines = [
            *_wrapped(f"given ({failure.arguments})" if failure.arguments else ""),
            *_wrapped(failure.message),
        ]
        if chain:
            lines.append(self._module_name(chain[-1]))
        path = chain if failure.operation is None else chain[:-1]
        node = Node(
            name=f"failure: {name}",
            title=f"✗ {name}",
            lines=tuple(lines),
            shape=NodeShape.FAILURE,
            fill=FAILURE_FILL,
            box=self._failure_box(path, chain),
            has_light_text=True,
        )
        return node, self._failure_edges(failure, number)

    def _failure_edges(self, failure: Failure, number: int) -> list[Edge]:
        """Edges from what the failed operation was given; if the model itself raised, one from the
        last operation.
        """
        given: dict[int, list[str]] = {}
        for location, reference in located(failure.references):
            item = self._item_of(reference)
            if item is not None:
                given.setdefault(item, []).append(argument_text(location))
        if given:
            texts = [(", ".join(words),) if len(given) > 1 else () for words in given.values()]
            return [
                Edge(item, number, text, EdgeKind.FAILURE)
                for item, text in zip(given, texts, strict=True)
            ]
        drawn = [item for item in self.grouping.item_of if item >= 0]
        return [Edge(item, number, ("then",), EdgeKind.ORDER_OF_FAILURE) for item in drawn[-1:]]

    def _failure_box(self, path: tuple[int, ...], chain: tuple[int, ...]) -> int:
        """The innermost box around the failure; made if no other node is in it."""
        if self.grouping.choices.run_length > 1:
            return -1
        depth = self.grouping.choices.depth
        visible = chain if chain and not self.is_rolled and chain[-1] in self.box_of else path
        return self._box(visible[: max(depth - 1, 0)])

    def _item_of(self, reference: int) -> int | None:
        entry = self.log.graph.entry_of.get(reference) if reference >= 0 else None
        item = -1 if entry is None else self.grouping.item_of[entry]
        return item if item >= 0 else None


def _wrapped(text: str, width: int = 60) -> list[str]:
    """The first lines of a text, wrapped."""
    lines: list[str] = []
    for paragraph in text.strip().splitlines()[:2]:
        line = ""
        for word in paragraph.split():
            if line and len(line) + len(word) >= width:
                lines.append(line)
                line = ""
            line = f"{line} {word}" if line else word[: 2 * width]
        lines.append(line)
    lines = [line for line in lines if line]
    return lines if len(lines) <= 6 else [*lines[:6], "…"]
