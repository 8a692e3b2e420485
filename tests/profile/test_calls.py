"""What is measured of each module and each call, whatever its arguments look like."""

from statistics import median, quantiles

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP, Model
from torchlens._profile.records import Statistic


def train(model, *args, **kwargs):
    with tl.profile(model) as p:
        result = model(*args, **kwargs)
        tensors = [result] if isinstance(result, torch.Tensor) else list(_tensors(result))
        sum(t.sum() for t in tensors if t.requires_grad).backward()
    assert p.problems == []
    return p


def _tensors(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _tensors(item)


def test_a_call_has_shapes_bytes_times_and_flops():
    p = train(MLP(), torch.rand(2, 4))
    (call,) = p["fc1"].calls
    assert (call.module_type, call.step, call.pass_num, call.depth, call.parent) == (
        "Linear",
        1,
        1,
        1,
        0,
    )
    assert (call.input_shapes, call.output_shapes) == ([(2, 4)], [(2, 5)])
    assert (call.grad_in_shapes, call.grad_out_shapes) == (
        [],
        [(2, 5)],
    )  # the input requires no gradient
    assert (call.input_bytes, call.output_bytes) == ([32], [40])
    assert call.end_ns > call.start_ns
    assert call.backward_spans
    assert call.flops == 2 * 2 * 4 * 5
    assert call.flops_backward == 2 * 2 * 4 * 5  # of the weight alone
    (second,) = p["fc2"].calls
    assert (second.grad_in_shapes, second.grad_out_shapes) == ([(2, 5)], [(2, 3)])
    assert second.flops_backward == 2 * 2 * 2 * 5 * 3
    assert p.root.calls[0].flops == call.flops + second.flops


def test_shared_parameters_are_counted_once():
    shared = nn.Linear(3, 3)
    model = Model(lambda self, x: self.b(self.a(x)) @ self.tied, a=shared, b=nn.Sequential(shared))
    model.tied = shared.weight
    model.frozen = nn.Parameter(torch.zeros(7), requires_grad=False)
    p = train(model, torch.rand(2, 3))
    root = p.root
    assert (root.num_parameters, root.num_learnable, root.param_bytes) == (9 + 3 + 7, 12, 4 * 19)
    assert root.gradient_bytes == 4 * 12
    assert (root.own_num_parameters, root.own_num_learnable) == (9 + 7, 9)
    assert p["b"].num_parameters == 0  # the module inside stands where it is reached first
    assert p["b.0"] is p["a"]
    assert p["a"].aliases == ["b.0"]
    assert {record.address: record.aliases for record in p.parameters} == {
        "tied": ["a.weight", "b.0.weight"], "frozen": [], "a.bias": ["b.0.bias"],
    }  # fmt: skip
    assert {record.address: record.num_gradients for record in p.parameters} == {
        "tied": 1,
        "frozen": 0,
        "a.bias": 1,
    }


def test_a_module_called_several_times_has_as_many_calls():
    model = Model(lambda self, x: self.fc(self.fc(self.fc(x))), fc=nn.Linear(3, 3))
    p = train(model, torch.rand(2, 3))
    assert [(call.pass_num, call.step) for call in p["fc"].calls] == [(1, 1), (2, 1), (3, 1)]
    assert p["fc"].num_calls == 3
    assert p["fc"].statistic("flops").median == 3 * 2 * 2 * 3 * 3
    assert p["fc"].statistic("forward_seconds").median == pytest.approx(
        sum(call.forward_seconds for call in p["fc"].calls)
    )


def test_backward_spans_hold_those_of_the_children():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))
    p = train(model, torch.rand(4, 8))
    for call in p.calls:
        children = [c for c in p.calls if c.parent == call.index]
        if children:
            assert call.backward_seconds >= max(child.backward_seconds for child in children)
            assert (
                call.backward_seconds >= sum(child.backward_seconds for child in children) * 0.999
            )
        assert 0 <= call.backward_self_seconds <= call.backward_seconds
    assert p.steps[0].backward_seconds == pytest.approx(p.root.calls[0].backward_seconds)
    assert p.steps[0].num_backward_passes == 1


