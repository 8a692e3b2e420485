"""Loops in the outline are those of the program, whatever stands before, after and inside them."""

import random
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.sampling import first
from tests.work import lines_run
from torchlens._page.folding import fold
from torchlens._page.loop_tree import find_loops
from torchlens._page.outline import outline
from torchlens._page.parts import Outline, Part
from torchlens._recording.user_code import source_line

# A program is a list of statements: the number of a layer, or (times, program).


class Program(nn.Module):
    def __init__(self, statements, num_layers: int):
        super().__init__()
        self.statements = statements
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(num_layers))

    def forward(self, x):
        return self._run(self.statements, x)

    def _run(self, statements, x):
        for statement in statements:
            if isinstance(statement, int):
                x = self.layers[statement](x)
                if statement % 3:
                    x = x + statement if statement % 3 == 1 else x * statement
            else:
                for _ in range(statement[0]):
                    x = self._run(statement[1], x)
        return x


def _outlined(history) -> Outline:
    found = outline(history._log)
    fold(history._log, found)
    return found


def _all(part: Part) -> list[Part]:
    return [part, *(below for child in part.children for below in _all(child))]


def _chain(part: Part) -> list[Part]:
    return [part] if part.above is None else [*_chain(part.above), part]


def _number(tree: Part) -> dict[int, int]:
    return {id(part): number for number, part in enumerate(_all(tree))}


def check(history, found: Outline) -> None:
    """What must hold of every outline."""
    log = history._log
    unit_of: dict[int, Part] = {}
    for part in _all(found.root):
        for own in (*part.passes, part.buffers):
            for entry in own:
                assert entry not in unit_of
                unit_of[entry] = part
    assert sorted(unit_of) == list(range(len(history)))
    linked = {(id(link.source), id(link.target)) for link in found.links}
    for entry, parents in enumerate(log.graph.parents):
        for parent in parents:
            source, target = unit_of[parent], unit_of[entry]
            assert (id(source), id(target)) in linked or (
                source is target and entry in source.buffers + target.buffers
            )
    number = _number(found.root)
    for source, target, around in found.links:
        a, b = _chain(source), _chain(target)
        if around is not None:
            assert around.num_passes > 1
            assert around in a
            assert around in b
        else:
            assert source is not target
            assert number[id(source)] < number[id(target)]


def _said(statements) -> str:
    """A program as its outline should say it: a loop of one thing is that thing, several times."""
    words: list[str] = []
    for statement in statements:
        if isinstance(statement, int):
            words.append(f"{statement}")
            if statement % 3:
                words.append("add" if statement % 3 == 1 else "mul")
        else:
            _times, inner = statement
            body = _said(inner)
            if " " not in body or (body.startswith("(") and _closes(body)):
                words.append(body)
            else:
                words.append(f"({body})")
    return " ".join(words)


def _closes(body: str) -> bool:
    depth = 0
    for at, char in enumerate(body):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if not depth:
            return at == len(body) - 1
    return False


def _shown(part: Part, history) -> str:
    words = []
    for child in part.children:
        if child.kind == "operation":
            entry = child.passes[0][0]
            if history[entry].is_input_layer or history[entry].is_output_layer:
                continue
            words.append(child.address.removeprefix("layers.") or history[entry].layer_type)
        else:
            words.append(
                f"({_shown(child, history)})" if child.kind == "loop" else _shown(child, history)
            )
    return " ".join(words)


def _random_program(chance: random.Random, layers: list[int], depth: int = 0):
    statements: list[Any] = []
    for _ in range(chance.randint(1, 4)):
        if depth < 3 and chance.random() < 0.45:
            inner = _random_program(chance, layers, depth + 1)
            statements.append((chance.randint(2, 4), inner))
        else:
            statements.append(layers.pop(0))
    return statements


@pytest.mark.parametrize("seed", first(4, range(40)))
def test_nested_and_successive_loops_are_the_true_ones(seed):
    chance = random.Random(seed)
    for _ in range(5):
        statements = _random_program(chance, list(range(400)))
        history = tl.get_model_metadata(Program(statements, 400), torch.ones(1, 3))
        found = _outlined(history)
        check(history, found)
        if len(history) < 100:  # else folded further
            assert _shown(found.root, history) == _said(statements), statements


@pytest.mark.parametrize("seed", first(4, range(40)))
def test_overlapping_loops_have_every_entry_and_every_edge_once(seed):
    chance = random.Random(1000 + seed)
    for _ in range(5):
        statements = _random_program(chance, [chance.randrange(5) for _ in range(400)])
        history = tl.get_model_metadata(Program(statements, 5), torch.ones(1, 3))
        check(history, _outlined(history))


