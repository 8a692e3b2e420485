"""Any callable as a model: which models it uses, and what they are called."""

import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchlens as tl
from tests.networks import MLP, Residual

X = torch.rand(2, 4)
IN_GLOBALS = MLP()
SPACE = SimpleNamespace(net=MLP())


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))


class Generator(MLP):
    def generate(self, x: Tensor, steps: int = 2, *, scale: float = 1.0) -> dict[str, Any]:
        for _ in range(steps):
            x = F.pad(self(x), (0, 1)) * scale
        return {"text": "hello", "tensor": x}

    @staticmethod
    def twice(x: Tensor) -> Tensor:
        return x * 2


class Trainer:
    def __init__(self) -> None:
        self.model, self.teachers = Encoder(), [Encoder(), Encoder()]

    def step(self, x: Tensor) -> Tensor:
        return self.model(x) - self.teachers[0](x) - self.teachers[1](x)

    def __call__(self, x: Tensor) -> Tensor:
        return self.step(x)


def uses_global(x: Tensor) -> Tensor:
    return IN_GLOBALS(x)


def uses_global_through_another(x: Tensor) -> Tensor:
    return uses_global(x) + 1


def uses_attribute_of_global(x: Tensor) -> Tensor:
    found: Tensor = SPACE.net(x)
    return found


def given_model(net: nn.Module, x: Tensor) -> Any:
    return net(x)