def test_in_place_layers_train_as_they_do_without_a_profile():
    def run(profiled):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Hardtanh(inplace=True)
        )
        x = torch.rand(3, 4)
        if profiled:
            train(model, x)
        else:
            model(x).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    for plain, profiled in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(plain, profiled, rtol=0, atol=0)


def test_outputs_may_be_dicts_tuples_objects_and_none():
    def forward(self, x):
        self.nothing(x)
        y, (h, c) = self.lstm(x)
        return {"all": y, "last": (h, [c]), "none": None, "more": self.pair(x)}

    nothing = Model(lambda self, x: None)
    pair = Model(lambda self, x: (x * 2, None, torch.arange(3)))
    p = train(
        Model(forward, nothing=nothing, pair=pair, lstm=nn.LSTM(3, 5)),
        torch.rand(2, 1, 3, requires_grad=True),
    )
    assert p["nothing"].calls[0].output_shapes == []
    assert p["lstm"].calls[0].output_shapes == [(2, 1, 5), (1, 1, 5), (1, 1, 5)]
    assert p["lstm"].calls[0].grad_out_shapes == [(2, 1, 5), (1, 1, 5), (1, 1, 5)]
    assert p["lstm"].calls[0].grad_in_shapes == [(2, 1, 3)]
    assert p["pair"].calls[0].output_shapes == [(2, 1, 3), (3,)]
    assert p["pair"].calls[0].grad_out_shapes == [(2, 1, 3)]
    assert len(p.root.calls[0].output_shapes) == 5


def test_arguments_may_be_by_keyword_only_nested_or_absent():
    class Keywords(nn.Module):
        def forward(self, *, first, rest=()):
            return first + sum(rest)

    class Nothing(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.ones(2))

        def forward(self):
            return self.value * 1

    model = Model(
        lambda self, x: self.inner(first=x, rest=[x, x]) + self.nothing(),
        inner=Keywords(),
        nothing=Nothing(),
    )
    p = train(model, x=torch.rand(3, 2))
    assert p.root.calls[0].input_shapes == [(3, 2)]
    assert p["inner"].calls[0].input_shapes == [(3, 2)] * 3
    assert p["nothing"].calls[0].input_shapes == []


def test_each_call_of_the_model_is_a_step_with_medians_over_them():
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.profile(model, warmup=1) as p:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.rand(2, 4)).sum().backward()
            optimizer.step()
    assert p.problems == []
    assert [(step.number, step.is_warmup, step.num_backward_passes) for step in p.steps] == [
        (1, True, 1), (2, False, 1), (3, False, 1), (4, False, 1),
    ]  # fmt: skip
    statistic = p["fc1"].statistic("backward_seconds")
    assert statistic.num == 1  # the others are for memory and FLOPs
    assert statistic.median == pytest.approx(p["fc1"].calls[2].backward_seconds)
    assert [call.flops for call in p["fc1"].calls] == [
        None,
        2 * 2 * 4 * 5,
        None,
        None,
    ]  # of the first that counts
    assert [step.has_flops for step in p.steps] == [False, True, False, False]
    assert {record.num_gradients for record in p.parameters} == {4}


