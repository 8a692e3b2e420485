"""Ordinary models just work: each kind a small test of its own, compared with a plain call."""

import asyncio
import warnings
from collections import OrderedDict, deque, namedtuple
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.masked import masked_tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import torchlens as tl
from tests.networks import MLP, Model, ResidualBlock


def check(
    model: nn.Module, *inputs: Any, kwargs: dict[str, Any] | None = None, **options: Any
) -> tl.ModelHistory:
    """Logs the model, sees that its outputs are those of a plain call and that printing works;
    returns the log.
    """
    state = torch.get_rng_state()
    expected = [tensor for _, tensor in tensors_in(model(*inputs, **(kwargs or {})))]
    torch.set_rng_state(state)
    history = tl.log_forward_pass(model, list(inputs), kwargs, **options)
    found = [history[label].tensor_contents for label in history.output_layers]
    assert len(found) == len(expected)
    for mine, wanted in zip(found, expected, strict=True):
        same(mine, wanted)
    str(history)
    for entry in history:
        str(entry)
    assert len(history.to_pandas()) == len(history)
    return history


def same(mine: torch.Tensor, wanted: torch.Tensor) -> None:
    assert mine.dtype is wanted.dtype
    assert mine.layout is wanted.layout
    if wanted.is_nested:
        for a, b in zip(mine.unbind(), wanted.unbind(), strict=True):
            assert torch.equal(a, b)
    elif wanted.layout is not torch.strided:
        assert torch.equal(mine.to_dense(), wanted.to_dense())
    else:
        assert mine.shape == wanted.shape
        assert torch.equal(mine.view(torch.uint8) if mine.element_size() == 1 else mine,
                           wanted.view(torch.uint8) if wanted.element_size() == 1 else wanted)  # fmt: skip


def tensors_in(tree: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        return [("", tree)]
    if hasattr(tree, "_fields"):
        items: Any = zip(tree._fields, tree, strict=True)
    elif isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        items = vars(tree).items() if hasattr(tree, "__dict__") else ()
    return [(f".{key}{path}", tensor) for key, item in items for path, tensor in tensors_in(item)]


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) + 1


# -- inputs and outputs
# ------------------------------------------------------------------------------------------------


