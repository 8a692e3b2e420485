"""The logit lens, the shares of blocks and paths, against the model's own end by hand."""

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.edit.architectures import ARCHITECTURES
from tests.edit.models import gpt
from torchlens import EditError, edits

Tensor = torch.Tensor


class Normed(nn.Module):
    """A language model with a last norm, whose attention and MLP add to a stream."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        body, _ = gpt(2)
        self.wte, self.h, self.norm = body.wte, body.h, norm
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


class WrittenOut(nn.Module):
    """A norm of several operations."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def layer_norm() -> nn.Module:
    norm = nn.LayerNorm(16)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


NORMS = {"layer": layer_norm, "rms": lambda: nn.RMSNorm(16), "written out": WrittenOut}


def normed(name: str) -> tuple[Normed, Tensor, tl.ModelHistory]:
    torch.manual_seed(0)
    model = Normed(NORMS[name]()).eval()
    ids = torch.randint(0, 20, (2, 6))
    return model, ids, tl.log_forward_pass(model, ids)


def metric(logits: Tensor) -> Tensor:
    return logits[0, -1, 3] - logits[1, -1, 5]


@pytest.mark.parametrize("name", NORMS)
def test_the_lens_is_the_end_of_the_model_after_each_block(name: str) -> None:
    model, _, history = normed(name)
    table = edits.logit_lens(history, token=2)
    final = history.output[:, 2].softmax(-1)
    for key in ("wte", "h.0", "h.1"):
        own = model.head(model.norm(history[key].tensor_contents))[:, 2].softmax(-1)
        rows = table[table["module"] == key]
        assert rows["top"].tolist() == own.argmax(-1).tolist()
        assert rows["probability"].tolist() == pytest.approx(own.amax(-1).tolist(), rel=1e-4)
        answers = own.gather(1, final.argmax(-1, keepdim=True))[:, 0]
        assert rows["answer"].tolist() == pytest.approx(answers.tolist(), rel=1e-4)
        divergences = (final * (final / own).log()).sum(-1)
        assert rows["divergence"].tolist() == pytest.approx(divergences.tolist(), abs=1e-5)
    assert table["site"].nunique() == 5


@pytest.mark.parametrize("name", NORMS)
def test_shares_add_up_and_are_linear_with_the_norm_as_it_was(name: str) -> None:
    model, _, history = normed(name)
    table = edits.direct_attribution(history, metric)
    assert table["share"].sum() == pytest.approx(metric(history.output).item(), abs=1e-5)
    assert table["module"].tolist() == ["", "wte", "h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp"]
    x, own = (history[key].tensor_contents for key in ("h.1", "h.0.mlp"))
    if name == "layer":
        own = (own - own.mean(-1, keepdim=True)) / (
            x.var(-1, keepdim=True, correction=0) + 1e-5
        ).sqrt()
        own = own * model.norm.weight
    else:
        epsilon = 1e-5 if name == "written out" else torch.finfo(torch.float32).eps
        own = own * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    expected = metric(own @ model.head.weight.T).item()
    assert table["share"][3] == pytest.approx(expected, rel=1e-3)


def test_a_model_without_residual_connections_needs_its_stream() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    with pytest.raises(EditError, match=r"has no residual connection\. Say where"):
        edits.logit_lens(history)
    table = edits.direct_attribution(history, lambda out: out[0, 1], stream="1")
    assert table["share"].sum() == pytest.approx(history.output[0, 1].item(), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit", "mamba"])
def test_shares_add_up_in_real_architectures(name: str) -> None:
    model, args, kwargs = ARCHITECTURES[name].make()
    history = tl.log_forward_pass(model, args, kwargs)

    def first(out: Tensor) -> Tensor:
        return out.flatten()[0] - out.flatten()[-1]

    value = first(history[history.output_layers[0]].tensor_contents).item()
    table = edits.direct_attribution(history, first)
    assert table["share"].sum() == pytest.approx(value, rel=1e-3, abs=1e-3)
    assert len(table) > 3
    assert (edits.logit_lens(history)["divergence"].tail(2).abs() < 1e-6).all()


def test_a_path_reaches_one_receiver_and_no_other() -> None:
    model, ids, history = normed("layer")
    other = tl.log_forward_pass(model, ids.flip(1))
    nodes = ["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp"]
    table = edits.path_patching(history, ["h.0.attn"], ["h.1.mlp"], other, metric, hold=nodes)
    own = {key: history[key].tensor_contents for key in ("wte", *nodes)}
    x = own["wte"] + other["h.0.attn"].tensor_contents + own["h.0.mlp"] + own["h.1.attn"]
    seen = model.h[1].mlp(model.h[1].ln_2(x))
    stream = history["h.1"].tensor_contents - own["h.1.mlp"] + seen
    expected = metric(model.head(model.norm(stream))).item()
    assert table["metric"][0] == pytest.approx(expected, rel=1e-4)
    assert table["metric"][0] != pytest.approx(metric(history.output).item(), rel=1e-4)
    assert table["control"][0] != pytest.approx(expected, rel=1e-4)