def test_two_loops_of_equal_length_after_each_other_are_two():
    statements = [(3, [1, 2]), (3, [4, 5])]
    history = tl.get_model_metadata(Program(statements, 6), torch.ones(1, 3))
    loops = [part for part in _outlined(history).root.children if part.kind == "loop"]
    assert [loop.num_passes for loop in loops] == [3, 3]
    assert [[part.address for part in loop.children if part.address] for loop in loops] == [
        ["layers.1", "layers.2"],
        ["layers.4", "layers.5"],
    ]


def test_loops_that_share_a_layer_are_two():
    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            for _ in range(3):
                x = self.b(self.a(x) + 1)
            for _ in range(2):
                x = self.c(self.b(x) * 2)
            return x

    history = tl.get_model_metadata(Sharing(), torch.ones(1, 3))
    found = _outlined(history)
    check(history, found)
    loops = [part for part in found.root.children if part.kind == "loop"]
    assert [loop.num_passes for loop in loops] == [3, 2]


class Sampler(nn.Module):
    """A loop in which nearly all steps are the same: the last one adds no noise."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 3)

    def forward(self, x):
        for step in range(8):
            x = x - self.net(x) * (0.1 * step)
            if step < 7:
                x = x + torch.randn_like(x)
        return x


def test_a_loop_whose_last_iteration_is_shorter_is_one_loop():
    found = _outlined(tl.get_model_metadata(Sampler(), torch.ones(1, 3)))
    loops = [part for part in _all(found.root) if part.kind == "loop"]
    assert [loop.num_passes for loop in loops] == [8]


def test_a_layer_used_at_two_places_is_no_loop():
    history = tl.get_model_metadata(Program([1, 2, 4, 5, 1, 2], 6), torch.ones(1, 3))
    found = _outlined(history)
    check(history, found)
    assert "loop" not in {part.kind for part in _all(found.root)}
    assert all(link.around is None for link in found.links)


class Steps(nn.Module):
    """A cell over fifty steps; `read` and `write` say how."""

    def __init__(self, read, write):
        super().__init__()
        self.cell, self.read, self.write = nn.LSTMCell(4, 4), read, write

    def forward(self, x):
        h = c = torch.zeros(2, 4)
        results = []
        for step in self.read(x):
            h, c = self.cell(step, (h, c))
            results.append(h)
        return self.write(results)


READS = {
    "getitem": lambda x: (x[:, t] for t in range(50)),
    "select": lambda x: (x.select(1, t) for t in range(50)),
    "unbind": lambda x: x.unbind(1),
    "split": lambda x: [part[:, 0] for part in x.split(1, dim=1)],
    "chunk": lambda x: (part.squeeze(1) for part in x.chunk(50, dim=1)),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", [torch.stack, torch.cat])
def test_a_cell_over_fifty_steps_is_one_cell_one_slice_one_loop_edge(read, write):
    history = tl.get_model_metadata(Steps(READS[read], write), torch.rand(2, 50, 4))
    found = _outlined(history)
    check(history, found)
    (cell,) = [part for part in _all(found.root) if part.address == "cell"]
    assert cell.num_passes == 50
    assert len(_all(found.root)) <= 9
    assert [link.around for link in found.links if link.around is not None] == [cell]


def test_branches_that_read_nothing_of_each_other_are_no_loop():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return torch.stack([self.b(torch.relu(self.a(x * number))) for number in (1, 2, 3)])

    history = tl.get_model_metadata(Shared(), torch.ones(1, 3))
    found = _outlined(history)
    check(history, found)
    assert "loop" not in {part.kind for part in _all(found.root)}
    assert all(link.around is None for link in found.links)


def test_a_loop_that_does_something_else_each_time_is_not_taken_to_pieces():
    def work(length):
        chance = random.Random(0)
        places = [chance.randrange(5) for _ in range(length)]
        return lines_run(lambda: find_loops([places], range(5)))

    chance = random.Random(0)
    assert (
        len(find_loops([[chance.randrange(5) for _ in range(1000)]], range(5)).loop_of_unit) < 200
    )
    assert work(1000) < 3 * work(500)


class Written(nn.Module):
    """Loops of operations that have no parameters to tell them apart, and that stand at other
    places, too.
    """

    def forward(self, x):
        x = torch.sigmoid(x)
        for _ in range(4):
            for _ in range(2):
                x = torch.cos(x)
                x = torch.sigmoid(x)
            x = x * 5
        return torch.exp(x)


def test_the_same_operation_before_a_loop_is_not_in_it():
    history = tl.get_model_metadata(Written(), torch.ones(1, 3))
    found = _outlined(history)
    check(history, found)
    assert _shown(found.root, history) == "sigmoid ((cos sigmoid) mul) exp"
    assert [part.num_passes for part in _all(found.root) if part.kind == "loop"] == [4, 8]


_OPERATIONS = ("tanh", "sin", "relu", "sigmoid", "cos", "exp2")


def _random_source(
    chance: random.Random, loops: tuple[int, ...], lines: dict[int, tuple[str, tuple[int, ...]]]
) -> None:
    """Lines of a program, by number: what it says there and the loops around it. No operation
    follows itself.
    """
    before = ""
    for _ in range(chance.randint(2, 4)):
        indent = "    " * (len(loops) + 1)
        if len(loops) < 3 and chance.random() < 0.35:
            loop = len(lines) + 2
            lines[loop] = f"{indent}for _ in range({chance.randint(2, 4)}):", loops
            _random_source(chance, (*loops, loop), lines)
            before = lines[max(lines)][0].strip()
        else:
            first = next(
                (text.strip() for text, around in lines.values() if loops and around == loops), ""
            )
            before = chance.choice(
                [
                    text
                    for name in _OPERATIONS
                    if (text := f"x = torch.{name}(x)") not in (before, first)
                ]
            )
            lines[len(lines) + 2] = indent + before, loops


def _run_source(lines: dict[int, tuple[str, tuple[int, ...]]]) -> tuple[Any, dict[int, int]]:
    """The log of a program, and the line of each operation."""
    source = "\n".join(
        ["def forward(self, x):", *(text for text, _ in lines.values()), "    return x"]
    )
    space: dict[str, Any] = {"torch": torch}
    exec(compile(source, "<program>", "exec"), space)
    history = tl.get_model_metadata(
        type("Program", (nn.Module,), {"forward": space["forward"]})(), torch.ones(1, 3)
    )
    rows = [history._log.row(entry) for entry in range(1, len(history) - 1)]
    places = {entry: (row.code, row.instruction) for entry, row in enumerate(rows, start=1)}
    return history, {
        entry: source_line(code, at).line
        for entry, (code, at) in places.items()
        if code is not None
    }


# The last three have loops that look longer, or begin elsewhere, the first time or the last time
# that they run.
@pytest.mark.parametrize("seed", first(5, [126, 150, 238, *range(60)]))
def test_loops_of_operations_without_parameters_are_those_of_the_program(seed):
    lines: dict[int, tuple[str, tuple[int, ...]]] = {}
    _random_source(random.Random(seed), (), lines)
    history, line_of = _run_source(lines)
    found = outline(history._log)
    check(history, found)
    units = [
        {line_of[own[0]] for own in part.passes if own[0] in line_of} for part in _all(found.root)
    ]
    written = [number for number, (text, _) in lines.items() if "for" not in text]
    if sum(map(bool, units)) < len(
        written
    ):  # a shorter program does the same: `f(x)` before `for ...: x = f(x)`
        return
    assert sorted(line for own in units for line in own) == written, lines
    loops = [
        frozenset(line_of[own[0]] for inner in _all(part) for own in inner.passes)
        for part in _all(found.root)
        if part.kind == "loop"
    ]
    inside = [
        frozenset(line for line in written if number in lines[line][1])
        for number in lines
        if number not in written
    ]
    assert sorted(map(sorted, loops)) == sorted(
        map(sorted, {own for own in inside if len(own) > 1})
    ), lines


def test_hardly_any_random_program_is_shown_as_a_shorter_one():
    num_shorter = 0
    for seed in range(60):
        lines: dict[int, tuple[str, tuple[int, ...]]] = {}
        _random_source(random.Random(seed), (), lines)
        history, line_of = _run_source(lines)
        operations = [
            part
            for part in _all(outline(history._log).root)
            if part.passes and part.passes[0][0] in line_of
        ]
        num_shorter += len(operations) < sum("for" not in text for text, _ in lines.values())
    assert num_shorter <= 1


def test_a_tensor_made_before_a_loop_by_what_the_loop_does_too_is_not_made_in_it():
    class Outside(nn.Module):
        def forward(self, x):
            x = kept = torch.sin(x)
            for _ in range(4):
                x = torch.sin(torch.relu(x) + kept)
            return x

    history = tl.get_model_metadata(Outside(), torch.ones(1, 3))
    assert [history[label].layer_passes_total for label in ("relu_1:1", "add_1:1")] == [4, 4]
    found = outline(history._log)
    check(history, found)
    assert _shown(found.root, history) == "sin (relu add sin)"
    assert [part.num_passes for part in _all(found.root) if part.kind == "loop"] == [4]
