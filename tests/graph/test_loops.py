"""Which operations are passes of one layer: every row of the table in PRODUCT, and more."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import Model, Recurrent, TinyBERT, TinyGPT, TinySwin, TinyViT
from tests.work import lines_run


def passes(*names: str, first: int = 1, last: int) -> list[str]:
    return [f"{name}:{number}" for number in range(first, last + 1) for name in names]


def operations(history: tl.ModelHistory) -> list[str]:
    return [
        entry.layer_label
        for entry in history
        if not (entry.is_input_layer or entry.is_output_layer)
    ]


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def twelve_times(self: Model, x: torch.Tensor) -> torch.Tensor:
    for _ in range(12):
        x = torch.sin(x + 1)
    return x


def interrupted(self: Model, x: torch.Tensor) -> torch.Tensor:
    x = torch.exp(torch.sin(x + 1))
    x = torch.tanh(torch.sin(x + 1))
    return torch.sin(x + 1)


def two_loops(self: Model, x: torch.Tensor) -> torch.Tensor:
    x = torch.sin(torch.sin(x + 1) + 1)
    x = torch.exp(x)
    return torch.sin(torch.sin(x + 1) + 1)


def one_relu_for_two(self: Model, x: torch.Tensor) -> torch.Tensor:
    return self.relu(self.b(self.relu(self.a(x))))


def layer_used_again(self: Model, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(self.mid(torch.relu(self.fc(x))))
    return torch.relu(self.fc(x))


def nested_loops(self: Model, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = self.a(x)
        for _ in range(3):
            x = torch.relu(self.b(x))
    return x


def loops_without_parameters(self: Model, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        for _ in range(4):
            x = x * 2
        for _ in range(2):
            x = torch.sin(x)
    return x


def in_turn(self: Model, x: torch.Tensor) -> torch.Tensor:
    for number in range(4):
        x = self.fc(x)
        x = torch.tanh(x) if number % 2 else torch.relu(x)
    return x


def varying(self: Model, x: torch.Tensor) -> torch.Tensor:
    for number in range(3):
        x = torch.sin(x + number)
    return x


def parallel(self: Model, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.relu(x + 1), torch.relu(x + 1)


def long_sum(self: Model, x: torch.Tensor) -> torch.Tensor:
    a, b, c = torch.sin(x), torch.cos(x), torch.exp(x)
    return a + b + c


def attention_then_mlp(self: Model, x: torch.Tensor) -> torch.Tensor:
    x = x + self.attention(x)
    return x + self.mlp(x)


NESTED = ["linear_1_1:1", *passes("linear_2_2", "relu_1_3", last=3)]
NESTED += ["linear_1_1:2", *passes("linear_2_2", "relu_1_3", first=4, last=6)]

WITHOUT_PARAMETERS = [
    f"{layer}:{4 * turn + number if layer == 'mul_1_1' else 2 * turn + number}"
    for turn in range(3)
    for layer, times in (("mul_1_1", 4), ("sin_1_2", 2))
    for number in range(1, times + 1)
]

ROWS: list[tuple[str, Callable[[], nn.Module], list[str]]] = [
    ("4 x (fc, +1, x2)", Recurrent, passes("linear_1_1", "add_1_2", "mul_1_3", last=4)),
    ("12 x (+1, sin)", lambda: Model(twelve_times), passes("add_1_1", "sin_1_2", last=12)),
    (
        "(+1, sin) exp (+1, sin) tanh (+1, sin)",
        lambda: Model(interrupted),
        ["add_1_1", "sin_1_2", "exp_1_3", "add_2_4", "sin_2_5", "tanh_1_6", "add_3_7", "sin_3_8"],
    ),
    (
        "2 x (+1, sin), exp, 2 x (+1, sin)",
        lambda: Model(two_loops),
        [*passes("add_1_1", "sin_1_2", last=2), "exp_1_3", *passes("add_2_4", "sin_2_5", last=2)],
    ),
    (
        "linear a, r, linear b, r",
        lambda: Model(one_relu_for_two, a=linear(), b=linear(), relu=nn.ReLU()),
        ["linear_1_1", "relu_1_2", "linear_2_3", "relu_2_4"],
    ),
    (
        "fc relu mid tanh fc relu",
        lambda: Model(layer_used_again, fc=linear(), mid=linear()),
        ["linear_1_1:1", "relu_1_2:1", "linear_2_3", "tanh_1_4", "linear_1_1:2", "relu_1_2:2"],
    ),
    ("2 x (a, 3 x (b, relu))", lambda: Model(nested_loops, a=linear(), b=linear()), NESTED),
    ("3 x (4 x (x2), 2 x sin)", lambda: Model(loops_without_parameters), WITHOUT_PARAMETERS),
    (
        "4 x (fc, relu or tanh in turn)",
        lambda: Model(in_turn, fc=linear()),
        ["linear_1_1:1", "relu_1_2:1", "linear_1_1:2", "tanh_1_3:1", "linear_1_1:3", "relu_1_2:2",
        "linear_1_1:4",
         "tanh_1_3:2"],
    ),
    ("sin(x+i), i varies", lambda: Model(varying), ["add_1_1", "sin_1_2", "add_2_3", "sin_2_4",
    "add_3_5", "sin_3_6"]),
    ("two parallel branches", lambda: Model(parallel), ["add_1_1", "relu_1_2", "add_2_3",
    "relu_2_4"]),
    ("a + b + c", lambda: Model(long_sum), ["sin_1_1", "cos_1_2", "exp_1_3", "add_1_4", "add_2_5"]),
    (
        "x + attention(x), then + mlp(x)",
        lambda: Model(attention_then_mlp, attention=linear(), mlp=linear()),
        ["linear_1_1", "add_1_2", "linear_2_3", "add_2_4"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_every_row_of_the_loop_table(make: Callable[[], nn.Module], expected: list[str]) -> None:
    assert operations(tl.log_forward_pass(make(), torch.randn(2, 4))) == expected


@pytest.mark.parametrize("saved", ["none", "linear"])
def test_layers_do_not_depend_on_what_is_saved(saved: str) -> None:
    history = tl.log_forward_pass(Recurrent(), torch.randn(2, 4), layers_to_save=saved)
    assert operations(history) == passes("linear_1_1", "add_1_2", "mul_1_3", last=4)


# -- recurrent -------------------------------------------------------------------------------------


def test_a_residual_step_repeated_is_one_layer_each() -> None:
    def forward(self: Model, h: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            h = h + self.fc(h)
        return h

    history = tl.log_forward_pass(Model(forward, fc=linear()), torch.randn(2, 4))
    assert operations(history) == passes("linear_1_1", "add_1_2", last=5)
    assert history.model_is_recurrent
    assert history.model_max_recurrent_loops == 5


def test_a_hand_written_rnn_over_time_is_one_layer_each() -> None:
    def forward(self: Model, xs: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(2, 4)
        for step in range(6):
            h = torch.tanh(self.inward(xs[step]) + self.onward(h))
        return h

    history = tl.log_forward_pass(
        Model(forward, inward=linear(), onward=linear()), torch.randn(6, 2, 4)
    )
    for name in ("linear_1", "linear_2", "add_1", "tanh_1"):
        assert history[f"{name}:6"].layer_passes_total == 6
    assert history.model_max_recurrent_loops == 6


@pytest.mark.parametrize("cell", [nn.RNNCell(4, 4), nn.GRUCell(4, 4)])
def test_a_cell_over_time_is_one_layer(cell: nn.Module) -> None:
    def forward(self: Model, xs: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(2, 4)
        for x in xs:
            h = self.cell(x, h)
        return h

    history = tl.log_forward_pass(Model(forward, cell=cell), torch.randn(5, 2, 4))
    assert [
        entry.pass_num for entry in history if "cell:" in " ".join(entry.module_passes_exited)
    ] == [1, 2, 3, 4, 5]
    assert (
        len({entry.layer_label_no_pass for entry in history if entry.modules_exited == ["cell"]})
        == 1
    )


def test_newtons_iteration_without_parameters_is_one_layer_each() -> None:
    def forward(self: Model, a: torch.Tensor) -> torch.Tensor:
        x = a
        for _ in range(7):
            x = (x + a / x) * 0.5
        return x

    history = tl.log_forward_pass(Model(forward), torch.rand(4) + 1)
    assert operations(history) == passes("truediv_1_1", "add_1_2", "mul_1_3", last=7)


def test_a_module_shared_by_two_branches_is_one_layer() -> None:
    def forward(self: Model, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(a)) - torch.relu(self.fc(b))

    history = tl.log_forward_pass(
        Model(forward, fc=linear()), [torch.randn(2, 4), torch.randn(2, 4)]
    )
    assert operations(history) == [
        "linear_1_1:1",
        "relu_1_2:1",
        "linear_1_1:2",
        "relu_1_2:2",
        "sub_1_3",
    ]


def test_what_is_added_to_a_shared_layer_from_different_places_is_separate_layers() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        y = torch.sin(x) + y
        z = self.fc(y)
        return torch.exp(x) + z

    history = tl.log_forward_pass(Model(forward, fc=linear()), torch.randn(2, 4))
    assert operations(history) == [
        "linear_1_1:1",
        "sin_1_2",
        "add_1_3",
        "linear_1_1:2",
        "exp_1_4",
        "add_2_5",
    ]


def test_a_tied_parameter_in_different_functions_is_two_layers() -> None:
    history = tl.log_forward_pass(TinyGPT(depth=1).eval(), torch.randint(11, (1, 5)))
    assert history["embedding_1"].layer_passes_total == 1
    assert history["head"].layer_passes_total == 1
    assert history["head"].layer_type == "linear"


# -- feedforward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("network", [TinyGPT, TinyBERT, TinyViT, TinySwin])
def test_transformers_are_feedforward(network: type[nn.Module], is_training: bool) -> None:
    x = torch.randint(11, (2, 6)) if network in (TinyGPT, TinyBERT) else torch.randn(2, 3, 8, 8)
    history = tl.log_forward_pass(network().train(is_training), x)
    assert [label for label, count in history.layer_num_passes.items() if count > 1] == []
    assert not history.model_is_recurrent


def test_a_stack_of_equal_layers_with_own_parameters_is_feedforward() -> None:
    history = tl.log_forward_pass(
        nn.Sequential(*(nn.Sequential(linear(), nn.ReLU()) for _ in range(6))), torch.randn(2, 4)
    )
    assert not history.model_is_recurrent


def test_chunks_of_one_tensor_are_no_loop() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.exp(part) for part in x.chunk(4)])

    assert not tl.log_forward_pass(Model(forward), torch.randn(4, 4)).model_is_recurrent


# -- cost ------------------------------------------------------------------------------------------


def plain_loop(self: Model, x: torch.Tensor) -> torch.Tensor:
    for _ in range(self.count // 2):
        x = torch.sin(x + 1)
    return x


def loop_with_parameters(self: Model, x: torch.Tensor) -> torch.Tensor:
    for _ in range(self.count // 2):
        x = torch.relu(self.fc(x))
    return x


def loop_in_place(self: Model, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    for _ in range(self.count // 2):
        x[0].add_(1)
    return x


def never_repeating(self: Model, x: torch.Tensor) -> torch.Tensor:
    for number in range(self.count // 2):
        x = torch.sin(x + number)
    return x


@pytest.mark.slow
@torch.no_grad()
def test_a_loop_of_100_000_operations_is_ordinary_input() -> None:
    history = tl.log_forward_pass(Model(plain_loop, count=100_000), torch.randn(4))
    assert len(history) == 100_002
    assert history.layer_labels_no_pass == ["input_1_0", "add_1_1", "sin_1_2", "output_1_3"]
    assert history["sin_1:50000"].operation_num == 100_001


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("forward", [loop_with_parameters, loop_in_place, never_repeating])
def test_a_loop_of_20_000_operations_of_any_kind_logs(forward: Callable[..., torch.Tensor]) -> None:
    history = tl.log_forward_pass(Model(forward, count=20_000, fc=linear()), torch.randn(4, 4))
    assert len(history) >= 20_002


def lines_to_log(model: nn.Module) -> int:
    """The lines of our own that a log and its labels take."""

    def log() -> None:
        assert tl.log_forward_pass(model, torch.randn(4, 4)).layer_labels

    return lines_run(log)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "forward", [plain_loop, loop_with_parameters, loop_in_place, never_repeating]
)
def test_ten_times_the_operations_are_ten_times_the_work(
    forward: Callable[..., torch.Tensor],
) -> None:
    few, many = (lines_to_log(Model(forward, count=count, fc=linear())) for count in (400, 4_000))
    assert many < 11 * few


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x + torch.relu(self.fc(x)) * 0.1
        return torch.cos(x)


@pytest.mark.slow
@torch.no_grad()
def test_loops_in_loops_of_modules_are_near_linear_too() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            for stage in self.stages:
                x = stage(x)
        return x

    stages = nn.ModuleList(_Stage() for _ in range(4))
    few, many = (lines_to_log(Model(forward, stages=stages, count=count)) for count in (3, 12))
    assert many < 4.5 * few
    history = tl.log_forward_pass(Model(forward, stages=stages, count=31), torch.randn(4, 4))
    assert history.layer_num_passes["add_4_19"] == 620
    assert history.layer_num_passes["cos_4_20"] == 31


def test_no_loop_begins_in_the_middle_of_a_period() -> None:
    def forward(self: Model, p: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return p[:, 0].exp() + p[:, 1].exp() + r[:, 0].exp() + r[:, 1].exp()

    history = tl.log_forward_pass(Model(forward), [torch.rand(3, 2), torch.rand(3, 2)])
    # Each step reads another column, so none is a pass of another.
    assert operations(history) == [
        "getitem_1_1", "exp_1_2", "getitem_2_3", "exp_2_4", "add_1_5", "getitem_3_6", "exp_3_7",
        "add_2_8", "getitem_4_9", "exp_4_10", "add_3_11",
    ]  # fmt: skip


def test_what_a_loop_starts_from_may_look_like_its_last_operation() -> None:
    def forward(self: Model, p: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        x = p.sin()
        for _ in range(3):
            x = (x + 1).sin()
        found = r.cos()
        for _ in range(3):
            x = x * found
            found = r.cos()
        return x + found

    history = tl.log_forward_pass(Model(forward), [torch.rand(3), torch.rand(3)])
    assert history["add_1:3"].pass_num == 3
    assert history["mul_1:3"].pass_num == 3