class KeywordOnly(nn.Module):
    def forward(self, *, query: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return f(query) * scale


def test_keyword_only_calls() -> None:
    history = check(KeywordOnly(), kwargs={"query": torch.rand(3), "scale": 2.0})
    assert history["input_1"].input_output_address == "input.query"
    assert history["input.query"] == history["input_1"]


class Variadic(nn.Module):
    def forward(
        self, first: torch.Tensor, *rest: torch.Tensor, **named: torch.Tensor
    ) -> torch.Tensor:
        return first + sum(rest) + named["last"]


def test_forwards_with_any_number_of_arguments() -> None:
    history = check(
        Variadic(), torch.rand(3), torch.rand(3), torch.rand(3), kwargs={"last": torch.rand(3)}
    )
    addresses = [history[label].input_output_address for label in history.input_layers]
    assert (
        addresses == ["input.first", "input.rest.0", "input.rest.1", "input.last"]
        or len(set(addresses)) == 4
    )


class Nested(nn.Module):
    def forward(self, batch: dict[str, Any], pair: tuple[Any, ...]) -> dict[str, Any]:
        return {
            "sum": batch["x"] + batch["more"][1],
            "pair": [pair[0] * 2, (pair[1], None)],
            "none": None,
            "number": 3,
        }


def test_nested_lists_dicts_and_tuples_with_none_among_them() -> None:
    batch = {"x": torch.rand(3), "more": [None, torch.rand(3)], "name": "b"}
    history = check(Nested(), batch, (torch.rand(3), torch.rand(3)))
    assert "input.batch.x" in history
    assert "input.batch.more.1" in history
    assert "input.pair.0" in history
    assert [history[label].input_output_address for label in history.output_layers] == [
        "output.sum", "output.pair.0", "output.pair.1.0",
    ]  # fmt: skip


Pair = namedtuple("Pair", ["left", "right"])


def test_named_tuples_as_input_and_output() -> None:
    model = Model(lambda self, pair: Pair(pair.left + 1, pair.right * 2))
    history = tl.log_forward_pass(model, Pair(torch.rand(3), torch.rand(3)))
    assert [history[label].input_output_address for label in history.output_layers] == [
        "output.left",
        "output.right",
    ]
    assert len(history.input_layers) == 2


@dataclass
class Batch:
    x: torch.Tensor
    mask: torch.Tensor | None = None


def test_dataclasses_as_input_and_output() -> None:
    history = check(Model(lambda self, batch: Batch(batch.x * 2)), Batch(torch.rand(3)))
    assert "output.x" in history
    assert history["mul_1"].parent_layers == ["input_1_0"]


class ModelOutput(OrderedDict):
    """As transformers has it: a dict whose items are attributes, too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__.update(items)


def test_model_output_objects() -> None:
    history = check(
        Model(lambda self, x: ModelOutput(logits=x * 2, hidden=(x + 1, None))), torch.rand(3)
    )
    assert [history[label].input_output_address for label in history.output_layers] == [
        "output.logits",
        "output.hidden.0",
    ]


def test_plain_objects_as_output() -> None:
    class Result:
        def __init__(self, y: torch.Tensor) -> None:
            self.y = y

    history = tl.log_forward_pass(Model(lambda self, x: Result(x * 2)), torch.rand(3))
    assert "output.y" in history


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right


def addresses_of(result: Any) -> list[str | None]:
    """The output addresses of a model that returns `result(x)`; as an input the same has the same
    addresses.
    """
    history = tl.log_forward_pass(Model(lambda self, x: result(x + 1)), torch.rand(3))
    again = tl.log_forward_pass(Model(lambda self, tree: None), [result(torch.rand(3))])
    found = [history[label].input_output_address for label in history.output_layers]
    given = [again[label].input_output_address for label in again.input_layers]
    assert [str(address).replace("input.args.0", "output") for address in given] == found
    return found


def test_queues_and_objects_with_slots_as_input_and_output() -> None:
    assert addresses_of(lambda x: deque([x, x * 2])) == ["output.0", "output.1"]
    assert addresses_of(lambda x: {"queue": deque([x])}) == ["output.queue.0"]
    assert addresses_of(lambda x: Slotted(x, x * 2)) == ["output.left", "output.right"]


@pytest.mark.parametrize("has_keys", [False, True])
def test_what_is_registered_as_a_pytree_is_input_and_output(has_keys: bool) -> None:
    class Opaque:
        """Has no public contents; the registry knows how to take it apart."""

        def __init__(self, parts: list[torch.Tensor]) -> None:
            held = list(parts)
            self.take_apart = lambda: held

    def flatten_with_keys(tree: Opaque) -> Any:
        return [
            (pytree.MappingKey(name), part)
            for name, part in zip("ab", tree.take_apart(), strict=True)
        ], None

    pytree.register_pytree_node(
        Opaque, lambda tree: (tree.take_apart(), None), lambda parts, _: Opaque(list(parts)),
        flatten_with_keys_fn=flatten_with_keys if has_keys else None,
    )  # fmt: skip
    try:
        names = ["output.a", "output.b"] if has_keys else ["output.0", "output.1"]
        assert addresses_of(lambda x: Opaque([x, x * 2])) == names
    finally:
        # torch 2.6 has no function for it.
        getattr(pytree, "_deregister_pytree_node", pytree.SUPPORTED_NODES.pop)(Opaque)


@pytest.mark.parametrize("result", [None, 3.5, "text", [], {}])
def test_a_model_that_returns_no_tensor(result: Any) -> None:
    history = tl.log_forward_pass(Model(lambda self, x: (x + 1, result)[1]), torch.rand(3))
    assert history.output_layers == []
    assert history.layer_labels == ["input_1_0", "add_1_1"]


def test_a_parameter_as_output() -> None:
    history = check(
        Model(lambda self, x: (x + 1, self.w), w=nn.Parameter(torch.rand(2))), torch.rand(3)
    )
    assert history["output_2"].parent_layers == []
    assert history["output_2"].tensor_shape == (2,)


def test_the_input_as_output() -> None:
    history = check(Model(lambda self, x: x), torch.rand(3))
    assert history["output_1"].parent_layers == ["input_1_0"]


def test_the_same_tensor_returned_twice() -> None:
    history = check(Model(lambda self, x: [x + 1] * 2), torch.rand(3))
    assert history["add_1"].child_layers == history.output_layers


def test_a_model_without_inputs() -> None:
    history = tl.log_forward_pass(Model(lambda self: self.w * 2, w=nn.Parameter(torch.rand(2))), [])
    assert history.layer_labels == ["mul_1_1", "output_1_2"]
    assert history["mul_1"].computed_with_params


def test_a_single_list_argument() -> None:
    history = check(Model(lambda self, xs: sum(xs)), [torch.rand(3), torch.rand(3)])
    assert len(history.input_layers) == 2


# -- kinds of tensors
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128,
    torch.int8, torch.int64,
              torch.uint8],
)  # fmt: skip
def test_tensors_of_many_dtypes(dtype: torch.dtype) -> None:
    x = (torch.rand(3, 3) * 4).to(dtype)
    history = check(Model(lambda self, x: (x + x) * x), x)
    assert history["add_1"].tensor_dtype is dtype
    assert history["add_1"].tensor_fsize == 9 * dtype.itemsize


def test_bool_tensors() -> None:
    check(Model(lambda self, x: ~x | x), torch.tensor([True, False]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_tensors(dtype: torch.dtype) -> None:
    history = check(Model(lambda self, x: x.to(dtype).reshape(-1)), torch.rand(2, 2))
    assert history["to_1"].tensor_fsize == 4


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors(layout: str) -> None:
    x = torch.eye(3)
    x = x.to_sparse() if layout == "coo" else x.to_sparse_csr()
    history = check(Model(lambda self, x, y: torch.sparse.mm(x, y)), x, torch.rand(3, 3))
    assert history["output_1"].input_ancestors == {"input_1_0", "input_2_0"}
    check(Model(lambda self, y: y.to_sparse() * 2), torch.eye(3))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(layout: torch.layout) -> None:
    def forward(self: Model, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor([a, b], layout=layout) * 2

    check(Model(forward), torch.rand(2, 4), torch.rand(3, 4))


masked: Any = masked_tensor  # its methods are not in torch's stubs
MASKED: dict[str, tuple[Any, list[str]]] = {
    "added": (lambda self, x: masked_tensor(x * 1, x > 0.5) + 1, ["maskedtensor", "add"]),
    "returned": (lambda self, x: masked_tensor(x * 1, x > 0.5), ["maskedtensor"]),
    "summed": (
        lambda self, x: masked(x * 1, x > 0.5).sum().to_tensor(0.0),
        ["maskedtensor", "sum", "maskeddata", "detach", "maskedmask", "invert", "maskedfill"],
    ),
    "taken apart": (
        lambda self, x: masked(x * 1, x > 0.5).exp().mul(2).get_data(),
        ["maskedtensor", "exp", "mul", "maskeddata", "detach"],
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("way", MASKED)
def test_masked_tensors(way: str, tmp_path: Path) -> None:
    forward, types = MASKED[way]
    model, x = Model(forward), torch.rand(4)
    for saved in ("all", ["mul"]):
        history = tl.log_forward_pass(model, x, layers_to_save=saved)
        assert [entry.layer_type for entry in history][5:-1] == types
        assert history["output_1"].input_ancestors == {"input_1_0"}
        assert history["maskedtensor_1"].parent_layers == ["clone_1_3", "clone_2_4"]
    history = tl.log_forward_pass(model, x)
    text = str(history["maskedtensor_1"])
    assert "MaskedTensor(" in text
    assert "--" in text or bool((x > 0.5).all())
    assert len(history.to_pandas()) == len(history)
    str(history.summary())
    history.to_json()
    assert history.first_nonfinite() is None
    history.explore(tmp_path / "page.html")
    assert tl.validate_saved_activations(model, x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_a_masked_tensor_as_input() -> None:
    model, x = (
        Model(lambda self, m: (m + 1).get_data()),
        masked_tensor(torch.rand(3), torch.tensor([True, False, True])),
    )
    history = tl.log_forward_pass(model, x)
    assert history.layer_labels == [
        "input_1_0",
        "add_1_1",
        "maskeddata_1_2",
        "detach_1_3",
        "output_1_4",
    ]
    assert "--" in str(history["input_1"])


def test_zero_size_tensors() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[0:0].add_(1)
        return torch.cat([y, x[:, 0:0].sum(1, keepdim=True).expand(0, 4)])

    history = check(Model(forward), torch.rand(0, 4))
    assert history["mul_1"].tensor_fsize == 0


def test_meta_tensors() -> None:
    model = MLP().to("meta")
    history = tl.log_forward_pass(model, torch.rand(2, 4, device="meta"))
    assert history["linear_1"].tensor_shape == (2, 5)
    assert "meta" in str(history["linear_1"])


class Tagged(torch.Tensor):
    """A tensor subclass without methods of its own."""


class Loud(torch.Tensor):
    """A tensor subclass that has a say in every call."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("cls", [Tagged, Loud])
def test_tensor_subclasses(cls: type[torch.Tensor]) -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(x) + 1
        y += 2
        return self.fc(y) / 2

    model, x = Model(forward, fc=nn.Linear(4, 4)), torch.rand(2, 4).as_subclass(cls)
    history = check(model, x)
    assert type(history["relu_1"].tensor_contents) is cls
    assert [entry.layer_type for entry in history] == [
        "input",
        "relu",
        "add",
        "iadd",
        "linear",
        "truediv",
        "output",
    ]


# -- modes
# --------------------------------------------------------------------------------------------------


def test_autocast() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.fc(x)

    history = check(Model(forward, fc=nn.Linear(4, 4)), torch.rand(2, 4))
    assert history["linear_1"].tensor_dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(MLP(), torch.rand(2, 4))


def test_inference_mode_inside_and_around() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            y = self.fc(x)
            y += 1
            return F.relu(y, inplace=True)

    history = check(Model(forward, fc=nn.Linear(4, 4)), torch.rand(2, 4))
    assert not torch.equal(history["linear_1"].tensor_contents, history["iadd_1"].tensor_contents)
    with torch.inference_mode():
        check(MLP(), torch.rand(2, 4), save_gradients=True)
        check(MLP(), torch.rand(2, 4), layers_to_save=["linear", "output"])


def test_no_grad_inside_and_around() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.fc(x)
        return self.fc(y)

    history = check(Model(forward, fc=nn.Linear(4, 4)), torch.rand(2, 4))
    assert history["linear_1:1"].gradfunc is None
    assert history["linear_1:2"].gradfunc == "AddmmBackward0"
    with torch.no_grad():
        check(MLP(), torch.rand(2, 4))


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoint(is_reentrant: bool) -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=is_reentrant) * 2

    model = Model(forward, block=ResidualBlock())
    history = check(model, torch.rand(2, 4, requires_grad=True))
    assert [entry.layer_type for entry in history] == [
        "input",
        "relu",
        "linear",
        "add",
        "mul",
        "output",
    ]
    assert history["mul_1"].parent_layers == ["add_1_3"]
    assert history["block"].layer_label == "add_1_3"
    history["output_1"].tensor_contents.sum().backward()
    assert model.block.fc.weight.grad is not None


