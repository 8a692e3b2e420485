from functools import partial

import torch
from torch import nn

import torchlens as tl
from tests.networks import HandingOn
from tests.page.viewer_models import LoopInLoop, history_of
from tests.work import lines_run
from torchlens._page.folding import fold
from torchlens._page.outline import outline
from torchlens._page.page_data import page_data
from torchlens._page.parts import Outline, Part


def _outlined(history) -> Outline:
    found = outline(history._log)
    fold(history._log, found)
    return found


def _root(history) -> Part:
    return _outlined(history).root


def _all(part: Part) -> list[Part]:
    return [part, *(below for child in part.children for below in _all(child))]


def _kinds(part: Part) -> list[str]:
    return [child.kind for child in part.children]


def test_every_entry_is_in_the_outline_once():
    for name in ("resnet18", "gpt2", "recurrent", "plain_loop", "nested_loop"):
        history = history_of(name)
        found = [
            e for part in _all(_root(history)) for own in (*part.passes, part.buffers) for e in own
        ]
        assert sorted(found) == list(range(len(history)))


def test_no_box_holds_more_than_a_screen():
    for name in ("gpt2", "nested_loop"):
        assert max(len(part.children) for part in _all(_root(history_of(name)))) <= 120


def test_identical_siblings_fold_and_different_ones_do_not():
    transformer = _root(history_of("gpt2")).children[1]
    (repeat,) = [part for part in transformer.children if part.kind == "repeat"]
    assert repeat.num_passes == 12
    assert [part.address for part in repeat.children] == [f"transformer.h.{n}" for n in range(12)]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(5, 4))
    assert "repeat" not in _kinds(_root(tl.log_forward_pass(model, torch.ones(1, 4))))


def test_query_key_and_value_are_no_repeat():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return self.query(x) * self.key(x) + self.value(x)

    assert "repeat" not in _kinds(_root(tl.log_forward_pass(Heads(), torch.ones(1, 4))))


def test_passes_of_a_module_are_one_part_and_calls_at_different_places_are_not():
    root = _root(history_of("recurrent"))
    (cell,) = [part for part in root.children if part.address == "cell"]
    assert cell.num_passes == 12
    assert all(part.num_passes == 12 for part in cell.children)

    class Reused(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

        def forward(self, x):
            return self.act(self.b(self.act(self.a(x))))

    data = page_data(tl.log_forward_pass(Reused(), torch.ones(1, 4)), {}, None)
    assert {"act:1", "act:2"} <= {data["strings"][title] for title in data["parts"]["title"]}


def test_loop_inside_a_loop():
    root = _root(tl.log_forward_pass(LoopInLoop(), torch.ones(1, 4)))
    (outer,) = [part for part in root.children if part.kind == "loop"]
    assert outer.num_passes == 2
    assert _kinds(outer) == ["operation", "loop"]
    assert outer.children[1].num_passes == 6


def test_a_call_with_several_results_is_one_operation():
    class Splits(nn.Module):
        def forward(self, x):
            a, b = x.split(2, dim=1)
            return a * b

    root = _root(tl.log_forward_pass(Splits(), torch.ones(1, 4)))
    assert [[len(own) for own in part.passes] for part in root.children] == [[1], [2], [1], [1]]


def test_the_data_of_four_times_the_operations_are_four_times_the_work():
    class Deep(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(depth)
            )

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    logs = [tl.log_forward_pass(Deep(depth), torch.ones(1, 4)) for depth in (50, 200)]
    few, many = (lines_run(partial(page_data, log, {}, None)) for log in logs)
    assert many < 5 * few


def test_many_numbered_outputs_fold():
    class Caches(nn.Module):
        def forward(self, x):
            return {"result": x + 1, "cache": [x * number for number in range(6)]}

    root = _root(tl.log_forward_pass(Caches(), torch.ones(2)))
    (repeat,) = [part for part in root.children if part.kind == "repeat"]
    assert repeat.num_passes == 6
    assert [part.kind for part in root.children].count("operation") == 9


def test_branches_that_differ_in_an_argument_do_not_fold():
    class Pyramid(nn.Module):
        def __init__(self, dilations):
            super().__init__()
            self.branches = nn.ModuleList(
                nn.Conv2d(2, 2, 3, padding=n, dilation=n) for n in dilations
            )

        def forward(self, x):
            return torch.cat([branch(x) for branch in self.branches], dim=1)

    for dilations, kinds in (((1, 6, 12, 18), 0), ((6, 6, 6, 6), 1)):
        root = _root(tl.log_forward_pass(Pyramid(dilations), torch.ones(1, 2, 16, 16)))
        assert _kinds(root).count("repeat") == kinds


def test_numbers_with_equal_hashes_are_different_arguments():
    class Rolls(nn.Module):
        def forward(self, x):
            return torch.stack([layer(x) for layer in self.layers])

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Roll(-1 - number % 2) for number in range(4))

    class Roll(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def forward(self, x):
            return torch.roll(x, self.by)

    assert "repeat" not in _kinds(_root(tl.log_forward_pass(Rolls(), torch.ones(4))))


def test_the_steps_of_a_repeat_are_named_by_their_range():
    layers = [layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.1))]
    history = tl.log_forward_pass(nn.Sequential(*layers).eval(), torch.ones(1, 4))
    data = page_data(history, {}, None)
    titles = [data["strings"][title] for title in data["parts"]["title"]]
    assert titles[2] == "0 … 11"
    assert [title for title in titles if "…" in title] == [
        "0 … 11",
        "0 … 2",
        "3 … 5",
        "6 … 8",
        "9 … 11",
    ]


