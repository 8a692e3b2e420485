"""Promise 3: every operation is logged, whichever way it was called."""

import copy
import functools
import operator
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import (
    nn,
)
from torch import (
    relu as early_relu,
)
from torch import (
    sigmoid as early_sigmoid,
)
from torch import (
    sigmoid_ as early_sigmoid_,
)

import torchlens as tl
from tests.networks import Model

early_linear, early_method, early_op = F.linear, torch.Tensor.tanh, torch.ops.aten.sin.default
TABLE = {"act": torch.tanh, "methods": [torch.Tensor.exp]}


def with_default(
    x: torch.Tensor, function: Callable[..., torch.Tensor] = torch.sin
) -> torch.Tensor:
    return function(x)


def make_closure() -> Callable[[torch.Tensor], torch.Tensor]:
    function = torch.cos
    return lambda x: function(x)


class Holder:
    function = staticmethod(torch.erf)


X = torch.rand(2, 3, 4) + 0.1
SQUARE = torch.rand(3, 3) + torch.eye(3)

CALLS: list[tuple[str, Callable[..., Any], list[str] | None]] = [
    ("operator", lambda x: x @ x.T, ["t", "matmul"]),
    ("operator module", lambda x: operator.add(operator.neg(x), 1), ["neg", "add"]),
    ("comparison", lambda x: (x > 0) & ~(x == 1), ["gt", "eq", "invert", "and"]),
    ("power", lambda x: 2**x, ["rpow"]),
    ("floor division", lambda x: x // 2, ["floordiv"]),
    ("absolute", lambda x: abs(x), ["abs"]),
    ("method", lambda x: x.exp().sum(), ["exp", "sum"]),
    ("unbound method", lambda x: torch.Tensor.exp(x), ["exp"]),
    ("property", lambda x: x.T + x.mT, ["t", "mt", "add"]),
    ("torch", lambda x: torch.einsum("ij,jk->ik", x, x), ["einsum"]),
    ("functional", lambda x: F.softplus(x), ["softplus"]),
    ("keyword arguments", lambda x: torch.add(input=x, other=x), ["add"]),
    ("linalg", lambda x: torch.linalg.inv(x), ["linalginv"]),
    ("linalg norm", lambda x: torch.linalg.norm(x), ["linalgnorm"]),
    ("fft", lambda x: torch.fft.fft(x), ["fftfft"]),
    ("special", lambda x: torch.special.expit(x), ["specialexpit"]),
    ("sparse", lambda x: torch.sparse.mm(x.to_sparse(), x), ["tosparse", "sparsemm"]),
    ("torch.ops", lambda x: torch.ops.aten.relu(x), ["relu"]),
    ("torch.ops overload", lambda x: torch.ops.aten.add.Tensor(x, x), ["add"]),
    ("early torch.ops", lambda x: early_op(x), ["sin"]),
    ("early import", lambda x: early_relu(early_sigmoid(x)), ["sigmoid", "relu"]),
    ("early in-place import", lambda x: early_sigmoid_(x * 1), ["mul", "sigmoid"]),
    ("early functional", lambda x: early_linear(x, x), ["linear"]),
    ("early method", lambda x: early_method(x), ["tanh"]),
    ("default argument", with_default, ["sin"]),
    ("dict", lambda x: TABLE["act"](x), ["tanh"]),
    ("list in a dict", lambda x: TABLE["methods"][0](x), ["exp"]),
    ("closure", make_closure(), ["cos"]),
    ("partial", functools.partial(torch.clamp, max=1.0), ["clamp"]),
    ("class attribute", lambda x: Holder.function(x), ["erf"]),
    ("functools.reduce", lambda x: functools.reduce(torch.add, [x, x, x]), ["add", "add"]),
    ("map", lambda x: next(map(torch.exp, [x])), ["exp"]),
    ("lru_cache", lambda x: functools.lru_cache(torch.exp)(x), ["exp"]),
    ("getattr", lambda x: getattr(torch, "ab" + "s")(x), ["abs"]),
    ("torch.distributions", lambda x: torch.distributions.Normal(x, 1.0,
    validate_args=False).mean * 1, None),
    ("numpy argument", lambda x: x * torch.as_tensor(np.ones(3, dtype=np.float32)), None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "expected"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS]
)
def test_a_call_is_logged_whichever_way_it_is_made(
    call: Callable[..., Any], expected: list[str] | None
) -> None:
    history = tl.log_forward_pass(Model(lambda self, x: call(x)), SQUARE.clone())
    types = [entry.layer_type for entry in history][1:-1]
    if expected is not None:
        # torch has more than one spelling of some names (`linalg_inv`, `fft_fft`); what counts is
        # that they are there.
        assert [found.removeprefix("aten") for found in types] == expected
    assert torch.equal(history["output_1"].tensor_contents, call(SQUARE.clone()))
    assert history["output_1"].has_input_ancestor


def test_a_function_kept_as_a_module_attribute_is_logged() -> None:
    model = Model(lambda self, x: self.act(self.method(x)), act=torch.tanh, method=torch.Tensor.exp)
    assert [entry.layer_type for entry in tl.log_forward_pass(model, X)] == [
        "input",
        "exp",
        "tanh",
        "output",
    ]


def test_nested_tensors_are_logged() -> None:
    def forward(self: Model, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.as_nested_tensor([a, b], layout=torch.jagged)
        return torch.nested.to_padded_tensor(nested * 2, 0.0)

    model, inputs = Model(forward), [torch.rand(2, 4), torch.rand(3, 4)]
    expected = model(*inputs)
    history = tl.log_forward_pass(model, inputs)
    assert torch.equal(history["output_1"].tensor_contents, expected)
    assert history["output_1"].input_ancestors == {"input_1_0", "input_2_0"}


def test_a_custom_operator_is_one_operation_and_its_writes_are_seen() -> None:
    @torch.library.custom_op("torchlens_tests::double_", mutates_args=("x",))
    def double_(x: torch.Tensor) -> None:
        x.mul_(2)

    @torch.library.custom_op("torchlens_tests::plus_one", mutates_args=())
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = plus_one(x)
        view = y.view(-1)
        double_(y)
        return view - 3

    history = tl.log_forward_pass(Model(forward), torch.zeros(3))
    assert [entry.layer_label for entry in history][1:-1] == [
        "plusone_1_1",
        "view_1_2",
        "double_1_3",
        "sub_1_4",
    ]
    assert history["sub_1"].parent_layers == ["view_1_2", "double_1_3"]
    assert history["plusone_1"].tensor_contents.tolist() == [1, 1, 1]
    assert history["double_1"].tensor_contents.tolist() == [2, 2, 2]


def test_an_operator_that_torch_makes_a_new_object_of_is_the_same() -> None:
    """torch forgets its objects of an operator when an older one of the same name is freed."""

    @torch.library.custom_op("torchlens_tests::forgotten", mutates_args=())
    def forgotten(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        operators = torch.ops.torchlens_tests
        vars(operators).pop("forgotten", None)
        return operators.forgotten(x) + 1

    report = tl.validate_forward_pass(Model(forward), torch.rand(3))
    assert report.passed, str(report)


@pytest.mark.parametrize("wants_grad", [False, True])
def test_a_custom_operator_with_a_gradient_of_its_own_is_one_operation(wants_grad: bool) -> None:
    """torch makes an autograd function of it, which is called inside the operation."""

    @torch.library.custom_op("torchlens_tests::numpy_sin", mutates_args=())
    def numpy_sin(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.sin(x.detach().numpy()))

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    numpy_sin.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(), setup_context=keep
    )
    model, x = (
        Model(lambda self, x: torch.ops.torchlens_tests.numpy_sin(numpy_sin(x * 1).neg()) + 1),
        torch.rand(3),
    )
    x.requires_grad_(wants_grad)
    history = tl.log_forward_pass(model, x, save_gradients=True)
    assert [entry.layer_type for entry in history][1:-1] == [
        "mul",
        "numpysin",
        "neg",
        "numpysin",
        "add",
    ]
    assert history["numpysin_1"].parent_layers == ["mul_1_1"]
    report = tl.validate_forward_pass(model, x)
    assert report.passed, str(report)
    if wants_grad:
        history["output_1"].tensor_contents.sum().backward()
        torch.testing.assert_close(history["mul_1"].grad_contents, -(-x.sin()).cos() * x.cos())


def test_what_a_custom_operator_does_inside_is_its_own_affair() -> None:
    """Modules, autograd functions and transforms that run inside an operation are part of it."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = Model(lambda self, x: busy(x * 1) + 1, same=nn.Identity(), fc=nn.Linear(4, 4))

    @torch.library.custom_op("torchlens_tests::busy", mutates_args=())
    def busy(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(torch.sin)(Double.apply(model.fc(model.same(x))))

    x = torch.rand(2, 4)
    history = tl.log_forward_pass(model, x)
    assert [entry.layer_label for entry in history] == [
        "input_1_0",
        "mul_1_1",
        "busy_1_2",
        "add_1_3",
        "output_1_4",
    ]
    assert history.module_addresses == []
    assert torch.equal(history["output_1"].tensor_contents, model(x))


@pytest.mark.parametrize("way", ["keyword", "all keywords", "positional"])
def test_parameters_are_found_however_they_are_passed(way: str) -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        if way == "keyword":
            return F.linear(x, weight=self.w)
        return F.linear(input=x, weight=self.w) if way == "all keywords" else F.linear(x, self.w)

    entry = tl.log_forward_pass(Model(forward, w=nn.Parameter(torch.rand(5, 4))), X)["linear_1"]
    assert entry.parent_param_shapes == [(5, 4)]
    assert entry.func_keyword_args_non_tensor == {}


def test_tensors_in_nested_arguments_are_parents() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        a, b = x + 1, x * 2
        return torch.cat([a, torch.stack([b, a])[0]], dim=0)

    history = tl.log_forward_pass(Model(forward), torch.rand(3))
    assert history["stack_1"].parent_layers == ["mul_1_2", "add_1_1"]
    assert history["stack_1"].parent_layer_arg_locs["args"] == {
        (0, 0): "mul_1_2",
        (0, 1): "add_1_1",
    }
    assert history["cat_1"].func_keyword_args_non_tensor == {"dim": 0}


def test_index_tensors_are_parents() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0.5, None]

    history = tl.log_forward_pass(Model(forward), torch.rand(5))
    assert history["getitem_1"].parent_layers == ["input_1_0", "gt_1_1"]


@pytest.mark.parametrize("saved", ["all", "none"])
def test_short_lived_tensors_are_not_taken_for_one_another(saved: str) -> None:
    """Ids of dead tensors are used again; the log must not be fooled."""

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        total = x
        for _ in range(200):
            total = total + torch.exp(torch.zeros(3)).sum()
        return total

    history = tl.log_forward_pass(Model(forward), torch.rand(3), layers_to_save=saved)
    for entry in history:
        wanted = {"exp": ["zeros"], "sum": ["exp"], "zeros": []}.get(entry.layer_type)
        if wanted is not None:
            assert [label.partition("_")[0] for label in entry.parent_layers] == wanted


# -- arguments that hold tensors
# ---------------------------------------------------------------------------------------


def slice_one(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return x[i:j]


def slice_many(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return x[..., i : j + 1]


def slice_step(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return x[:, i::j]


def slice_write(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, i:j] = 2
    return y


def slice_add(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0][i:j] += 2
    return y


SLICES = [
    (slice_one, "getitem_1", {0: "input_1_0", (1, "start"): "input_2_0", (1, "stop"): "input_3_0"}),
    (
        slice_many,
        "getitem_1",
        {0: "input_1_0", (1, 1, "start"): "input_2_0", (1, 1, "stop"): "add_1_1"},
    ),
    (
        slice_step,
        "getitem_1",
        {0: "input_1_0", (1, 1, "start"): "input_2_0", (1, 1, "step"): "input_3_0"},
    ),
    (
        slice_write,
        "setitem_1",
        {0: "clone_1_1", (1, 1, "start"): "input_2_0", (1, 1, "stop"): "input_3_0"},
    ),
    (
        slice_add,
        "getitem_2",
        {0: "getitem_1_2", (1, "start"): "input_2_0", (1, "stop"): "input_3_0"},
    ),
]


@pytest.mark.parametrize(("forward", "label", "expected"), SLICES)
def test_tensors_that_are_bounds_of_a_slice_are_parents(
    forward: Any, label: str, expected: dict[Any, str]
) -> None:
    model, inputs = (
        Model(lambda self, *args: forward(*args)),
        [torch.rand(3, 4), torch.tensor(1), torch.tensor(2)],
    )
    history = tl.log_forward_pass(model, inputs, save_function_args=True)
    entry = history[label]
    assert entry.parent_layer_arg_locs["args"] == expected
    assert torch.equal(history["output_1"].tensor_contents, model(*inputs))
    assert torch.equal(entry.creation_args[0], history[expected[0]].tensor_contents)
    assert tl.validate_saved_activations(model, inputs)


def test_a_slice_keeps_no_tensor_alive() -> None:
    gone = []

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        stop = torch.tensor(2)
        gone.append(weakref.ref(stop))
        return x[:stop]

    history = tl.log_forward_pass(Model(forward), torch.rand(3), layers_to_save="none")
    assert len(history) == 4
    assert gone[0]() is None


# -- tensors made of tensors in ways that torch does not report
# --------------------------------------------------------


class Plain(torch.Tensor):
    """A class of tensors."""


class Labelled(torch.Tensor):
    """A class of tensors with a constructor of its own."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.label = "a"


COPIES: list[tuple[str, Callable[..., Any], list[str] | None]] = [
    ("copy", lambda self, x: copy.copy(x), ["copy"]),
    ("copy in a list", lambda self, x: copy.copy([x])[0] * 1, ["mul"]),
    ("deepcopy", lambda self, x: copy.deepcopy({"a": [x]})["a"][0], ["deepcopy"]),
    ("parameter", lambda self, x: nn.Parameter(x), ["parameter"]),
    ("parameter by keyword", lambda self, x: nn.Parameter(data=x, requires_grad=False),
    ["parameter"]),
    ("buffer", lambda self, x: nn.Buffer(x), ["detach"]),
    ("constructor", lambda self, x: torch.Tensor(x), ["tensor"]),
    ("constructor from tensors", lambda self, x: torch.Tensor([x.sum(), x.mean()]), ["sum", "mean",
    "tensor"]),
    ("class of its own", lambda self, x: Plain(x).as_subclass(torch.Tensor), ["plain",
    "assubclass"]),
    ("constructor of its own", lambda self, x: x if Labelled(x).label == "a" else None, []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "expected"), [row[1:] for row in COPIES], ids=[row[0] for row in COPIES]
)
@pytest.mark.parametrize("saved", ["all", "none"])
def test_a_tensor_made_from_another_has_it_for_a_parent(
    make: Any, expected: list[str], saved: str
) -> None:
    model, x = Model(lambda self, x: make(self, x * 2) + 1), torch.rand(3)
    history = tl.log_forward_pass(model, x, layers_to_save=saved)
    assert [entry.layer_type for entry in history] == ["input", "mul", *expected, "add", "output"]
    assert history["output_1"].has_input_ancestor
    if saved == "all":
        assert torch.equal(history["output_1"].tensor_contents, model(x))
        # torch refuses to make tensors of another class while a dispatch mode is on, as the last
        # check has it.
        assert "plain" in expected or not expected or tl.validate_saved_activations(model, x)


def test_a_copy_of_a_parameter_is_computed_with_it() -> None:
    for make, last in ((copy.copy, "copy_1"), (copy.deepcopy, "data_1")):
        model = Model(lambda self, x, make=make: make(self.w) + x, w=nn.Parameter(torch.rand(3)))
        history = tl.log_forward_pass(model, torch.rand(3))
        assert history[last].parent_param_shapes == [(3,)]
        assert history["add_1"].parent_layers[0].startswith(("copy", "parameter"))
        assert tl.validate_saved_activations(model, torch.rand(3))


def test_a_copy_looks_at_the_same_memory() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = copy.copy(y)
        y.add_(1)
        return z * 3

    history = tl.log_forward_pass(Model(forward), torch.rand(3))
    assert history["mul_2"].parent_layers == ["copy_1_2", "add_1_3"]


def test_what_went_through_bytes_begins_anew() -> None:
    """Pickled and read again, it is new memory with numbers from outside, as from numpy."""
    model, x = Model(lambda self, x: pickle.loads(pickle.dumps(x * 2)) + 1), torch.rand(3)
    history = tl.log_forward_pass(model, x)
    assert torch.equal(history["output_1"].tensor_contents, model(x))
    assert not history["output_1"].has_input_ancestor
    assert history["mul_1"].terminated_inside_model
    assert tl.validate_saved_activations(model, x)


def test_copying_and_making_tensors_is_as_ever_afterwards() -> None:
    before = dict(vars(torch.Tensor)), dict(vars(nn.Parameter))
    tl.log_forward_pass(Model(lambda self, x: copy.copy(x)), torch.rand(3))
    assert (dict(vars(torch.Tensor)), dict(vars(nn.Parameter))) == before
    assert torch.Tensor.__init__ is object.__init__
    assert torch.Tensor([1, 2]).tolist() == [1, 2]
    assert torch.Tensor(2, 3).shape == (2, 3)
    assert Labelled(torch.ones(2)).label == "a"
    with pytest.raises(TypeError, match="exactly one argument"):
        object.__init__(Labelled(torch.ones(2)), 3)


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept")  # numpy says so of torch's own
@pytest.mark.parametrize(
    "call",
    [
        np.exp,
        lambda x: np.add(x, x * 2),
        lambda x: np.log(x[0]),
        lambda x: np.greater(x, 0.5).float(),
        lambda x: np.cumsum(x, axis=0).clip(max=2),
    ],
)
def test_what_numpy_computes_from_tensors_is_an_entry_below_them(call: Callable[..., Any]) -> None:
    model, x = Model(lambda self, x: torch.as_tensor(call(x * 1)) + 1), torch.rand(3) + 1
    history = tl.log_forward_pass(model, x)
    assert "arraywrap" in [entry.layer_type for entry in history]
    assert history["output_1"].has_input_ancestor
    assert torch.equal(history["output_1"].tensor_contents, model(x))
    assert tl.validate_saved_activations(model, x)


@pytest.mark.filterwarnings("ignore:torchlens. what runs inside torch.func")
@pytest.mark.parametrize("name", ["vjp", "jacrev"])
def test_the_function_that_vjp_returns_is_an_operation_below_what_it_was_made_from(
    name: str,
) -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        if name == "jacrev":
            return torch.func.jacrev(self.fc)(x)
        result, pull_back = torch.func.vjp(lambda x: self.fc(x).sin(), x * 2)[:2]
        return pull_back(torch.ones_like(result))[0] + 1

    model, x = Model(forward, fc=nn.Linear(3, 2)), torch.rand(3)
    history = tl.log_forward_pass(model, x)
    if name == "vjp":
        assert [entry.layer_type for entry in history] == [
            "input",
            "mul",
            "vjp",
            "oneslike",
            "vjpfn",
            "add",
            "output",
        ]
        assert history["vjpfn_1"].parent_layers == ["oneslike_1_3", "mul_1_1"]
        assert history["vjpfn_1"].num_param_tensors == 2
    assert torch.equal(history["output_1"].tensor_contents, model(x))
    assert tl.validate_saved_activations(model, x)
    kept: list[Any] = []

    def keep(self: Model, x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.func.vjp(torch.sin, x)[1])
        return x + 1

    tl.log_forward_pass(Model(keep), x)
    assert torch.equal(kept[0](torch.ones(3))[0], x.cos())  # after the log, and in another one
    assert len(tl.log_forward_pass(Model(lambda self, x: kept[0](x)[0]), x)) == 3


# -- arguments that are no tensors but act like them
# -------------------------------------------------------------------


class Quantity:
    """A number with a unit: no tensor, but torch's functions take it."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> "Quantity":
        values = [arg.value if isinstance(arg, cls) else arg for arg in args]
        return cls(func(*values, **(kwargs or {})))


class Refusing:
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def test_what_a_class_does_for_torchs_functions_is_logged() -> None:
    quantity: Any = Quantity  # torch's stubs know only tensors
    exp: Any = torch.exp
    model = Model(lambda self, x: exp(torch.ones(3) + torch.add(quantity(x * 2), x)).value.relu())
    x = torch.rand(3)
    history = tl.log_forward_pass(model, x)
    assert [entry.layer_type for entry in history][1:-1] == [
        "ones",
        "mul",
        "add",
        "add",
        "exp",
        "relu",
    ]
    assert history["output_1"].has_input_ancestor
    assert torch.equal(history["output_1"].tensor_contents, model(x))
    assert tl.validate_saved_activations(model, x)


class Measured:
    """As old code has it: asks the object and not its class."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        return func(self.value, *args[1:], **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Defining your `__torch_function__` as a plain method")
def test_objects_that_answer_for_themselves_are_asked() -> None:
    measured: Any = Measured
    model = Model(lambda self, x: torch.mul(measured(torch.exp(x)), x))
    history = tl.log_forward_pass(model, torch.rand(3))
    assert [entry.layer_type for entry in history] == ["input", "exp", "mul", "output"]


def test_a_class_that_refuses_is_refused_as_ever() -> None:
    refusing: Any = Refusing()
    with pytest.raises(TypeError) as plain:
        torch.add(torch.ones(3), refusing)
    with pytest.raises(TypeError) as logged:
        tl.log_forward_pass(Model(lambda self, x: torch.add(x, refusing)), torch.ones(3))
    assert str(logged.value) == str(plain.value)