def test_a_device_context_inside() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        with torch.device("cpu"):
            return x + torch.ones(3)

    assert check(Model(forward), torch.rand(3))["add_1"].parent_layers == ["input_1_0", "ones_1_1"]


# -- functions that torch does not report
# ------------------------------------------------------------------------------


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


class NumpyExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.exp(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.exp(x)


@pytest.mark.parametrize("options", [{}, {"detach_saved_tensors": True}, {"save_gradients": True}])
@pytest.mark.parametrize("function", [Exp, NumpyExp])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_autograd_functions_are_tied_to_their_arguments(
    function: Any, options: dict[str, Any], requires_grad: bool
) -> None:
    model = Model(lambda self, x: function.apply(x * 2) + 1)
    history = check(model, torch.rand(3, requires_grad=requires_grad), **options)
    assert history["add_1"].input_ancestors == {"input_1_0"}
    assert history["output_1"].has_input_ancestor
    if "save_gradients" in options and requires_grad:
        history["output_1"].tensor_contents.sum().backward()
        x = history["input_1"].tensor_contents.detach()
        torch.testing.assert_close(history["mul_1"].grad_contents, torch.exp(x * 2))


@pytest.mark.parametrize("saved", ["none", "add"])
def test_autograd_functions_are_tied_when_nothing_is_kept(saved: str) -> None:
    model = Model(lambda self, x: NumpyExp.apply(x * 2) + 1)
    history = tl.log_forward_pass(model, torch.rand(3), layers_to_save=saved)
    assert history["add_1"].input_ancestors == {"input_1_0"}


def test_vmap_is_one_operation_with_a_warning() -> None:
    model = Model(
        lambda self, x: torch.func.vmap(lambda row: (row * self.w).sum())(x) + 1,
        w=nn.Parameter(torch.rand(3)),
    )
    x = torch.rand(2, 3)
    with pytest.warns(UserWarning, match="vmap"):
        history = tl.log_forward_pass(model, x)
    assert [entry.layer_type for entry in history] == ["input", "vmap", "add", "output"]
    assert history["vmap_1"].computed_with_params
    assert torch.equal(history["output_1"].tensor_contents, model(x))


def test_func_grad_is_one_operation_with_a_warning() -> None:
    model = Model(lambda self, x: torch.func.grad(lambda y: (y**3).sum())(x) * 2)
    x = torch.rand(3)
    with pytest.warns(UserWarning, match="grad"):
        history = tl.log_forward_pass(model, x)
    assert history["mul_1"].input_ancestors == {"input_1_0"}
    assert torch.equal(history["output_1"].tensor_contents, model(x))


def test_a_gradient_taken_inside_the_model() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        energy = (x**2).sum()
        return -torch.autograd.grad(energy, x, create_graph=True)[0]

    history = check(Model(forward), torch.rand(3, requires_grad=True))
    assert history["neg_1"].input_ancestors == {"input_1_0"}


# -- compiled and scripted
# ---------------------------------------------------------------------------------------------

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]


