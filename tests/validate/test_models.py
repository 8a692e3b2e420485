"""Models of every kind pass validation, and are left as they were."""

import gc
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.networks import Model
from torchlens._capture.memory.saved_values import Memory
from torchlens._capture.recorder import Recorder
from torchlens._validate.check_completeness import Census
from torchlens._validate.exemptions import CONSTANT
from torchlens._validate.witness import Witness
from torchlens.api import validate_forward_pass, validate_saved_activations


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class ThroughNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx, grad):
        return grad


def in_place(_, x):
    y = x * 1
    y[0].add_(5)
    y[:, 1] = 3
    y[y > 1] = 0
    torch.mul(y, 2, out=y)
    return y * 2


def views(_, x):
    y = x * 1
    flat = y.view(-1)
    turned = y.t()
    y.add_(1)
    flat[::2].mul_(3)
    return turned * 2, flat + 1


def autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            y = y.float() @ torch.ones(4, 4)
    return self.linear(y)


def inference(self, x):
    with torch.inference_mode():
        y = self.linear(x).add_(1)
    return y.clone() + 1


def random_numbers(self, x):
    y = F.dropout(x, 0.5) + torch.rand(3, 4) + torch.randn_like(x)
    return y + torch.randn(4, generator=self.generator) + torch.bernoulli(torch.full((4,), 0.5))


def branches(_, x):
    return x * 2 if x.sum() > 0 else x - 1


def many_results(_, x):
    a, b = x.split(2, dim=1)
    values, indices = x.max(dim=1)
    return {"sum": a + b, "max": [values, indices], "chunks": tuple(t * 2 for t in x.unbind(0))}


def hidden_arguments(_, x):
    everything = torch.ones_like(x, dtype=torch.bool)
    kept = torch.where(everything, x, x * 2)
    return (
        kept * torch.zeros_like(x)
        + x.masked_fill(everything, 1.0)
        + (x == 77.0).float()
        + torch.isnan(x).float()
    )


def whole_memory(_, x):
    y = (x * 1)[1:]
    return y.as_strided((3,), (1,), 0) * 2, x.expand(2, 3, 4) + 1


def half_written(_, x):
    memory = torch.zeros(3, 4)
    for row in range(2):
        memory[row].copy_(x[row])
    return memory.sum(0)


def checkpointed(self, x):
    return checkpoint(lambda t: torch.relu(self.linear(t)) * 2, x, use_reentrant=False)


def sparse(_, x):
    return torch.sparse.mm(x.to_sparse(), x.t())


def complex_numbers(_, x):
    return torch.fft.fft(x).conj().abs() + torch.view_as_real(torch.fft.rfft(x)).sum()


def conjugates(_, x):
    y = torch.complex(x, x)
    turned, part = y.conj(), y.conj().imag
    y[0].add_(1)
    turned[1].mul_(2)
    return turned * 2, part + 1, y * 3


def rows_of_a_table(_, x):
    y = x * 1
    for row in range(3):
        y[row].add_(row)
    low, high = y.split(2, dim=1)
    return low * 2, high.view(torch.int32) + 1, y[1], y[:, 2:] + y[:, :2]


def counting(self, x):
    self.count += 1
    self.seen.append(x)
    return x * self.count


def updating(self, x):
    self.average.mul_(0.9).add_(x.mean(), alpha=0.1)
    self.weight.data.mul_(2)
    return x - self.average + self.weight.sum()


def comparisons(_, x):
    positions = torch.arange(4)
    far = positions[None] > positions[:, None] - 100
    table = torch.zeros(9, 2, dtype=torch.long)
    return far, table[x.abs().long().flatten()], (positions > 50).any(), x * far.float().sum()


def gradient(_, x):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad((leaf**2).sum(), leaf)[0] + 1


