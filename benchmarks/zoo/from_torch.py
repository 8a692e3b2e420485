"""torch.nn itself: recurrent networks, attention and Transformers with their options, and layers of
every kind.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.specimen import Case, Specimen

__all__ = ["SPECIMENS"]

# -- recurrent
# --------------------------------------------------------------------------------------------------

_RECURRENT_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "bidirectional": {"bidirectional": True},
    "two_layers": {"num_layers": 2},
    "two_layers_dropout": {"num_layers": 2, "dropout": 0.3},
    "no_bias": {"bias": False},
}


def _recurrent(kind: str, option: str) -> Case:
    model = getattr(nn, kind)(8, 16, **_RECURRENT_OPTIONS[option])
    return Case(model, (torch.randn(5, 3, 8),))


def _recurrent_relu() -> Case:
    return Case(nn.RNN(8, 16, nonlinearity="relu"), (torch.randn(5, 3, 8),))


def _lstm_projected() -> Case:
    return Case(nn.LSTM(8, 16, proj_size=4), (torch.randn(5, 3, 8),))


def _lstm_with_state() -> Case:
    state = (torch.randn(1, 3, 16), torch.randn(1, 3, 16))
    return Case(nn.LSTM(8, 16), (torch.randn(5, 3, 8), state))


class _Packed(nn.Module):
    """An RNN over sequences of different lengths."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(8, 16, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        result, _ = self.rnn(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(result, batch_first=True)
        return padded


def _packed(kind: str) -> Case:
    return Case(_Packed(kind), (torch.randn(3, 5, 8), torch.tensor([3, 5, 2])))