def test_compiled_models_are_logged_as_their_source() -> None:
    model, x = MLP(), torch.rand(2, 4)
    plain = tl.log_forward_pass(model, x)
    compiled: Any = torch.compile(model, backend="eager")
    compiled(x)
    history = tl.log_forward_pass(compiled, x)
    assert history.layer_labels == plain.layer_labels
    assert history.module_addresses == plain.module_addresses
    assert history["fc2"].layer_label == "linear_2_3"
    assert torch.equal(compiled(x), model(x))


def test_modules_compiled_in_place_are_logged_as_their_source() -> None:
    model, x = MLP(), torch.rand(2, 4)
    model.fc1.compile(backend="eager")
    model.compile(backend="eager")
    expected = model(x)
    implementation = model._compiled_call_impl
    history = tl.log_forward_pass(model, x)
    assert [entry.layer_type for entry in history] == [
        "input",
        "linear",
        "relu",
        "linear",
        "output",
    ]
    assert model._compiled_call_impl is implementation
    assert model.fc1._compiled_call_impl is not None
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_compiled_part_has_one_pass_for_each_call(is_in_place: bool) -> None:
    part: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    if is_in_place:
        part.compile(backend="eager")
    else:
        part = torch.compile(part, backend="eager")
    history = tl.log_forward_pass(Model(lambda self, x: self.part(x), part=part), torch.rand(2, 4))
    assert history.module_num_passes == {"part": 1, "part.0": 1, "part.1": 1}
    assert history.module_types["part"] == "Sequential"


