"""Inputs that are made from sizes, as torchinfo takes them, or from text and a tokenizer."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchlens as tl
from benchmarks.zoo.libraries import import_timm, import_torchvision, import_transformers
from tests.networks import MLP, Model


def shapes(history: tl.ModelHistory) -> list[tuple[Any, ...]]:
    return [
        (tuple(history[label].tensor_shape), history[label].tensor_dtype)
        for label in history.input_layers
    ]


class Two(nn.Module):
    def forward(self, a: Tensor, b: Tensor, flag: bool = False) -> Tensor:
        return a.sum() + b.sum() + int(flag)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"input_size": [(2, 4), (3,)]}, [((2, 4), torch.float32), ((3,), torch.float32)]),
        ({"input_size": ((2, 4), [3])}, [((2, 4), torch.float32), ((3,), torch.float32)]),
        ({"input_size": [(2,), ()]}, [((2,), torch.float32), ((), torch.float32)]),
        (
            {"input_size": [(2,), (3,)], "dtypes": [torch.long, torch.bool]},
            [((2,), torch.int64), ((3,), torch.bool)],
        ),
        (
            {"input_size": {"b": (2,), "a": (3,)}, "dtypes": {"b": torch.half}},
            [((2,), torch.float16), ((3,), torch.float32)],
        ),
        (
            {"input_size": [(2,), (3,)], "dtypes": torch.int32, "input_kwargs": {"flag": True}},
            [((2,), torch.int32), ((3,), torch.int32)],
        ),
    ],
)  # fmt: skip
def test_sizes_become_tensors(options: dict[str, Any], expected: list[Any]) -> None:
    assert shapes(tl.log_forward_pass(Two(), **options)) == expected


def test_one_size_may_be_of_any_kind() -> None:
    sizes: list[Any] = [(2, 4), [2, 4], torch.Size([2, 4]), [(2, 4)]]
    for size in sizes:
        assert shapes(tl.log_forward_pass(MLP(), input_size=size)) == [((2, 4), torch.float32)]


def test_inputs_are_of_the_models_type_and_device() -> None:
    assert shapes(tl.log_forward_pass(MLP().double(), input_size=(2, 4)))[0][1] == torch.float64
    history = tl.log_forward_pass(MLP().to("meta"), input_size=(2, 4))
    assert history["input_1"].tensor_contents.is_meta
    meta = tl.log_forward_pass(Two(), input_size=[(2,), (2,)], device="meta")
    assert meta["input_1"].tensor_contents.is_meta


def test_the_same_inputs_are_made_each_time_and_no_generator_moves() -> None:
    before = torch.get_rng_state()
    one, other = (tl.log_forward_pass(MLP(), input_size=(2, 4)) for _ in range(2))
    assert torch.equal(one["input_1"].tensor_contents, other["input_1"].tensor_contents)
    states = torch.get_rng_state()
    tl.log_forward_pass(one_model := MLP(), input_size=(2, 4))
    torch.set_rng_state(states)
    MLP()
    after = torch.get_rng_state()
    torch.set_rng_state(states)
    tl.log_forward_pass(one_model, input_size=(2, 4))
    assert torch.equal(torch.get_rng_state(), states)
    assert not torch.equal(before, after)


def test_every_function_that_takes_inputs_takes_sizes(tmp_path: Path) -> None:
    model = MLP()
    assert tl.get_model_metadata(model, input_size=(2, 4)).num_tensors_saved == 0
    assert tl.validate_saved_activations(model, input_size=(2, 4))
    assert tl.validate_forward_pass(model, input_size=(2, 4)).passed
    drawn = tl.show_model_graph(
        model, input_size=(2, 4), vis_outpath=str(tmp_path / "g.gv"), vis_save_only=True
    )
    assert drawn is not None
    assert tl.profile(model, input_size=(2, 4), repeats=1).steps
    function = tl.log_forward_pass(lambda x: model(x) * 2, input_size=(2, 4))
    assert shapes(function) == [((2, 4), torch.float32)]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"input_size": "a"}, TypeError, "a list of sizes, or a dict of sizes by argument, got 'a'"),
        ({"input_size": []}, TypeError, "input_size must be a size such as (1, 3, 224, 224)"),
        ({"input_size": 3}, TypeError, "got 3 (int)"),
        ({"input_size": (True, 2)}, TypeError, "input_size must be a size"),
        ({"input_size": [(2, 4), "x"]}, TypeError, "input_size must be a size"),
        ({"input_size": (2, -4)}, ValueError, "A size has no negative numbers, got (2, -4)"),
        ({"input_size": (2, 4), "input_args": torch.ones(2)}, ValueError, "not both"),
        ({"input_size": (2, 4), "dtypes": "float"}, TypeError, "dtypes must be a torch.dtype"),
        ({"input_size": (2, 4), "dtypes": [torch.long] * 2}, ValueError, "one dtype for each size: 1"),
        ({"input_size": {"x": (2, 4)}, "dtypes": {"y": torch.long}}, ValueError, "dtypes names 'y'"),
        ({"dtypes": torch.long}, TypeError, "dtypes is for inputs that are made"),
        ({"device": "cpu"}, TypeError, "Saved tensors are moved by output_device"),
        ({"tokenizer": str}, TypeError, "input_args must be a string or a list of strings, got None"),
        ({"input_args": "hello", "tokenizer": 3}, TypeError, "tokenizer must be a tokenizer"),
        ({"input_args": "a", "tokenizer": str, "input_size": (2,)}, ValueError, "leave out input_size"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_refused_in_words(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        tl.log_forward_pass(MLP(), **options)


def test_a_model_that_wants_whole_numbers_says_how_to_make_them() -> None:
    model = nn.Sequential(nn.Embedding(5, 3))
    with pytest.raises(RuntimeError) as caught:
        tl.log_forward_pass(model, input_size=(2, 4))
    assert "give dtypes=[torch.long]" in "".join(caught.value.__notes__)
    assert (
        shapes(tl.log_forward_pass(model, input_size=(2, 4), dtypes=torch.long))[0][1] == torch.long
    )


def test_jax_gets_its_arrays() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="give a JAX function its arrays"):
        tl.log_forward_pass(jax.numpy.sin, input_size=(2,))


def word_tokenizer() -> Any:
    transformers = import_transformers()
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", "hello", "world", "again"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]"
    )


@pytest.mark.slow
def test_text_goes_through_a_tokenizer() -> None:
    transformers = import_transformers()
    tokenizer = word_tokenizer()
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=4)
    model = transformers.GPT2LMHeadModel(config).eval()
    history = tl.log_forward_pass(model, "hello world", tokenizer=tokenizer)
    expected = model(
        **{
            k: v
            for k, v in tokenizer("hello world", return_tensors="pt").items()
            if k != "token_type_ids"
        }
    )
    assert torch.equal(history.output.logits, expected.logits)
    several = tl.get_model_metadata(model, ["hello", "hello world again"], tokenizer=tokenizer)
    assert several["input.input_ids"].tensor_shape == (2, 3)
    called = tl.log_forward_pass(
        model.generate,
        "hello",
        {"max_new_tokens": 2, "pad_token_id": 0, "eos_token_id": None},
        tokenizer=tokenizer,
    )
    assert called.output.shape == (1, 3)


def _torchvision(name: str) -> Any:
    return import_torchvision().models.get_model(name, weights=None).eval()


def _timm(name: str) -> Any:
    return import_timm().create_model(name, pretrained=False).eval()


def _transformers(name: str, **sizes: int) -> Any:
    transformers = import_transformers()
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}Model")(config).eval()


SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 9,
}
REAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "resnet18": (lambda: _torchvision("resnet18"), {"input_size": (1, 3, 64, 64)}),
    "squeezenet": (lambda: _torchvision("squeezenet1_1"), {"input_size": (1, 3, 64, 64)}),
    "mobilenet": (lambda: _torchvision("mobilenet_v3_small"), {"input_size": (1, 3, 64, 64)}),
    "shufflenet": (lambda: _torchvision("shufflenet_v2_x0_5"), {"input_size": [(1, 3, 64, 64)]}),
    "timm resnet": (lambda: _timm("test_resnet"), {"input_size": (1, 3, 64, 64)}),
    "timm vit": (lambda: _timm("test_vit"), {"input_size": {"x": (1, 3, 160, 160)}}),
    "timm convnext": (lambda: _timm("test_convnext"), {"input_size": (1, 3, 64, 64)}),
    "bert": (lambda: _transformers("Bert", **SMALL), {"input_size": (1, 5), "dtypes": torch.long}),
    "llama": (lambda: _transformers("Llama", **SMALL), {"input_size": {"input_ids": (1, 5)}, "dtypes": [torch.long]}),
    "distilbert": (
        lambda: _transformers("DistilBert", dim=8, n_heads=2, n_layers=1, hidden_dim=8, vocab_size=9),
        {"input_size": {"input_ids": (2, 5), "attention_mask": (2, 5)}, "dtypes": {"input_ids": torch.long, "attention_mask": torch.bool}},
    ),
    "geometric": (
        lambda: pytest.importorskip("torch_geometric").nn.GCN(4, 8, 2),
        {"input_size": [(6, 4), (2, 9)], "dtypes": [torch.float, torch.long]},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_models_run_on_sizes_alone(name: str) -> None:
    make, options = REAL[name]
    model = make()
    history = tl.log_forward_pass(model, **options)
    kwargs = {
        address.removeprefix("input."): history[address].tensor_contents
        for label in history.input_layers
        for address in [history[label].input_output_address]
    }
    with torch.no_grad():
        found, expected = history.output, model(**kwargs)
    for one, other in zip(
        torch.utils._pytree.tree_leaves(found),
        torch.utils._pytree.tree_leaves(expected),
        strict=True,
    ):
        if isinstance(one, Tensor):
            assert torch.equal(one, other)


def test_a_model_without_weights_gets_default_floats() -> None:
    model = Model(lambda self, x: x * 2)
    assert shapes(tl.log_forward_pass(model, input_size=(3,))) == [((3,), torch.float32)]
