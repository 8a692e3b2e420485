"""FLOPs of whole models, against counts written out by hand and against torch's own counter."""

import importlib.util
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

import torchlens as tl
from benchmarks.zoo import SPECIMENS
from benchmarks.zoo.libraries import import_torchvision, import_transformers
from tests.networks import MLP, TinyGPT

# -- written out: two operations for each multiplication and the addition that follows it ----------


def of_resnet50() -> int:
    """Bottlenecks: 1×1 to a narrow width, 3×3 in it, 1×1 to four times the width."""
    total = 2 * 112 * 112 * 64 * 3 * 7 * 7
    channels, size = 64, 56
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            size_in, size = size, size // 2 if block == 0 and width > 64 else size
            total += 2 * size_in**2 * width * channels  # the stride is in the 3×3
            total += 2 * size**2 * width * width * 9
            total += 2 * size**2 * 4 * width * width
            if block == 0:
                total += 2 * size**2 * 4 * width * channels  # the shortcut
            channels = 4 * width
    return total + 2 * 2048 * 1000


def of_transformer(num_layers: int, length: int, width: int) -> int:
    """Queries, keys and values, the projection after attention, and a feed-forward layer of four
    times the width.
    """
    weights = 3 * width**2 + width**2 + 2 * 4 * width**2
    attention = 2 * length * width  # scores, and their product with the values
    return num_layers * 2 * length * (weights + attention)


def of_gpt2(length: int) -> int:
    return of_transformer(12, length, 768) + 2 * length * 768 * 50257


def of_vit_b_16() -> int:
    patches = 14 * 14
    return 2 * patches * 768 * 3 * 16 * 16 + of_transformer(12, patches + 1, 768) + 2 * 768 * 1000


def of_lstm(num_steps: int, batch: int, features: int, hidden: int) -> int:
    """Four gates; two layers, both directions."""
    first = 4 * hidden * (features + hidden)
    second = 4 * hidden * (2 * hidden + hidden)
    return 2 * num_steps * batch * 2 * (first + second)


def resnet50() -> tuple[nn.Module, Any, int]:
    return import_torchvision().models.resnet50(), torch.empty(1, 3, 224, 224), of_resnet50()


def vit_b_16() -> tuple[nn.Module, Any, int]:
    return import_torchvision().models.vit_b_16(), torch.empty(1, 3, 224, 224), of_vit_b_16()


def gpt2() -> tuple[nn.Module, Any, int]:
    transformers = import_transformers()
    tokens = torch.zeros(1, 128, dtype=torch.long)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config()), tokens, of_gpt2(128)


def lstm() -> tuple[nn.Module, Any, int]:
    return (
        nn.LSTM(64, 128, num_layers=2, bidirectional=True),
        torch.empty(30, 4, 64),
        of_lstm(30, 4, 64, 128),
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [resnet50, vit_b_16, gpt2, lstm])
def test_a_model_costs_what_was_worked_out_by_hand(make):
    needs = {lstm: "torch", gpt2: "transformers"}.get(make, "torchvision")
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}: pip install 'torchlens[zoo]'")
    with torch.device("meta"):  # shapes without numbers: nothing is computed
        model, x, expected = make()
    history = tl.get_model_metadata(model, x)
    assert history.flops_not_counted == {}
    assert history.total_flops == pytest.approx(expected, rel=0.01)
    assert history.total_flops == expected


# -- against torch ---------------------------------------------------------------------------------


def by_torch(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """Forward and backward by torch's counter, made to see what it does not (torch 2.13).

    Attention and LSTM in one kernel are not counted; and the weight of a grouped convolution is
    taken for a full one in backward.
    """
    rules = {torch.ops.aten.convolution_backward: convolution_backward}
    counter = FlopCounterMode(display=False, custom_mapping=rules)
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), counter:
            result = model(*args, **kwargs)
            forward = counter.get_total_flops()
            results = [
                tensor
                for tensor in torch.utils._pytree.tree_leaves(result)
                if isinstance(tensor, torch.Tensor)
            ]
            wanted = [tensor.sum() for tensor in results if tensor.requires_grad]
            if wanted:
                sum(wanted).backward()
    finally:
        torch._C._set_mkldnn_enabled(True)
    return forward, counter.get_total_flops() - forward


def convolution_backward(
    gradient, x, weight, _bias, _stride, _padding, _dilation, is_transposed, *rest, **_
):
    wanted = rest[2]
    return conv_flop_count(x, weight, gradient, is_transposed) * (wanted[0] + wanted[1])