class _CellLoop(nn.Module):
    """A cell unrolled by hand."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: Any = None
        for step in x:
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


def _cell(kind: str) -> Case:
    return Case(_CellLoop(kind), (torch.randn(6, 3, 8),))


# -- attention
# --------------------------------------------------------------------------------------------------

_ATTENTION_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "batch_first": ({"batch_first": True}, {}),
    "no_weights": ({"batch_first": True}, {"need_weights": False}),
    "weights_per_head": ({}, {"average_attn_weights": False}),
    "bias_kv": ({"add_bias_kv": True}, {}),
    "zero_attn": ({"add_zero_attn": True}, {}),
    "no_bias": ({"bias": False}, {}),
    "other_kdim": ({"kdim": 12, "vdim": 20}, {}),
    "dropout": ({"dropout": 0.2}, {}),
    "key_padding_mask": ({}, {"key_padding_mask": "padding"}),
    "attn_mask": ({}, {"attn_mask": "causal"}),
    "causal": ({}, {"attn_mask": "causal", "is_causal": True, "need_weights": False}),
}


def _attention(option: str) -> Case:
    options, call = _ATTENTION_OPTIONS[option]
    model = nn.MultiheadAttention(16, 4, **options)
    keys, values = (
        torch.randn(5, 3, options.get("kdim", 16)),
        torch.randn(5, 3, options.get("vdim", 16)),
    )
    num_keys, num_samples = (3, 5) if options.get("batch_first") else (5, 3)
    masks = {
        "padding": torch.zeros(num_samples, num_keys, dtype=torch.bool).index_fill_(
            1, torch.tensor([num_keys - 1]), True
        ),
        "causal": torch.triu(torch.ones(num_keys, num_keys, dtype=torch.bool), 1),
    }
    kwargs = {
        name: masks[value] if isinstance(value, str) else value for name, value in call.items()
    }
    query = torch.randn(5, 3, 16)
    return Case(model, (query, keys, values), kwargs)


_TRANSFORMER_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "norm_first": {"norm_first": True},
    "gelu": {"activation": "gelu"},
    "no_bias": {"bias": False},
}


def _transformer(option: str) -> Case:
    model = nn.Transformer(16, 4, 2, 2, 32, **_TRANSFORMER_OPTIONS[option])
    return Case(model, (torch.randn(5, 5, 16), torch.randn(5, 5, 16)))


def _transformer_masked() -> Case:
    model = nn.Transformer(16, 4, 2, 2, 32, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    kwargs = {
        "tgt_mask": mask,
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
        "tgt_is_causal": True,
    }
    return Case(model, (torch.randn(3, 5, 16), torch.randn(3, 6, 16)), kwargs)


def _encoder(nested: bool, padded: bool) -> Case:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    return Case(
        model, (torch.randn(3, 5, 16),), {"src_key_padding_mask": padding} if padded else {}
    )


def _decoder() -> Case:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32), 2)
    return Case(model, (torch.randn(4, 3, 16), torch.randn(5, 3, 16)))


# -- layers of every kind
# ----------------------------------------------------------------------------------------------


def _all_activations() -> Case:
    kinds = [
        nn.CELU(), nn.ELU(), nn.GELU(), nn.GELU("tanh"), nn.Hardshrink(), nn.Hardsigmoid(),
        nn.Hardswish(),
        nn.Hardtanh(), nn.LeakyReLU(), nn.LogSigmoid(), nn.LogSoftmax(-1), nn.Mish(), nn.PReLU(),
        nn.RReLU(),
        nn.ReLU(), nn.ReLU6(), nn.SELU(), nn.SiLU(), nn.Sigmoid(), nn.Softmax(-1), nn.Softmin(-1),
        nn.Softplus(),
        nn.Softshrink(), nn.Softsign(), nn.Tanh(), nn.Tanhshrink(), nn.Threshold(0.1, 0.0),
    ]  # fmt: skip
    return Case(nn.Sequential(*kinds), (torch.randn(4, 6),))


def _inplace_activations() -> Case:
    kinds = [
        nn.ReLU(True), nn.LeakyReLU(0.1, True), nn.ELU(1.0, True), nn.Hardtanh(inplace=True),
        nn.SiLU(True),
        nn.Mish(True), nn.Hardswish(True), nn.SELU(True), nn.CELU(1.0, True), nn.Threshold(0.0, 0.1,
        True),
    ]  # fmt: skip
    return Case(nn.Sequential(nn.Linear(6, 6), *kinds), (torch.randn(4, 6),))


def _all_norms() -> Case:
    kinds = [
        nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True),
        nn.InstanceNorm2d(8, track_running_stats=True), nn.LayerNorm([8, 6, 6]),
        nn.LocalResponseNorm(3),
        nn.RMSNorm([8, 6, 6]), nn.Dropout2d(0.2), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1),
    ]  # fmt: skip
    return Case(nn.Sequential(*kinds), (torch.randn(4, 8, 6, 6),))


def _all_convolutions() -> Case:
    kinds = [
        nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8, padding="same"),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"), nn.ConvTranspose2d(8, 8, 2,
        stride=2),
        nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ChannelShuffle(2), nn.Upsample(scale_factor=2),
        nn.ReflectionPad2d(1), nn.ZeroPad2d(1), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.LPPool2d(2, 2),
        nn.AdaptiveMaxPool2d(4), nn.FractionalMaxPool2d(2, output_size=3), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    ]  # fmt: skip
    return Case(nn.Sequential(*kinds), (torch.randn(2, 3, 32, 32),))


def _sequences() -> Case:
    kinds = [
        nn.Conv1d(4, 8, 3),
        nn.MaxPool1d(2),
        nn.BatchNorm1d(8),
        nn.ConvTranspose1d(8, 4, 3),
        nn.AdaptiveAvgPool1d(5),
    ]
    return Case(nn.Sequential(*kinds), (torch.randn(2, 4, 20),))


def _volumes() -> Case:
    kinds = [
        nn.Conv3d(2, 4, 3),
        nn.BatchNorm3d(4),
        nn.MaxPool3d(2),
        nn.ConvTranspose3d(4, 2, 2),
        nn.AdaptiveAvgPool3d(2),
    ]
    return Case(nn.Sequential(*kinds), (torch.randn(2, 2, 8, 8, 8),))


class _Unpooling(nn.Module):
    """Max pooling that returns its indices, and its reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled, indices = self.pool(x)
        return self.unpool(pooled, indices)