def test_a_compiled_function_inside_a_model() -> None:
    compiled = torch.compile(lambda x: torch.sin(x) + 1, backend="eager")
    history = check(Model(lambda self, x: compiled(x) * 2), torch.rand(3))
    assert [entry.layer_type for entry in history] == ["input", "sin", "add", "mul", "output"]


def scripted_block() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(ResidualBlock())


def test_a_scripted_submodule_is_one_operation() -> None:
    history = check(
        Model(lambda self, x: self.block(x) * 2, block=scripted_block()), torch.rand(2, 4)
    )
    assert [entry.layer_type for entry in history] == ["input", "residualblock", "mul", "output"]
    assert history["residualblock_1"].num_param_tensors == 2
    assert history["block"].layer_type == "residualblock"


def test_a_traced_submodule_is_one_operation() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(ResidualBlock(), torch.rand(2, 4))
    history = check(Model(lambda self, x: self.block(x) * 2, block=traced), torch.rand(2, 4))
    assert [entry.layer_type for entry in history] == ["input", "residualblock", "mul", "output"]


def test_a_scripted_model() -> None:
    history = check(scripted_block(), torch.rand(2, 4))
    assert history["output_1"].has_input_ancestor


def test_a_scripted_function_is_one_operation() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(f)
    history = check(Model(lambda self, x: scripted(x) * 2), torch.rand(3))
    assert len(history) == 4
    assert history["mul_1"].input_ancestors == {"input_1_0"}


