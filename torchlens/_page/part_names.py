"""The titles, types and kinds of the parts of an outline."""

from collections.abc import Sequence

import torch

from torchlens._history.log import Log
from torchlens._page.parts import Part, entries_in
from torchlens._recording.operation_kinds import ACTIVATIONS, DROPOUTS, NORMALISATIONS, SAME_NUMBERS

# The colours of title bars; the page's script uses the same order.
KINDS = (
    "input", "output", "module", "weights", "norm", "activation", "compute", "view", "source",
    "group", "failed",
)  # fmt: skip
PARTS = ("operation", "module", "loop", "repeat", "step", "span", "range", "constants")
# The kinds of operations that the page can dim or hide.
SIDES = ("", "buffer", "constant", "mask", "view")

_LIKE_ACTIVATIONS = ACTIVATIONS | DROPOUTS
_LIKE_VIEWS = SAME_NUMBERS | {"pixelshuffle", "to"}
_ROWS = ("repeat", "step", "span", "range", "constants")


class PartNames:
    """Titles, paths, types, kinds and sides of the parts of one log."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.num_entries = len(log.graph.recorded)
        self.inputs, self.outputs, self.buffers = map(
            set, (log.graph.inputs, log.graph.outputs, log.graph.buffers)
        )

    @property
    def _failed_name(self) -> str:
        """The operation that failed; `raise` if the model itself raised."""
        failure = self.log.recording.failure
        return failure.operation.name if failure and failure.operation else "raise"

    def title(self, part: Part) -> str:
        if part.kind == "operation":
            return self._operation_title(part)
        if part.kind == "module":
            return self._address(part) or self.log.recording.model_name
        if part.kind == "loop":
            return f"loop of {len(part.children)}"
        if part.kind == "constants":
            return self._made_by(part)
        return self._span_title(part) if part.kind == "span" else self._row_title(part)

    def _operation_title(self, part: Part) -> str:
        entry = part.passes[0][0]
        if entry >= self.num_entries:
            return part.address or self._failed_name
        if part.address:
            return self._address(part)
        if entry in self.log.boundary_addresses:
            return self.log.boundary_addresses[entry][0]
        return self.log.label_no_pass(entry) + self._some_passes(part)

    def _span_title(self, part: Part) -> str:
        """`linear, relu 3 … 40`: the types of the operations, and the first and last number."""
        graph = self.log.graph
        ends = [graph.layer_of[_end(part, which).passes[0][0]] for which in (0, -1)]
        first, last = (graph.layers[layer].total_num for layer in ends)
        return f"{self._what_it_does(part)} {first} … {last}"

    def _row_title(self, part: Part) -> str:
        """`h.0 … 11`: the first and the last of a row; of outputs of one name, that name."""
        first = _end(part, 0)
        head, tail = self.title(first), self.title(_end(part, -1))
        is_boundary = first.passes and first.passes[0][0] in self.inputs | self.outputs
        if is_boundary and self._is_one_output(part, head, tail):
            return ".".join(head.split(".")[:2])
        return head if head == tail else f"{head} … {_unshared(head, tail)}"

    def _is_one_output(self, part: Part, head: str, tail: str) -> bool:
        """True if outputs in a row have the same name, as those of a cache have."""
        is_outermost = part.above is not None and part.above.above is None
        return part.kind == "range" or (is_outermost and head.split(".")[:2] == tail.split(".")[:2])

    def _address(self, part: Part) -> str:
        calls = self.log.recording.module_calls
        total = self.log.graph.module_tree.num_passes.get(part.address, 1)
        if part.num_passes == total or not part.calls:
            return part.address
        return part.address + _numbers([calls[call].pass_num for call in part.calls])

    def _some_passes(self, part: Part) -> str:
        """`:2` if a layer has other passes too, which are shown elsewhere."""
        entry = part.passes[0][0]
        if (
            len({self.log.graph.layer_of[own[0]] for own in part.passes}) > 1
            or self.log.num_passes(entry) == part.num_passes
        ):
            return ""
        return _numbers([self.log.graph.pass_of[own[0]] for own in part.passes])

    def path(self, part: Part) -> str:
        """The address of a module, or of the module in which an operation ran."""
        if part.address or part.kind != "operation":
            return self._address(part)
        entry = part.passes[0][0]
        if entry in self.buffers:
            return self.log.boundary_addresses[entry][0]
        calls = self.log.recording.module_calls
        if entry < self.num_entries:
            return calls[self.log.row(entry).module_call].address
        failure = self.log.recording.failure
        return calls[failure.module_call].address if failure else ""

    def type(self, part: Part) -> str:
        classes = self.log.recording.module_classes
        if part.kind == "operation":
            if part.address:
                return classes.get(part.address, "")
            entry = part.passes[0][0]
            if entry >= self.num_entries:
                return self._failed_name
            return self.log.row(entry).operation.name
        if part.kind == "module":
            return classes.get(part.address, self.log.recording.model_name)
        if part.kind == "span":
            return f"{self.title(_end(part, 0))} … {self.title(_end(part, -1))}"
        return ("constants: " if part.kind == "constants" else "") + self._what_it_does(part)

    def _what_it_does(self, part: Part) -> str:
        """The types of the parts inside, the first three."""
        while part.children[0].kind in ("span", "range"):
            part = part.children[0]
        if part.kind == "repeat" and part.children[0].kind != "step":
            return self.type(part.children[0])
        types = [(child, self.type(child)) for child in part.children[:200]]
        is_plain = [child.kind == "operation" and not child.address for child, _ in types]
        found = list(
            dict.fromkeys(
                t.strip("_") if plain else t for (_, t), plain in zip(types, is_plain, strict=True)
            )
        )
        return ", ".join(found[:3]) + (" …" if len(found) > 3 else "")

    def _made_by(self, part: Part) -> str:
        """`causal_mask()`: the function that made constants, if one other than `forward` is
        known.
        """
        entries = sorted(entries_in(part), reverse=True)
        codes = (self.log.row(entry).code for entry in entries)
        names = (code.co_name for code in codes if code is not None)
        found = next((name for name in names if name.isidentifier() and name != "forward"), None)
        return "constants" if found is None else f"{found}()"

    def kind(self, part: Part) -> str:
        if part.kind == "module":
            return "module"
        if part.kind == "constants":
            return "source"
        return self._operation_kind(part) if part.kind == "operation" else "group"

    def _operation_kind(self, part: Part) -> str:
        entry = part.passes[0][0]
        if entry >= self.num_entries:
            return "failed"
        if entry in self.inputs:
            return "input"
        if entry in self.outputs:
            return "output"
        name = self.log.row(entry).operation.layer_type
        if name in NORMALISATIONS:
            return "norm"
        if self.log.graph.params[entry]:
            return "weights"
        if entry in self.buffers or not self._depends_on_input(part):
            return "source"
        if name in _LIKE_ACTIVATIONS:
            return "activation"
        return "view" if name in _LIKE_VIEWS else "compute"

    def side(self, part: Part) -> str:
        if part.kind != "operation" or part.passes[0][0] >= self.num_entries:
            return ""
        entry = part.passes[0][0]
        if entry in self.buffers:
            return "buffer"
        if entry in self.inputs or entry in self.outputs or self.log.graph.params[entry]:
            return ""
        if self.log.row(entry).dtype is torch.bool:
            return "mask"
        if not self._depends_on_input(part):
            return "constant"
        return "view" if self.log.row(entry).operation.layer_type in _LIKE_VIEWS else ""

    def _depends_on_input(self, part: Part) -> bool:
        return any(self.log.graph.has_input_ancestor[entry] for own in part.passes for entry in own)


def _end(part: Part, which: int) -> Part:
    """The first or the last part in a row, with which = 0 or -1."""
    while part.kind in _ROWS:
        part = part.children[which]
    return part


def _numbers(passes: Sequence[int]) -> str:
    return f":{passes[0]}" if len(passes) == 1 else f":{passes[0]} … {passes[-1]}"


def _unshared(first: str, second: str) -> str:
    """A name from where it differs from `first`: `11` after `model.h.0`, `7.conv` after
    `stages.6.conv`.
    """
    heads, tails = first.split("."), second.split(".")
    same = 0
    while same < min(len(heads), len(tails)) - 1 and heads[same] == tails[same]:
        same += 1
    return ".".join(tails[same:])