CASES = {
    "linear": lambda: nn.Linear(4, 2),
    "dropout": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.Dropout(), nn.ReLU(inplace=True), nn.Linear(4, 2)
    ),
    "batch norm in training": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(),
    "batch norm in eval": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(),
    "in place": lambda: Model(in_place),
    "views": lambda: Model(views),
    "autocast": lambda: Model(autocast, linear=nn.Linear(4, 4)),
    "inference mode": lambda: Model(inference, linear=nn.Linear(4, 4)),
    "random numbers": lambda: Model(random_numbers, generator=torch.Generator().manual_seed(3)),
    "branches": lambda: Model(branches),
    "many results": lambda: Model(many_results),
    "hidden arguments": lambda: Model(hidden_arguments),
    "whole memory": lambda: Model(whole_memory),
    "half written": lambda: Model(half_written),
    "rnn": lambda: nn.RNN(4, 3, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(4, 3),
    "lstm": lambda: nn.LSTM(4, 3, dropout=0.5, num_layers=2),
    "lstm cell in a loop": lambda: Model(
        lambda s, x: [s.cell(row[None]) for row in x], cell=nn.LSTMCell(4, 3)
    ),
    "autograd function": lambda: Model(lambda _, x: Double.apply(x) + 1),
    "autograd function through numpy": lambda: Model(lambda _, x: ThroughNumpy.apply(x) + 1),
    "checkpoint": lambda: Model(checkpointed, linear=nn.Linear(4, 4)),
    "attention": lambda: Model(
        lambda s, x: s.a(x, x, x), a=nn.MultiheadAttention(4, 2, dropout=0.1)
    ),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "sparse": lambda: Model(sparse),
    "conjugates": lambda: Model(conjugates),
    "rows of a table": lambda: Model(rows_of_a_table),
    "complex numbers": lambda: Model(complex_numbers),
    "identity": lambda: nn.Sequential(nn.Identity(), nn.Linear(4, 2), nn.Identity()),
    "input returned": lambda: Model(lambda _, x: (x, {"again": x})),
    "a model with a counter": lambda: Model(counting, count=0, seen=[]),
    "a model that updates itself": lambda: Model(
        updating, average=nn.Buffer(torch.zeros(())), weight=nn.Parameter(torch.ones(3))
    ),
    "operators": lambda: Model(lambda _, x: (1 + x) / 2 - 3**x + (x % 2) * (5 - x).abs() // 1),
    "softmax of one": lambda: Model(
        lambda _, x: x[:, :1].softmax(1) + F.layer_norm(x[:, :1], (1,))
    ),
    "comparisons that come out alike": lambda: Model(comparisons),
    "a gradient taken inside": lambda: Model(gradient),
    "integers": lambda: Model(
        lambda _, x: F.one_hot(x.long().clamp(0, 3), 4) + x.argmax(1, keepdim=True)[:, None]
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_validation_passes_and_leaves_everything_as_it_was(name):
    torch.manual_seed(0)
    model = CASES[name]()
    x = torch.randn(3, 4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    given, generator = x.clone(), torch.get_rng_state()
    report = validate_forward_pass(model, x)
    assert report.passed, str(report)
    assert torch.equal(x, given)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert report.num_checked["completeness"] > 0 or name == "input returned"


def test_a_counter_and_a_list_are_put_back():
    model = CASES["a model with a counter"]()
    assert validate_saved_activations(model, torch.ones(2))
    assert model.count == 0
    assert model.seen == []


def test_gradients_are_left_alone():
    model = nn.Linear(4, 2)
    model(torch.ones(1, 4)).sum().backward()
    before = model.weight.grad
    value = before.clone()
    assert validate_saved_activations(model, torch.randn(3, 4))
    assert model.weight.grad is before
    torch.testing.assert_close(before, value, rtol=0, atol=0)


def test_an_input_written_in_place_is_put_back():
    x = torch.randn(3)
    given = x.clone()
    assert validate_saved_activations(Model(lambda _, t: t.add_(1) * 2), x)
    assert torch.equal(x, given)


def test_a_seed_is_used_and_the_generators_are_put_back():
    before = torch.get_rng_state()
    assert validate_saved_activations(nn.Dropout(), torch.ones(10), random_seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_custom_operator_passes():
    library = torch.library.Library("validated", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

    def bump(x):
        x.add_(1)

    library.define("bump(Tensor(a!) x) -> ()")
    library.impl("bump", bump, "CompositeExplicitAutograd")

    def forward(_, x):
        y = torch.ops.validated.twice(x)
        torch.ops.validated.bump(y)
        return y * 3

    report = validate_forward_pass(Model(forward), torch.randn(3))
    library._destroy()
    assert report.passed, str(report)


class Packed(torch.Tensor):
    """Stands for `numbers * scale`, and becomes that in every operation, copies included."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        unpacked = [own.numbers * own.scale if isinstance(own, cls) else own for own in args]
        return func(*unpacked, **(kwargs or {}))


def test_a_weight_that_a_copy_unpacks_passes():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    numbers = torch.randint(-9, 9, (4, 3), dtype=torch.int8)
    model[0].weight = nn.Parameter(Packed(numbers, 0.1), requires_grad=False)
    report = validate_forward_pass(model, torch.rand(2, 3))
    assert report.passed, report


def test_a_functional_transform_passes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = validate_forward_pass(
            Model(lambda _, x: torch.func.vmap(torch.sin)(x) + 1), torch.randn(3, 2)
        )
    assert report.passed, str(report)


def test_a_scripted_module_passes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    report = validate_forward_pass(nn.Sequential(scripted, nn.Linear(4, 2)), torch.randn(3, 4))
    assert report.passed, str(report)


def test_verbose_prints_the_report(capsys):
    assert validate_saved_activations(nn.Linear(4, 2), torch.randn(1, 4), verbose=True)
    printed = capsys.readouterr().out
    assert printed.startswith("Validation of Linear: passed")
    assert "replay" in printed


def test_a_model_that_raises_fails_validation_without_raising(capsys):
    def forward(_, x):
        raise RuntimeError("out of order")

    assert not validate_saved_activations(Model(forward), torch.ones(1), verbose=True)
    assert "RuntimeError: out of order" in capsys.readouterr().out


def test_a_model_that_does_not_repeat_itself_is_told_apart():
    numbers = iter(range(100))
    report = validate_forward_pass(Model(lambda _, x: x + next(numbers)), torch.ones(2))
    assert {finding.check for finding in report.findings} >= {"outputs"}
    assert "does not repeat itself" in str(report)


def test_bad_arguments_are_told_at_once():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        validate_forward_pass("model", torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="random_seed"):
        validate_forward_pass(nn.ReLU(), torch.ones(1), random_seed="1")  # type: ignore[arg-type]


def test_who_wrote_which_part_of_a_quantized_tensor_could_not_be_shown():
    def forward(_, x):
        y, row = (torch.quantize_per_tensor(part, 0.1, 0, torch.quint8) for part in (x, x[1]))
        y[0].copy_(row)
        return y.dequantize()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = validate_forward_pass(Model(forward), torch.randn(3, 4))
    assert report.passed, str(report)
    assert [(item.check, item.layer) for item in report.not_shown] == [
        ("arguments", "dequantize_1_6")
    ]


def test_the_indices_of_a_sparse_tensor_need_not_depend_on_its_values():
    report = validate_forward_pass(Model(lambda _, x: x.to_sparse().indices() * 2), torch.eye(3))
    assert report.passed, str(report)
    assert any("pattern" in reason for _, reason in report.exemptions)


def test_a_mask_that_picks_nothing_need_not_use_the_value():
    def forward(_, x):
        return x.masked_fill(x > 100, torch.tensor(3.0) * x.sum())

    report = validate_forward_pass(Model(forward), torch.ones(3))
    assert all(
        "masked_fill" not in finding.expected or "argument 2" not in finding.expected
        for finding in report.findings
    )
    full = validate_forward_pass(Model(forward), torch.full((3,), 200.0))
    assert full.passed, str(full)


def test_constants_of_legacy_constructors_are_no_strangers():
    """torch reports nothing of `torch.IntTensor([3])`, which transformers' VITS calls in every
    layer.
    """

    def forward(_, x):
        return x[:, : torch.IntTensor([3])[0]] * torch.FloatTensor([1, 2, 3])

    report = validate_forward_pass(Model(forward), torch.rand(2, 5))
    assert report.passed, str(report)
    assert report.exemptions["completeness", CONSTANT] == 2


@pytest.mark.slow
def test_nothing_is_left_that_waits_for_the_garbage_collector():
    """What a circle of objects holds is freed late, and its memory stays with the process even
    longer.
    """
    kinds = (Recorder, Memory, Witness, Census)
    model = Model(views)
    validate_forward_pass(model, torch.rand(2, 4))
    gc.collect()
    gc.freeze()  # what other tests hold
    gc.disable()
    try:
        assert validate_forward_pass(model, torch.rand(2, 4)).passed
        left = [one for one in gc.get_objects() if type(one) in kinds]
    finally:
        gc.enable()
        gc.unfreeze()
    assert not left


class _FreesItsInput(nn.Module):
    """Frees the memory of what it was given, as reversible layers do."""

    def __init__(self, is_own: bool) -> None:
        super().__init__()
        self.is_own = is_own

    def forward(self, x):
        x = x + 1 if self.is_own else x
        y = x * 2
        x.untyped_storage().resize_(0)
        return y + x.shape[0]


@pytest.mark.parametrize("is_own", [True, False])
def test_a_model_that_frees_the_memory_of_its_input_is_validated_and_the_input_is_back(is_own):
    x = torch.randn(3, 4)
    before = x.clone()
    report = validate_forward_pass(_FreesItsInput(is_own), x)
    assert report.passed, report.findings
    assert torch.equal(x, before)


def test_a_call_of_many_tensors_is_tried_with_some_of_them_and_counts_the_others():
    report = validate_forward_pass(
        Model(lambda _, x: torch.stack([x[:, n % 4] for n in range(300)])), torch.randn(3, 4)
    )
    assert report.passed, report.findings
    (left_out,) = (n for (check, _), n in report.exemptions.items() if check == "dependence")
    assert left_out >= 200