def test_an_fx_graph_module() -> None:
    history = check(torch.fx.symbolic_trace(MLP()), torch.rand(2, 4))
    assert history["fc2"].layer_label == "linear_2_3"


# -- modules
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
@pytest.mark.parametrize("is_training", [False, True])
def test_parametrizations(wrap: Any, is_training: bool) -> None:
    import copy

    model = Model(lambda self, x: self.fc(x), fc=wrap(nn.Linear(4, 4))).train(is_training)
    twin, x = copy.deepcopy(model), torch.rand(2, 4)
    history = tl.log_forward_pass(model, x)
    assert torch.equal(history["output_1"].tensor_contents, twin(x))
    for mine, wanted in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, wanted)
    assert history["fc"].layer_type == "linear"
    assert any("parametrizations" in address for address in history.module_addresses)


def test_hooks_of_the_users_own_run_once_and_their_operations_are_logged() -> None:
    calls = []

    def pre(module: nn.Module, args: tuple[Any, ...]) -> Any:
        calls.append("pre")
        return (args[0] * 2,)

    def post(module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        calls.append("post")
        return out - 1

    def backward(module: nn.Module, grad_in: Any, grad_out: Any) -> None:
        calls.append("backward")

    model = MLP()
    model.fc1.register_forward_pre_hook(pre)
    model.fc1.register_forward_hook(post)
    model.fc2.register_full_backward_hook(backward)
    x = torch.rand(2, 4)
    expected = model(x)
    calls.clear()
    history = tl.log_forward_pass(model, x)
    assert calls == ["pre", "post"]
    assert torch.equal(history["output_1"].tensor_contents, expected)
    assert [entry.layer_type for entry in history][1:5] == ["mul", "linear", "sub", "relu"]
    assert history["fc1"].layer_type == "sub"
    history["output_1"].tensor_contents.sum().backward()
    assert calls == ["pre", "post", "backward"]


def test_data_parallel_on_cpu() -> None:
    history = check(nn.DataParallel(MLP()), torch.rand(2, 4))
    assert "module.fc1" in history


def test_frozen_parameters() -> None:
    model = MLP().requires_grad_(False)
    history = check(model, torch.rand(2, 4), save_gradients=True)
    assert history["linear_1"].computed_with_params
    assert history["linear_1"].gradfunc is None


def test_shared_modules_and_parameters() -> None:
    fc = nn.Linear(4, 4)
    model = Model(lambda self, x: self.b(torch.relu(self.a(x))), a=fc, b=fc)
    history = check(model, torch.rand(2, 4))
    assert history.total_param_tensors == 2
    assert history.layer_num_passes["linear_1_1"] == 2
    other = nn.Linear(4, 4)
    other.weight = fc.weight
    history = check(nn.Sequential(fc, other), torch.rand(2, 4))
    assert history.total_param_tensors == 3
    assert history.total_params == 16 + 4 + 4


def test_lazy_modules_on_their_first_call() -> None:
    model = Model(lambda self, x: self.fc(x), fc=nn.LazyLinear(2))
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    assert history["fc"].parent_param_shapes == [(2, 4), (2,)]
    assert history.total_params == 10


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("is_bidirectional", [False, True])
def test_recurrent_modules(make: Any, is_bidirectional: bool) -> None:
    module = make(4, 6, num_layers=2, bidirectional=is_bidirectional, batch_first=True)
    history = check(module, torch.rand(2, 5, 4))
    assert history["output_1"].has_input_ancestor


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_packed_sequences(make: Any) -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]

    history = check(Model(forward, rnn=make(4, 6, batch_first=True)), torch.rand(2, 5, 4))
    assert history["output_1"].input_ancestors == {"input_1_0"}