def test_gradients_accumulated_over_steps_go_to_the_step_that_made_them():
    model = MLP()
    with tl.profile(model) as p:
        loss = model(torch.rand(2, 4)).sum() + model(torch.rand(3, 4)).sum()
        loss.backward()
        loss = model(torch.rand(2, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert [step.num_backward_passes for step in p.steps] == [1, 1, 2]
    assert all(call.backward_spans for call in p["fc1"].calls)
    assert [call.grad_out_shapes for call in p["fc2"].calls] == [[(2, 3)], [(3, 3)], [(2, 3)]]


def test_the_backward_time_of_a_module_without_nodes_is_zero():
    p = train(
        nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Dropout(0.0).eval(), nn.Linear(2, 2)),
        torch.rand(1, 2),
    )
    for address in ("1", "2"):
        call = p[address].calls[0]
        assert (call.backward_seconds, call.backward_self_seconds, call.saved_bytes) == (
            0.0,
            0.0,
            0,
        )
        assert call.grad_in_shapes == call.grad_out_shapes == [(1, 2)]


def test_without_gradients_there_is_no_backward():
    model = MLP()
    with tl.profile(model) as p, torch.no_grad():
        model(torch.rand(2, 4))
    call = p["fc1"].calls[0]
    assert (call.backward_seconds, call.backward_self_seconds, call.peak_bytes_backward) == (
        None,
        None,
        None,
    )
    assert (call.grad_in_shapes, call.grad_out_shapes, call.saved_bytes, call.flops_backward) == (
        [],
        [],
        0,
        0,
    )
    assert p.steps[0].backward_seconds is None


def test_parts_that_are_called_by_themselves_are_steps_too():
    model = nn.ModuleDict({"encoder": nn.Linear(4, 2), "decoder": nn.Linear(2, 4)})
    with tl.profile(model) as p:
        for _ in range(2):
            model["decoder"](model["encoder"](torch.rand(1, 4))).sum().backward()
    assert [(call.address, call.step, call.parent) for call in p.calls] == [
        ("encoder", 1, None), ("decoder", 1, None), ("encoder", 2, None), ("decoder", 2, None),
    ]  # fmt: skip


def test_modules_added_later_are_measured():
    model = nn.Sequential(nn.Linear(2, 2))
    with tl.profile(model) as p:
        model(torch.rand(1, 2))
        model.append(nn.Linear(2, 5))
        model(torch.rand(1, 2))
    assert [call.step for call in p["1"].calls] == [2]
    assert p.root.num_parameters == 6 + 15


def test_two_models_can_be_profiled_at_once():
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    with tl.profile(generator) as first, tl.profile(critic) as second:
        critic(generator(torch.rand(4, 2))).sum().backward()
    assert [call.module_type for call in first.calls] == ["Linear"]
    assert [call.input_shapes for call in second.calls] == [[(4, 3)]]
    assert first.calls[0].backward_spans
    assert second.calls[0].backward_spans


def test_steps_beyond_the_most_are_said_not_to_be_measured():
    model = MLP()
    with tl.profile(model, max_steps=2) as p:
        for _ in range(4):
            model(torch.rand(2, 4)).sum().backward()
    assert len(p.steps) == 2
    assert p.problems == ["Only the first 2 steps were measured (max_steps=)"]


def test_shapes_that_change_are_counted_each():
    model = MLP()
    with tl.profile(model) as p:
        for size in (2, 3, 2, 3):
            model(torch.rand(size, 4)).sum().backward()
    assert [call.flops for call in p["fc1"].calls] == [2 * 2 * 4 * 5, 2 * 3 * 4 * 5, None, None]
    assert p.problems == []


@pytest.mark.parametrize("kind", ["weight", "equation", "keyword"])
def test_flops_of_a_step_are_its_own_even_if_all_results_have_the_same_shapes(kind):
    kernels = {
        False: nn.Parameter(torch.rand(2, 2, 3, 3)),
        True: nn.Parameter(torch.rand(2, 2, 5, 5)),
    }
    odd = [False]

    def forward(self, x):
        if kind == "weight":
            return torch.conv2d(x, getattr(self, f"kernel_{odd[0]}"), padding=1 + odd[0])
        if kind == "keyword":
            return torch.nn.functional.conv2d(x, self.kernel_False, padding=1, groups=1)[
                :, : 1 + odd[0]
            ].sum(1)
        return torch.einsum("abij,abjk->abij" if odd[0] else "abij,abjk->abik", x, x)

    model = Model(forward, kernel_False=kernels[False], kernel_True=kernels[True])
    steps = (False, False, True, True, False, False, True, True)
    with tl.profile(model, level="operation") as p, torch.no_grad():
        for odd[0] in steps:
            model(torch.rand(1, 2, 8, 8))
    for step, odd[0] in zip(
        p.root.calls[:5:2], steps[:5:2], strict=True
    ):  # those between them are timed
        assert step.flops == tl.get_model_metadata(model, torch.rand(1, 2, 8, 8)).total_flops


@pytest.mark.parametrize("level", ["module", "operation"])
@pytest.mark.parametrize("kind", ["loop", "slice", "cache"])
def test_flops_of_a_step_are_counted_or_not_known_but_never_another_ones(kind, level):
    """The inputs look the same in each step, and so do the calls of modules; what is done does
    not.
    """
    number = [1]
    cache = []

    def forward(self, x):
        if kind == "loop":
            return [x := x @ self.w for _ in range(number[0])][-1]
        if kind == "slice":
            return x[: number[0]] @ self.w
        cache.append(x)
        return torch.cat(cache) @ self.w

    model = Model(forward, w=nn.Parameter(torch.rand(3, 3)))
    with tl.profile(model, level=level) as p, torch.no_grad():
        for number[0] in (1, 2, 3):
            model(torch.rand(3, 3))
    rows = {"loop": (3, 6, 9), "slice": (1, 2, 3), "cache": (3, 6, 9)}[kind]
    right = [2 * count * 3 * 3 for count in rows]
    found = [call.flops for call in p.root.calls]
    assert found == [right[0], None, right[2] if level == "operation" else None]


def test_median_and_spread_are_those_of_the_middle_half():
    assert Statistic.of([]) is None
    assert Statistic.of([3.0]) == (3.0, 0.0, 1, 3.0, 3.0)
    for values in ([1.0, 9.0], [4.0, 1.0, 9.0, 2.0, 7.0], [5.0, 1.0, 2.0, 8.0]):
        low, _, high = quantiles(values, n=4, method="inclusive")
        statistic = Statistic.of(values)
        assert statistic[:3] == (
            pytest.approx(median(values)),
            pytest.approx(high - low),
            len(values),
        )
        assert statistic.minimum == min(values)
        assert statistic.p95 == pytest.approx(quantiles(values, n=20, method="inclusive")[-1])


@pytest.mark.parametrize("level", ["module", "operation"])
def test_memory_kept_for_operations_before_the_model_is_not_the_models(level):
    other, model = (
        nn.Sequential(nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 4)),
        nn.Linear(4, 4, bias=False),
    )
    with tl.profile(model, level=level) as p:
        for _ in range(3):
            model(other(torch.rand(2, 100))).sum().backward()
    assert p.root.typical("saved_bytes") == 2 * 4 * 4