def plain_parameters(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def closure() -> Callable[[Tensor], Tensor]:
    encoder, decoder = Encoder(), MLP()
    return lambda x: decoder(encoder(x))


def decorated() -> Callable[[Tensor], Tensor]:
    net = MLP()

    @functools.wraps(net.forward)
    def inner(*args: Any) -> Any:
        return net(*args)

    return inner


MLPS = ["fc1", "act", "fc2"]
CASES: dict[str, tuple[Callable[..., Any], Any, str, list[str]]] = {
    "method": (MLP().forward, X, "MLP.forward", MLPS),
    "generate": (Generator().generate, X, "Generator.generate", MLPS),
    "partial": (functools.partial(Generator().generate, steps=1), X, "Generator.generate", MLPS),
    "static method": (Generator.twice, X, "twice", []),
    "global": (uses_global, X, "uses_global", MLPS),
    "two functions": (uses_global_through_another, X, "uses_global_through_another", MLPS),
    "attribute": (uses_attribute_of_global, X, "uses_attribute_of_global", MLPS),
    "argument": (given_model, [MLP(), X], "given_model", MLPS),
    "default": (lambda x, net=IN_GLOBALS: net(x), X, "lambda", MLPS),
    "wrapped": (decorated(), X, "forward", MLPS),
    "closure": (closure(), X, "lambda", [
        "encoder", "encoder.fc", "decoder", "decoder.fc1", "decoder.act", "decoder.fc2",
    ]),
    "object": (Trainer(), X, "Trainer", [
        "model", "model.fc", "teachers", "teachers.fc", "teachers_2", "teachers_2.fc",
    ]),
    "method of an object": (Trainer().step, X, "Trainer.step", [
        "model", "model.fc", "teachers", "teachers.fc", "teachers_2", "teachers_2.fc",
    ]),
    "builtin": (torch.relu, X, "relu", []),
    "function": (F.gelu, X, "gelu", []),
    "no model": (plain_parameters, [X, torch.rand(4, 3)], "plain_parameters", []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_callable_is_logged_with_the_modules_it_calls(case: str) -> None:
    function, inputs, title, addresses = CASES[case]
    history = tl.log_forward_pass(function, inputs)
    assert history.model_name == title
    assert history.module_addresses == addresses
    args = inputs if isinstance(inputs, list) else [inputs]
    expected, found = function(*args), history.output
    if isinstance(expected, dict):
        assert found["text"] == "hello"
        expected, found = expected["tensor"], found["tensor"]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("case", CASES)
def test_the_log_of_a_callable_is_proved_against_it(case: str) -> None:
    function, inputs, *_ = CASES[case]
    report = tl.validate_forward_pass(function, inputs)
    assert report.passed, str(report)


def test_addresses_and_hash_are_those_of_the_model_whose_method_is_called() -> None:
    model = Residual()
    plain, called = tl.log_forward_pass(model, X), tl.log_forward_pass(model.forward, X)
    assert plain.layer_labels == called.layer_labels
    assert plain.structure_hash == called.structure_hash
    assert plain.receipt.weights == called.receipt.weights
    assert called["blocks.1.fc"].parent_param_addresses == [
        "blocks.1.fc.weight",
        "blocks.1.fc.bias",
    ]


def test_a_module_inside_another_is_named_once() -> None:
    model = MLP()
    history = tl.log_forward_pass(lambda x: model.fc2(model(x)[:, :1].expand(2, 5)), X)
    assert history.module_num_passes == {"fc1": 1, "act": 1, "fc2": 2}


def test_a_module_that_the_function_makes_is_named_by_its_class() -> None:
    def function(x: Tensor) -> Tensor:
        first, second = Encoder(), Encoder()
        found: Tensor = second(first(x))
        return found

    history = tl.log_forward_pass(function, X)
    assert history.module_addresses == ["Encoder", "Encoder.fc", "Encoder_2", "Encoder_2.fc"]
    assert tl.validate_forward_pass(function, X).passed


def test_a_module_that_nothing_leads_to_has_named_tensors() -> None:
    hidden = iter([Encoder()])  # nothing sees into an iterator
    history = tl.log_forward_pass(lambda x: next(hidden)(x), X)
    assert history.module_addresses == ["Encoder", "Encoder.fc"]
    buffers = [entry.buffer_address for entry in history if entry.is_buffer_layer]
    assert buffers == ["Encoder.fc.weight", "Encoder.fc.bias"]


def test_an_exported_program_is_logged() -> None:
    model = MLP()
    program = torch.export.export(model, (X,))
    history = tl.log_forward_pass(program, X)
    assert [entry.layer_type for entry in history] == [
        "input",
        "linear",
        "relu",
        "linear",
        "output",
    ]
    assert torch.equal(history.output, model(X))
    assert history.module_addresses == ["fc1", "act", "fc2"]
    assert history["fc2"].layer_label == "linear_2_3"


def test_a_scripted_function_is_one_operation() -> None:
    with warnings.catch_warnings():  # deprecated in newer releases of torch
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(plain_parameters)
    history = tl.log_forward_pass(scripted, [X, torch.rand(4, 3)])
    assert [entry.layer_type for entry in history] == ["input", "input", "scriptfunction", "output"]


def test_a_callable_can_be_drawn_and_run_again(tmp_path: Any) -> None:
    model = Generator()
    drawing = tl.show_model_graph(
        model.generate, X, vis_outpath=str(tmp_path / "g.gv"), vis_save_only=True
    )
    assert "Generator.generate" in str(drawing.source if drawing else "")
    history = tl.log_forward_pass(model.generate, X)
    before = history["relu_1:2"].tensor_contents
    history.save_new_activations(model.generate, X + 1)
    assert not torch.equal(history["relu_1:2"].tensor_contents, before)


def test_arguments_that_a_callable_does_not_take_are_refused() -> None:
    with pytest.raises(TypeError, match=r"given_model\(net.*cannot be called with \(Tensor\)"):
        tl.log_forward_pass(given_model, X)
    with pytest.raises(TypeError, match="Make an instance of it"):
        tl.log_forward_pass(MLP, X)


def test_a_function_with_jax_inside_stays_one_of_jax() -> None:
    jax = pytest.importorskip("jax")

    def function(x: Any) -> Any:
        return jax.numpy.tanh(x) * 2

    history = tl.log_forward_pass(function, jax.numpy.ones(3))
    assert history._log.recording.framework == "jax"
    assert isinstance(history.output, jax.Array)
