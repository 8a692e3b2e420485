"""The attention weights of fused kernels, which do not return them: computed again from the
arguments of the call, together with the result that these weights give.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.functional import gelu, layer_norm, linear, relu

from torchlens._recording.unseen import GradMode

Tensor = torch.Tensor
# `scaled_dot_product_attention`, and the kernels that `torch.ops.aten` has for it.
SCALED_DOT_PRODUCT = "scaleddotproduct"
MULTI_HEAD = "nativemultiheadattention"
ENCODER_LAYER = "transformerencoderlayerfwd"


class Rebuilt(NamedTuple):
    """Attention weights with what they were computed from, and the result that they give.

    Tensors end in (heads, queries, keys) or (heads, tokens, channels). Each number of the result
    may be off by some units of rounding of `scale`.
    """

    weights: Tensor
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    result: Tensor
    scale: Tensor


def is_fused(layer_type: str) -> bool:
    """True if the layers of a type are fused kernels of attention."""
    return layer_type.startswith(SCALED_DOT_PRODUCT) or layer_type in (MULTI_HEAD, ENCODER_LAYER)


def rebuilt(layer_type: str, call: Mapping[str, Any], num_queries: int | None = None) -> Rebuilt:
    """The attention of a call, given the kind of kernel and its arguments by name.

    With `num_queries`, `scaled_dot_product_attention` is computed for that many queries of the
    first example alone.
    """
    with GradMode(False):
        if layer_type == MULTI_HEAD:
            return _multi_head(call)
        if layer_type == ENCODER_LAYER:
            return _encoder_layer(call)
        return _scaled_dot_product(call if num_queries is None else _narrowed(call, num_queries))


def _narrowed(call: Mapping[str, Any], num_queries: int) -> dict[str, Any]:
    """The arguments of a call with some of the queries of the first example."""
    (query, key), mask = (call["query"], call["key"]), call.get("attn_mask")
    if call.get("is_causal"):
        sizes = query.shape[-2], key.shape[-2]
        mask = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        is_same_for_all = mask.dim() < 2 or mask.shape[-2] == 1
        mask = _first(mask) if is_same_for_all else first_queries(mask, num_queries)
    return {
        **call, "query": first_queries(query, num_queries), "key": _first(key),
        "value": _first(call["value"]), "attn_mask": mask, "is_causal": False,
    }  # fmt: skip


def first_queries(tensor: Tensor, num_queries: int) -> Tensor:
    """Some queries of the first example, from a tensor that ends in (heads, queries, ...)."""
    tensor = _first(tensor)
    return tensor[..., thinned(tensor.shape[-2], num_queries), :]


def _first(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, *tensor.shape[-3:])[0] if tensor.dim() > 3 else tensor


def thinned(size: int, most: int) -> Tensor:
    """At most so many numbers from 0 to `size`, evenly spaced."""
    return torch.linspace(0, size - 1, min(size, most)).round().long()


def _scaled_dot_product(call: Mapping[str, Any]) -> Rebuilt:
    """The attention of a call of `scaled_dot_product_attention`."""
    if call.get("dropout_p"):
        raise ValueError(
            f"dropout was active (dropout_p={call['dropout_p']}), and which weights it dropped is "
            "not known. Log the model in eval mode"
        )
    query, key, value = (_wide(call[name]) for name in ("query", "key", "value"))
    if query.dim() > 2 and key.dim() > 2 and call.get("enable_gqa"):
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scale = call.get("scale")
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if call.get("is_causal"):
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(),
                                    -math.inf)  # fmt: skip
    mask = call.get("attn_mask")
    if mask is not None:
        is_choice = mask.dtype is torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if is_choice else scores + _wide(mask)
    return _weighted(scores, query, key, value)


def _weighted(scores: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Rebuilt:
    """The attention with these scores; a query that may look at nothing has the weights zero."""
    is_blind = scores.isneginf().all(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(is_blind, 0.0)
    sharpness = 1 + scores.masked_fill(scores.isinf(), 0.0).abs().amax(-1, keepdim=True)
    scale = weights @ value.abs() * sharpness
    return Rebuilt(weights, query, key, value, weights @ value, scale)


def _multi_head(call: Mapping[str, Any]) -> Rebuilt:
    """The attention of `nn.MultiheadAttention` on its fast path; the result is projected."""
    # torch calls it num_head here, and num_heads in an encoder layer.
    num_heads = call["num_head"] if "num_head" in call else call["num_heads"]
    weight, bias = _wide(call["qkv_weight"]).chunk(3), _wide(call["qkv_bias"]).chunk(3)
    given = [_wide(call[name]) for name in ("query", "key", "value")]
    query, key, value = (
        linear(tensor, own, shift).unflatten(-1, (num_heads, -1)).transpose(-3, -2)
        for tensor, own, shift in zip(given, weight, bias, strict=True)
    )
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    mask = call.get("mask")
    if mask is not None:
        scores = scores.masked_fill(_spread(mask != 0, call.get("mask_type")), -math.inf)
    found = _weighted(scores, query, key, value)
    joined = found.result.transpose(-3, -2).flatten(-2)
    result = linear(joined, _wide(call["proj_weight"]), _wide(call["proj_bias"]))
    return found._replace(result=result, scale=_largest(result))


def _spread(is_masked: Tensor, mask_type: int | None) -> Tensor:
    """A mask that fits the scores; of type 1, it says which keys of each example are padding."""
    return is_masked[:, None, None] if mask_type == 1 else is_masked


def _encoder_layer(call: Mapping[str, Any]) -> Rebuilt:
    """The attention in an `nn.TransformerEncoderLayer` on its fast path, and the layer's result."""
    source = _wide(call["src"])
    sizes, eps, is_first = (call["embed_dim"],), call["eps"], call["norm_first"]

    def norm(number: int, tensor: Tensor) -> Tensor:
        weight, bias = (_wide(call[f"norm_{part}_{number}"]) for part in ("weight", "bias"))
        return layer_norm(tensor, sizes, weight, bias, eps)

    given = norm(1, source) if is_first else source
    found = _multi_head({**call, "query": given, "key": given, "value": given})
    middle = source + found.result
    middle = middle if is_first else norm(1, middle)
    inner = linear(norm(2, middle) if is_first else middle, _wide(call["ffn_weight_1"]),
                   _wide(call["ffn_bias_1"]))  # fmt: skip
    active = gelu(inner) if call["use_gelu"] else relu(inner)
    result = middle + linear(active, _wide(call["ffn_weight_2"]), _wide(call["ffn_bias_2"]))
    result = result if is_first else norm(2, result)
    return found._replace(result=result, scale=_largest(result))


def _wide(tensor: Tensor) -> Tensor:
    """The same in float32 at least, in which kernels sum."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _largest(result: Tensor) -> Tensor:
    return result.abs().amax().expand_as(result)