def test_a_box_of_fifty_operations_and_a_module_opens_as_them():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            for number in range(30):
                x = x * number + 1
            x = self.inner(x)
            return x.sin()

    root = _root(tl.log_forward_pass(Many(), torch.ones(1, 4)))
    assert set(_kinds(root)) == {"operation", "module"}
    assert len(root.children) == 64


def test_spans_hold_only_operations_and_are_named_by_what_they_do():
    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            for number in range(300):
                x = torch.sin(x + number)
                if number == 150:
                    x = self.inner(x)
            return x

    history = tl.log_forward_pass(Long(), torch.ones(1, 4))
    root = _root(history)
    spans = [part for part in _all(root) if part.kind == "span"]
    assert spans
    assert {below.kind for span in spans for below in _all(span)} <= {"operation", "span"}
    assert not any(below.address for span in spans for below in _all(span))
    assert "module" in _kinds(root)
    data = page_data(history, {}, None)
    assert any(
        data["strings"][title].startswith(("add, sin", "sin, add"))
        for title in data["parts"]["title"]
    )


def test_the_last_block_folds_though_nobody_reads_what_it_hands_on():
    root = _root(tl.get_model_metadata(HandingOn(), torch.ones(1, 4)))
    (repeat,) = [part for part in root.children if part.kind == "repeat"]
    assert [part.address for part in repeat.children] == [f"blocks.{number}" for number in range(5)]


class Masked(nn.Module):
    """What a mask is made from, before, between and after what reads the input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def mask(self, size):
        places = torch.arange(size)
        return torch.where(places[None, :] <= places[:, None], 0.0, -1.0)

    def forward(self, x):
        x = self.a(x)
        one = torch.arange(4) * 2
        mask = self.mask(4)
        x = self.b(x + one)
        return x + (mask * 3).sum(0)


def test_constants_that_hang_together_are_one_part_named_by_the_function_they_come_from():
    history = tl.get_model_metadata(Masked(), torch.ones(1, 4))
    found = _outlined(history)
    (constants,) = [part for part in found.root.children if part.kind == "constants"]
    types = [history[part.passes[0][0]].layer_type for part in constants.children]
    assert types == ["arange", "getitem", "getitem", "le", "where", "mul", "sum"]
    assert [part.kind for part in found.root.children].count(
        "operation"
    ) == 8  # `one` is too little to be put together
    number = {id(part): place for place, part in enumerate(_all(found.root))}
    assert all(number[id(link.source)] < number[id(link.target)] for link in found.links)
    data = page_data(history, {}, None)
    titles = [data["strings"][title] for title in data["parts"]["title"]]
    assert "mask()" in titles


def test_a_model_of_constants_alone_is_shown_as_it_is():
    class Table(nn.Module):
        def forward(self):
            return torch.sin(torch.arange(8) * 2 + 1).sum()

    assert "constants" not in _kinds(_root(tl.get_model_metadata(Table(), [])))