def test_of_a_model_that_calls_itself_the_outermost_call_tells():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4, bias=False)

        def forward(self, x, depth=4):
            return self(torch.tanh(self.fc(x)), depth - 1) if depth else x

    model = Recursive()
    with tl.profile(model) as p:
        model(torch.rand(2, 4)).sum().backward()
    assert p.root.num_calls == 5
    assert p.root.typical("flops") == p["fc"].typical("flops") == 4 * 2 * 2 * 4 * 4
    assert p.root.typical("saved_bytes") == p.root.calls[0].saved_bytes
    assert p.root.typical("forward_seconds") == pytest.approx(p.root.calls[0].forward_seconds)


def test_calls_are_those_of_a_typical_step():
    model = Model(lambda self, x, count: [self.fc(x) for _ in range(count)][-1], fc=nn.Linear(4, 4))
    with tl.profile(model) as p:
        for count in (4, 4, 4, 4, 1):
            model(torch.rand(2, 4), count)
    assert p["fc"].num_calls == 4


def test_a_part_that_is_trained_after_an_evaluation_is_a_step_of_training():
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
    with tl.profile(model) as p:
        for _ in range(3):
            model.eval()
            with torch.no_grad():
                model(torch.rand(10, 8))
            model.train()
            model[0](torch.rand(100, 8)).sum().backward()
    assert [step.phase for step in p.steps] == ["evaluation", "training"] * 3
