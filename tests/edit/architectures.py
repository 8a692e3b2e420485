"""Small models of real architectures, and where their heads are in the modules around them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.zoo.libraries import import_timm, import_torchvision, import_transformers

Tensor = torch.Tensor


class Unet(nn.Module):
    """A diffusion model: a time embedding, attention over pixels, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.first = nn.Linear(4, 8), nn.Conv2d(3, 8, 3, padding=1)
        self.down, self.norm = nn.Conv2d(8, 8, 3, 2, 1), nn.GroupNorm(2, 8)
        self.qkv, self.proj = nn.Conv2d(8, 24, 1), nn.Conv2d(8, 8, 1)
        self.up, self.last = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.tensor([1.0, 0.1])
        time = functional.silu(self.time(torch.cat([angles.sin(), angles.cos()], 1)))
        skip = functional.silu(self.first(x)) + time[:, :, None, None]
        y = self.down(skip)
        q, k, v = self.qkv(self.norm(y)).flatten(2).view(len(x), 3, 2, 4, -1).mT.unbind(1)
        mixed = functional.scaled_dot_product_attention(q, k, v).mT.reshape(y.shape)
        y = y + self.proj(mixed)
        result: Tensor = self.last(torch.cat([self.up(y), skip], 1))
        return result


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(12, 20)
        self.rnn = nn.LSTM(8, 12, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        values, (state, _) = self.rnn(self.embed(ids))
        result: Tensor = self.head(values + state[-1][:, None])
        return result


class Attention(NamedTuple):
    """An attention, and the modules whose inputs or outputs hold its heads, 8 elements each.

    `q`, `k` and `v` are a module with the place of head 0 in what it returns; `out` is given the
    heads.
    """

    address: str
    q: tuple[str, int]
    k: tuple[str, int]
    v: tuple[str, int]
    out: str
    num_keys: int = 4


class Architecture(NamedTuple):
    make: Callable[[], tuple[nn.Module, list[Any], dict[str, Any]]]
    block: str
    attention: Attention | None = None


def _seeded(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model.eval()


def _ids(*shape: int) -> Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(1))


def _language(name: str, **config: Any) -> Callable[[], Any]:
    def make() -> tuple[nn.Module, list[Any], dict[str, Any]]:
        t = import_transformers()
        own = getattr(t, f"{name}Config")(vocab_size=50, **config)
        kind = {"T5": "ForConditionalGeneration", "GPT2": "LMHeadModel", "Bert": "Model"}
        model = getattr(t, name + kind.get(name, "ForCausalLM"))(own)
        given = {"decoder_input_ids": _ids(2, 4)} if name == "T5" else {}
        return _seeded(model), [], {"input_ids": _ids(2, 6), "use_cache": False} | given

    return make


def _vit() -> tuple[nn.Module, list[Any], dict[str, Any]]:
    model = import_timm().create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=4,
        num_classes=5,
    )  # fmt: skip
    return _seeded(model), [_image(16)], {}


def _resnet() -> tuple[nn.Module, list[Any], dict[str, Any]]:
    model = import_torchvision().models.ResNet(
        import_torchvision().models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5
    )
    return _seeded(model), [_image(32)], {}


def _image(size: int) -> Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def _unet() -> tuple[nn.Module, list[Any], dict[str, Any]]:
    return _seeded(Unet()), [_image(8), torch.tensor([1.0, 7.0])], {}


def _fused(address: str, projection: str, out: str) -> Attention:
    name = f"{address}.{projection}"
    return Attention(address, (name, 0), (name, 32), (name, 64), f"{address}.{out}")


def _separate(address: str, q: str, k: str, v: str, out: str, num_keys: int = 4) -> Attention:
    q, k, v = (f"{address}.{name}" for name in (q, k, v))
    return Attention(address, (q, 0), (k, 0), (v, 0), out, num_keys)


_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = "model.layers.1.self_attn"
_BERT = "encoder.layer.1.attention"
_T5 = "decoder.block.1.layer.1.EncDecAttention"
ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        _language("GPT2", n_layer=2, n_head=4, n_embd=32, n_positions=40), "transformer.h.1",
        _fused("transformer.h.1.attn", "c_attn", "c_proj"),
    ),
    "llama": Architecture(
        _language("Llama", **_SIZES, num_key_value_heads=2, intermediate_size=48),
        "model.layers.1",
        _separate(_LLAMA, "q_proj", "k_proj", "v_proj", f"{_LLAMA}.o_proj", 2),
    ),
    "bert": Architecture(
        _language("Bert", **_SIZES, intermediate_size=48), "encoder.layer.1",
        _separate(f"{_BERT}.self", "query", "key", "value", f"{_BERT}.output.dense"),
    ),
    "t5": Architecture(
        _language("T5", d_model=32, num_heads=4, d_kv=8, num_layers=2, d_ff=48,
                  decoder_start_token_id=0),
        "decoder.block.1", _separate(_T5, "q", "k", "v", f"{_T5}.o"),
    ),
    "vit": Architecture(_vit, "blocks.1", _fused("blocks.1.attn", "qkv", "proj")),
    "mamba": Architecture(
        _language("Mamba", hidden_size=32, state_size=4, num_hidden_layers=2),
        "backbone.layers.1",
    ),
    "resnet": Architecture(_resnet, "layer2.0"),
    "unet": Architecture(_unet, "up"),
    "lstm": Architecture(lambda: (_seeded(Recurrent()), [_ids(2, 6) % 20], {}), "rnn"),
}  # fmt: skip
