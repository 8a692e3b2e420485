import torch
from torch import nn
from viewer_models import history_of
from work import lines_run

import torchlens as tl
from torchlens.viewer.data import page_data
from torchlens.viewer.folding import fold
from torchlens.viewer.outline import Outline, Part, outline


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
        found = [e for part in _all(_root(history)) for own in (*part.passes, part.buffers) for e in own]
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
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(2):
                x = self.a(x)
                for _ in range(3):
                    x = torch.relu(self.b(x))
            return x

    root = _root(tl.log_forward_pass(Twice(), torch.ones(1, 4)))
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
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(depth))

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    logs = [tl.log_forward_pass(Deep(depth), torch.ones(1, 4)) for depth in (50, 200)]
    few, many = (lines_run(lambda log=log: page_data(log, {}, None)) for log in logs)
    assert many < 5 * few


def test_many_numbered_outputs_fold():
    class Caches(nn.Module):
        def forward(self, x):
            return {"result": x + 1, "cache": [x * number for number in range(6)]}

    root = _root(tl.log_forward_pass(Caches(), torch.ones(2)))
    (repeat,) = [part for part in root.children if part.kind == "repeat"]
    assert repeat.num_passes == 6
    assert [part.kind for part in root.children].count("operation") == 9