def small_models() -> dict[str, tuple[nn.Module, Any]]:
    image = torch.rand(2, 4, 8, 8)
    frozen = MLP()
    frozen.fc1.requires_grad_(False)
    return {
        "conv2d": (nn.Conv2d(4, 6, 3, stride=2, padding=1), image),
        "dilated": (nn.Conv2d(4, 6, 3, dilation=2), image),
        "grouped": (nn.Conv2d(4, 6, 3, groups=2), image),
        "depthwise": (nn.Conv2d(4, 8, 3, groups=4), image),
        "same": (nn.Conv1d(4, 6, 5, padding="same"), torch.rand(2, 4, 9)),
        "unbatched": (nn.Conv1d(4, 6, 3), torch.rand(4, 9)),
        "conv3d": (nn.Conv3d(4, 6, 3), torch.rand(1, 4, 5, 5, 5)),
        "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), image),
        "transposed1d": (
            nn.ConvTranspose1d(4, 6, 3, output_padding=1, stride=2),
            torch.rand(2, 4, 9),
        ),
        "transposed3d": (nn.ConvTranspose3d(4, 6, 3), torch.rand(1, 4, 5, 5, 5)),
        "two convolutions": (
            nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 6, 3)),
            image,
        ),
        "linear": (nn.Linear(4, 5), torch.rand(2, 7, 4)),
        "an input with a gradient": (MLP(), torch.rand(2, 4, requires_grad=True)),
        "frozen weights": (frozen, torch.rand(2, 4)),
        "gpt": (TinyGPT(), torch.randint(10, (1, 6))),
        "lstm": (nn.LSTM(4, 5, num_layers=2, bidirectional=True), torch.rand(7, 2, 4)),
        "lstm with projections": (nn.LSTM(4, 5, num_layers=2, proj_size=3), torch.rand(7, 2, 4)),
        "lstm without biases": (nn.LSTM(4, 5, bias=False), torch.rand(7, 2, 4)),
        "lstm batch first": (
            nn.LSTM(4, 5, batch_first=True),
            torch.rand(2, 7, 4, requires_grad=True),
        ),
        "gru": (nn.GRU(4, 5, num_layers=2), torch.rand(7, 2, 4)),
        "rnn of one sequence": (nn.RNN(4, 5), torch.rand(7, 4)),
        "relu rnn": (nn.RNN(4, 5, nonlinearity="relu", bidirectional=True), torch.rand(7, 2, 4)),
        "lstm cell": (nn.LSTMCell(4, 5), torch.rand(2, 4)),
        "gru cell": (nn.GRUCell(4, 5), torch.rand(2, 4, requires_grad=True)),
        "rnn cell": (nn.RNNCell(4, 5), torch.rand(2, 4)),
        "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.rand(2, 5, 8)),
    }


@pytest.mark.parametrize("name", small_models())
def test_flops_agree_with_torch_forward_and_backward(name: str):
    model, x = small_models()[name]
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "LSTM with projections"
        )  # torch has no fast kernel for them
        history = tl.get_model_metadata(model, x)
    assert (history.total_flops, history.total_flops_backward) == by_torch(model, x)
    assert history.flops_not_counted == {}


SAMPLE = (
    "torch.nn/LSTM-packed", "torch.nn/MultiheadAttention-attn_mask", "torch.nn/Transformer-masked",
    "torchvision/mobilenet_v3_small", "torchvision/squeezenet1_1", "timm/test_mambaout",
    "timm/test_nfnet",
    "transformers/albert", "transformers/bert", "transformers/deepseek_v3", "transformers/encodec",
    "transformers/mamba",
    "torch_geometric/GAT", "torch_geometric/GCN",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_models_from_elsewhere_agree_with_torch(name: str):
    specimen = SPECIMENS[name]
    if importlib.util.find_spec(specimen.source) is None:
        pytest.skip(f"needs {specimen.source}: pip install 'torchlens[zoo]'")
    case = specimen.make()
    history = tl.get_model_metadata(case.model, list(case.args), case.kwargs)
    assert (history.total_flops, history.total_flops_backward) == by_torch(
        case.model, *case.args, **case.kwargs
    )
    assert history.flops_not_counted == {}


def test_the_fast_path_of_attention_costs_the_same():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.rand(2, 5, 8)
    slow, slow_attention = (
        tl.get_model_metadata(model, x),
        tl.get_model_metadata(attention, [x, x, x]),
    )
    with torch.no_grad():
        fast, fast_attention = (
            tl.get_model_metadata(model, x),
            tl.get_model_metadata(attention, [x, x, x]),
        )
    assert "transformerencoderlayerfwd" in {entry.layer_type for entry in fast}
    assert "nativemultiheadattention" in {entry.layer_type for entry in fast_attention}
    assert fast.total_flops == slow.total_flops > 0
    assert fast_attention.total_flops == slow_attention.total_flops > 0
