"""Rebuilt attention, against weights computed by hand and by the models themselves."""

import importlib.util
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchlens as tl
from benchmarks.zoo import SPECIMENS
from torchlens._attention.attention import attention_of, calls_of_attention


class Attend(nn.Module):
    """`scaled_dot_product_attention` with some options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q, k, v, mask=None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, **self.options)


def by_hand(q, k, v, mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The weights, one query and one key at a time."""
    batch, heads, queries, channels = q.shape
    weights = torch.zeros(batch, heads, queries, k.shape[-2], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            own = h * k.shape[1] // heads if enable_gqa else h
            for i in range(queries):
                scores = []
                for j in range(k.shape[-2]):
                    score = float(q[b, h, i].double() @ k[b, own, j].double())
                    score *= 1 / math.sqrt(channels) if scale is None else scale
                    if mask is not None:
                        at = mask.expand(batch, heads, queries, k.shape[-2])[b, h, i, j]
                        score = score + float(at) if at.dtype.is_floating_point else (
                            score if at else -math.inf
                        )  # fmt: skip
                    scores.append(-math.inf if is_causal and j > i else score)
                if any(score > -math.inf for score in scores):
                    weights[b, h, i] = torch.tensor(scores, dtype=torch.float64).softmax(0)
    return weights


def tensors(heads: int = 4, key_heads: int = 4, queries: int = 6, keys: int = 6):
    torch.manual_seed(0)
    return (torch.randn(2, heads, queries, 8), torch.randn(2, key_heads, keys, 8),
            torch.randn(2, key_heads, keys, 5))  # fmt: skip


HIDDEN = torch.tensor([True, True, False, True, True, False])
BLIND = torch.ones(6, 6, dtype=torch.bool)
BLIND[3] = False
OPTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, None),
    "causal": ({"is_causal": True}, None),
    "scale": ({"scale": 0.3}, None),
    "grouped": ({"enable_gqa": True}, None),
    "boolean mask": ({}, HIDDEN.expand(6, 6)),
    "mask per example": ({}, HIDDEN.expand(2, 1, 6, 6)),
    "float mask": ({}, torch.linspace(-2, 2, 36).reshape(6, 6)),
    "a query that sees nothing": ({}, BLIND),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_the_fused_kernel_are_those_computed_one_by_one(name: str, dtype) -> None:
    options, mask = OPTIONS[name]
    q, k, v = (own.to(dtype) for own in tensors(key_heads=2 if "enable_gqa" in options else 4))
    mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    history = tl.log_forward_pass(Attend(**options), [q, k, v, *([] if mask is None else [mask])])
    entry = history["scaleddotproductattention_1"]
    wanted = by_hand(q, k, v, mask, **options)
    weights = entry.attention_weights()
    assert weights.dtype is dtype
    torch.testing.assert_close(weights, wanted.to(dtype))
    assert torch.equal(entry.attention_weights(head=3), weights[:, 3])
    query = history.attention(entry.layer_label, head=-1).query
    assert query is not None
    assert torch.equal(query, q[:, -1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_equal_to_its_rounding(dtype) -> None:
    q, k, v = (own.to(dtype) for own in tensors())
    history = tl.log_forward_pass(Attend(is_causal=True), [q, k, v])
    weights = history["scaleddotproductattention_1"].attention_weights()
    torch.testing.assert_close(
        weights.double(), by_hand(q, k, v, is_causal=True), atol=2e-2, rtol=0.0
    )


def test_queries_and_keys_may_differ_in_number() -> None:
    q, k, v = tensors(queries=3, keys=7)
    history = tl.log_forward_pass(Attend(is_causal=True), [q, k, v])
    weights = history["scaleddotproductattention_1"].attention_weights()
    torch.testing.assert_close(weights.double(), by_hand(q, k, v, is_causal=True))


def test_active_dropout_is_refused() -> None:
    history = tl.log_forward_pass(Attend(dropout_p=0.5), list(tensors()))
    with pytest.raises(ValueError, match=r"dropout was active \(dropout_p=0.5\).*in eval mode"):
        history["scaleddotproductattention_1"].attention_weights()


def test_a_result_that_the_weights_do_not_give_is_refused() -> None:
    history = tl.log_forward_pass(Attend(), list(tensors()), detach_saved_tensors=True)
    entry = history["scaleddotproductattention_1"]
    entry.tensor_contents.data[0, 0, 0, 0] += 1e-3  # without the version counter noticing
    with pytest.raises(ValueError, match=r"differs from the logged one by 0.001, more than round"):
        entry.attention_weights()


def test_what_was_not_saved_is_named() -> None:
    history: Any = tl.get_model_metadata(Attend(), list(tensors()))
    with pytest.raises(ValueError, match="needs tensors that were not saved") as caught:
        history["scaleddotproductattention_1"].attention_weights()
    keys = eval(str(caught.value).partition("layers_to_save=")[2].rstrip("."))
    history = tl.log_forward_pass(Attend(), list(tensors()), layers_to_save=keys)
    assert history.attention("scaleddotproductattention_1").weights.shape == (2, 4, 6, 6)


def test_a_mask_from_outside_needs_the_saved_arguments() -> None:
    mask = torch.randn(6, 6)

    class Masked(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, mask)

    q, k, v = tensors()
    with pytest.raises(ValueError, match="save_function_args=True"):
        tl.log_forward_pass(Masked(), [q, k, v]).attention("scaleddot")
    history = tl.log_forward_pass(Masked(), [q, k, v], save_function_args=True)
    weights = history.attention("scaleddot").weights
    torch.testing.assert_close(weights.double(), by_hand(q, k, v, mask))


@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_has_the_weights_that_it_returns(masks, is_fast, batch_first) -> None:
    torch.manual_seed(1)
    model = nn.MultiheadAttention(16, 4, batch_first=batch_first).eval()
    x = torch.randn(3, 5, 16)
    options: dict[str, Any] = {}
    if masks in ("padding", "both"):
        options["key_padding_mask"] = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 5])
    if masks in ("causal", "both"):
        options["attn_mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
    args = [x if batch_first else x.transpose(0, 1)] * 3
    with torch.set_grad_enabled(not is_fast):
        (_, wanted) = model(*args, **options, average_attn_weights=False)
        for need_weights in (False, True):
            history = tl.log_forward_pass(model, args, {**options, "need_weights": need_weights})
            assert bool(history.find("nativemultiheadattention")) == (is_fast and batch_first)
            (call,) = calls_of_attention(history._log, range(len(history)))
            weights = attention_of(history._log, call).weights
            torch.testing.assert_close(weights.reshape(3, 4, 5, 5), wanted.detach())


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_encoder_layer_on_its_fast_path_has_those_of_its_slow_one(
    norm_first, activation
) -> None:
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, norm_first=norm_first, activation=activation, batch_first=True
    ).eval()
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        fast = tl.log_forward_pass(layer, x)
    slow = tl.log_forward_pass(layer, x)
    assert "transformerencoderlayerfwd_1_1" in fast.layer_labels
    torch.testing.assert_close(
        fast.attention("transformerencoderlayerfwd").weights,
        slow.attention("self_attn").weights.detach(),
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
@pytest.mark.filterwarnings("ignore:torchlens. what runs inside torch.func.vmap:UserWarning")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_flex_attention_has_weights_where_its_operations_are_logged(is_compiled: bool) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    # A log runs eagerly what the model compiles.
    compiled: Any = torch.compile(flex_attention, backend="eager")
    attend = compiled if is_compiled else flex_attention

    class Flexible(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend(q, k, v, score_mod=lambda s, b, h, i, j: s - (i - j).abs())

    q, k, v = torch.randn(3, 1, 2, 16, 16).unbind(0)
    history = tl.log_forward_pass(Flexible(), [q, k, v])
    (call,) = calls_of_attention(history._log, range(len(history)))
    near = -(torch.arange(16)[:, None] - torch.arange(16)).abs().float()
    torch.testing.assert_close(
        attention_of(history._log, call).weights.reshape(1, 2, 16, 16).double(),
        by_hand(q, k, v, near),
    )


TRANSFORMERS = ("gpt2", "bert", "llama", "t5", "vit", "clip_vision_model", "whisper", "opt", "bart", "mistral", "gpt_oss", "gemma2")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_real_models_have_the_weights_that_they_return_themselves(name: str, kernel: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install 'torchlens[zoo]'")
    case = SPECIMENS[f"transformers/{name}"].make()
    model: Any = case.model.eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(**case.kwargs, output_attentions=True)
    names = ("encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")
    returned = [own for each in names for own in getattr(wanted, each, None) or ()]
    assert returned
    try:
        model.set_attn_implementation(kernel)
    except ValueError:
        pytest.skip(f"{name} has no {kernel}")
    with torch.no_grad():
        history = tl.log_forward_pass(model, [], case.kwargs)
    calls = calls_of_attention(history._log, range(len(history)))
    assert len(calls) == len(returned)
    found = [attention_of(history._log, call).weights for call in calls]
    for weights in found:
        assert any(
            weights.shape == other.shape and torch.allclose(weights, other, atol=1e-5)
            for other in returned
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["torchvision/swin_t", "torchvision/vit_b_16", "timm/levit_128s", "timm/deit_tiny_patch16_224", "timm/xcit_nano_12_p8_224"]
)  # fmt: skip
def test_the_attention_of_vision_models_is_rebuilt_for_every_block(name: str) -> None:
    if importlib.util.find_spec(name.partition("/")[0]) is None:
        pytest.skip("needs the zoo: pip install 'torchlens[zoo]'")
    case = SPECIMENS[name].make()
    with torch.no_grad():
        history = tl.log_forward_pass(case.model.eval(), list(case.args), case.kwargs)
    calls = calls_of_attention(history._log, range(len(history)))
    assert len(calls) >= 11
    for call in calls:
        sums = attention_of(history._log, call).weights.sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))


def test_a_key_that_means_several_or_none_says_so() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2))
    history: Any = tl.log_forward_pass(model.eval(), torch.randn(1, 4, 8))
    assert history.attention("1.layers.1").layer == history.attention("1.layers.1.self_attn").layer
    with pytest.raises(KeyError, match=r"'1' has 2 attentions; say which: scaleddotproductatt"):
        history.attention("1")
    with pytest.raises(ValueError, match="There is no attention in '0': neither scaled_dot_prod"):
        history.attention("0")
    with pytest.raises(ValueError, match="'linear_1_1' is no attention"):
        history["linear_1_1"].attention_weights()
    with pytest.raises(IndexError, match=r"Head 2 is out of range: .* has 2, numbered 0 to 1"):
        history.attention("1.layers.0", head=2)
    with pytest.raises(TypeError, match="head must be a whole number, got 'a'"):
        history.attention("1.layers.0", head="a")


def test_attention_is_plotted_head_by_head(tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'torchlens[plot]'")
    history = tl.log_forward_pass(Attend(is_causal=True), list(tensors()))
    found = history.attention("scaleddot")
    figure = found.plot(tmp_path / "attention.png")
    pictures = [axis.images[0].get_array() for axis in figure.axes[:4]]
    for head in range(4):
        torch.testing.assert_close(torch.tensor(pictures[head]), found.weights[0, head])
    content = (tmp_path / "attention.png").read_bytes()
    assert content[:4] == b"\x89PNG"
    assert history.structure_hash.encode() in content  # the receipt
    assert found.head(2).plot().axes[0].images[0].get_array().shape == (6, 6)