def test_a_packed_sequence_as_input() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(
        torch.rand(2, 5, 4), torch.tensor([5, 3]), batch_first=True
    )
    history = tl.log_forward_pass(nn.LSTM(4, 6, batch_first=True), packed)
    assert "input.input.data" in history


def test_modules_kept_in_a_plain_list_are_logged_without_address() -> None:
    model = Model(lambda self, x: self.hidden[0](x), hidden=[nn.Linear(4, 4)])
    history = check(model, torch.rand(2, 4))
    assert [entry.layer_type for entry in history] == ["input", "linear", "output"]
    assert history.module_addresses == []


def test_a_module_that_calls_itself() -> None:
    def forward(self: Model, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        return self(self.fc(x), depth - 1) if depth else x

    check(nn.Sequential(Model(forward, fc=nn.Linear(4, 4))), torch.rand(2, 4))


@pytest.mark.parametrize(
    "options", [{"activation_postfunc": lambda t: (t * 2).mean()}, {"detach_saved_tensors": True}]
)
@pytest.mark.parametrize("saved", ["all", "inner", "identity"])
def test_what_is_done_to_saved_tensors_is_not_logged(options: dict[str, Any], saved: str) -> None:
    model = Model(lambda self, x: Exp.apply(self.inner(x)) + 1, inner=nn.Identity())
    history = tl.log_forward_pass(
        model, torch.rand(3, requires_grad=True), layers_to_save=saved, **options
    )
    assert [entry.layer_type for entry in history] == ["input", "identity", "exp", "add", "output"]
    assert history["exp_1"].parent_layers == ["identity_1_1"]


def test_a_view_whose_base_was_written_behind_autograds_back() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        behind = y.detach()
        parts = y.unbind()
        behind.add_(1)
        return parts[0]  # torch raises when asked for its grad_fn, and only then

    model = Model(forward, weight=nn.Parameter(torch.ones(3, 4)))
    history = tl.log_forward_pass(model, torch.ones(3, 4))
    assert history["output_1"].tensor_contents.tolist() == [2.0] * 4


# -- results that are computed on demand
# -------------------------------------------------------------


class Streaming(nn.Module):
    """Yields one tensor after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(3):
            x = torch.relu(self.fc(x))
            yield x


class Waiting(Streaming):
    async def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.fc(x)


class StreamingWhileOthersRun(Streaming):
    async def forward(self, x: torch.Tensor) -> AsyncIterator[torch.Tensor]:  # type: ignore[override]
        for _ in range(2):
            await asyncio.sleep(0)
            yield self.fc(x)


class WaitingForOthers(Streaming):
    async def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        await asyncio.sleep(0.001)
        return self.fc(x)


def test_a_generator_is_run_to_its_end() -> None:
    model, x = Streaming(), torch.rand(4)
    history = tl.log_forward_pass(model, x)
    assert [entry.layer_type for entry in history][1:-3] == ["linear", "relu"] * 3
    assert [history[label].input_output_address for label in history.output_layers] == [
        "output.0",
        "output.1",
        "output.2",
    ]
    for label, wanted in zip(history.output_layers, model(x), strict=True):
        assert torch.equal(history[label].tensor_contents, wanted)
    assert tl.validate_saved_activations(model, x)


def test_a_generator_inside_the_model_runs_where_it_is_asked() -> None:
    model, x = Model(lambda self, x: sum(self.stream(x)), stream=Streaming()), torch.rand(4)
    history = check(model, x)
    assert history.module_passes == ["stream:1", "stream.fc:1", "stream.fc:2", "stream.fc:3"]


def test_lazy_maps_and_coroutines_are_run_too() -> None:
    model, x = Model(lambda self, x: map(self.fc, [x, x * 2]), fc=nn.Linear(4, 4)), torch.rand(4)
    history = tl.log_forward_pass(model, x)
    assert [entry.layer_type for entry in history] == [
        "input",
        "mul",
        "linear",
        "linear",
        "output",
        "output",
    ]
    assert tl.validate_saved_activations(model, x)
    assert tl.log_forward_pass(Waiting(), x).layer_labels == [
        "input_1_0",
        "linear_1_1",
        "output_1_2",
    ]
    assert tl.log_forward_pass(StreamingWhileOthersRun(), x).output_layers == [
        "output_1_2",
        "output_2_3",
    ]
    assert tl.validate_saved_activations(StreamingWhileOthersRun(), x)


def test_coroutines_are_run_beside_an_event_loop_that_is_running() -> None:
    """As in a notebook."""
    x = torch.rand(4)

    async def cell(model: nn.Module) -> tl.ModelHistory:
        return tl.log_forward_pass(model, x)

    async def elsewhere(model: nn.Module) -> tl.ModelHistory:
        return await asyncio.to_thread(tl.log_forward_pass, model, x)

    loop = asyncio.new_event_loop()
    try:
        for model in (Waiting(), StreamingWhileOthersRun()):
            assert "linear_1_1" in loop.run_until_complete(cell(model)).layer_labels_no_pass
        with pytest.raises(RuntimeError, match=r"asyncio\.to_thread"):
            loop.run_until_complete(cell(WaitingForOthers()))
        assert (
            "linear_1_1"
            in loop.run_until_complete(elsewhere(WaitingForOthers())).layer_labels_no_pass
        )
    finally:
        loop.close()


def test_a_coroutine_leaves_the_event_loop_of_the_thread_alone() -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        tl.log_forward_pass(Waiting(), torch.rand(4))
        assert asyncio.get_event_loop() is loop
        assert not loop.is_closed()
    finally:
        asyncio.set_event_loop(None)
        loop.close()