class _Embeddings(nn.Module):
    """Lookups of both kinds, and what compares their results."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(20, 8, padding_idx=0)
        self.bag = nn.EmbeddingBag(20, 8, mode="mean")
        self.bilinear = nn.Bilinear(8, 8, 8)
        self.cosine = nn.CosineSimilarity()
        self.distance = nn.PairwiseDistance()

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, bag = self.one(ids).mean(1), self.bag(ids)
        mixed = self.bilinear(mean, bag)
        return self.cosine(mean, mixed), self.distance(bag, mixed)


class _Losses(nn.Module):
    """Losses as part of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5)
        self.classified = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.regressed = nn.ModuleList(
            [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.PoissonNLLLoss()]
        )
        self.aligned = nn.CTCLoss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.head(x)
        total = self.classified(scores, labels) + sum(
            loss(scores, targets) for loss in self.regressed
        )
        steps = scores.log_softmax(-1).unsqueeze(1).expand(-1, 1, -1)
        lengths = torch.tensor([len(x)]), torch.tensor([2])
        return total + self.aligned(steps, labels[None, :2].clamp(min=1), *lengths)


def _adaptive_softmax() -> Case:
    return Case(
        nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]),
        (torch.randn(6, 8), torch.randint(0, 20, (6,))),
    )


def _parametrized() -> Case:
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)),
    )
    return Case(model, (torch.randn(4, 6),))


def _fold() -> Case:
    model = nn.Sequential(
        nn.Unfold(2, stride=2),
        nn.Fold((8, 8), 2, stride=2),
        nn.Flatten(1),
        nn.Unflatten(1, (3, 64)),
    )
    return Case(model, (torch.randn(2, 3, 8, 8),))


_LAYERS: dict[str, Any] = {
    "activations": _all_activations,
    "activations_inplace": _inplace_activations,
    "norms": _all_norms,
    "convolutions": _all_convolutions,
    "sequences": _sequences,
    "volumes": _volumes,
    "unpooling": lambda: Case(_Unpooling(), (torch.randn(2, 3, 8, 8),)),
    "embeddings": lambda: Case(_Embeddings(), (torch.randint(0, 20, (3, 5)),)),
    "losses": lambda: Case(
        _Losses(), (torch.randn(6, 8), torch.randint(0, 5, (6,)), torch.randn(6, 5))
    ),
    "adaptive_softmax": _adaptive_softmax,
    "parametrizations": _parametrized,
    "fold": _fold,
}
_KINDS = ("RNN", "LSTM", "GRU")

SPECIMENS = (
    *(
        Specimen("torch.nn", f"{kind}-{option}", partial(_recurrent, kind, option))
        for kind in _KINDS
        for option in _RECURRENT_OPTIONS
    ),
    Specimen("torch.nn", "RNN-relu", _recurrent_relu),
    Specimen("torch.nn", "LSTM-projected", _lstm_projected),
    Specimen("torch.nn", "LSTM-with_state", _lstm_with_state),
    *(Specimen("torch.nn", f"{kind}-packed", partial(_packed, kind)) for kind in _KINDS),
    *(
        Specimen("torch.nn", kind, partial(_cell, kind), is_recurrent=True)
        for kind in ("RNNCell", "LSTMCell", "GRUCell")
    ),
    *(
        Specimen(
            "torch.nn",
            f"MultiheadAttention-{option}",
            partial(_attention, option),
            is_recurrent=False,
        )
        for option in _ATTENTION_OPTIONS
    ),
    *(
        Specimen(
            "torch.nn", f"Transformer-{option}", partial(_transformer, option), is_recurrent=False
        )
        for option in _TRANSFORMER_OPTIONS
    ),
    Specimen("torch.nn", "Transformer-masked", _transformer_masked, is_recurrent=False),
    Specimen("torch.nn", "TransformerEncoder", partial(_encoder, False, False), is_recurrent=False),
    Specimen(
        "torch.nn", "TransformerEncoder-padded", partial(_encoder, False, True), is_recurrent=False
    ),
    Specimen(
        "torch.nn", "TransformerEncoder-nested", partial(_encoder, True, True), is_recurrent=False
    ),
    Specimen("torch.nn", "TransformerDecoder", _decoder, is_recurrent=False),
    *(Specimen("torch.nn", name, make) for name, make in _LAYERS.items()),
)
