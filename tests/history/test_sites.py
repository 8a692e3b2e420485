"""Sites: which there are, which entry and which part each means, and what reading and writing do."""

from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._history.sites import Place, Site, Sites


class Attention(nn.Module):
    """Four heads for queries, two for keys and values, from one fused projection."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 32)
        self.out = nn.Linear(16, 16)
        self.is_fused = is_fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split([16, 8, 8], -1)
        q, k, v = (t.view(*t.shape[:2], -1, 4).transpose(1, 2) for t in (q, k, v))
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(len(x), 4, -1, 4) for t in (k, v))
        if self.is_fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            weights = (q @ k.transpose(2, 3) / 2).softmax(-1)
            weights = torch.where(weights.isnan(), torch.zeros(()), weights)
            mixed = nn.functional.dropout(weights, 0.1, self.training) @ v
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return result


class Block(nn.Module):
    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.attn = Attention(is_fused)
        self.up, self.act, self.down = nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        result: torch.Tensor = x + self.down(self.act(self.up(x)))
        return result


def logged(is_fused: bool = True) -> tuple[tl.ModelHistory, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(is_fused), Block(is_fused)).eval()
    return tl.log_forward_pass(model, torch.rand(3, 5, 16)), model


def place(history: tl.ModelHistory, key: Any, **parts: Any) -> Place:
    return Sites(history._log, history._lookup).place(Site(key, **parts))


def value(history: tl.ModelHistory, found: Place) -> torch.Tensor:
    return found.read(history._log.value(found.entry))


@pytest.mark.parametrize("is_fused", [True, False])
def test_heads_and_what_an_attention_reads_are_slices_of_the_projections(is_fused: bool) -> None:
    history, _ = logged(is_fused)
    projected = history["0.attn.qkv"].tensor_contents
    merged = history["0.attn.out"]
    before = history[merged.parent_layers[0]].tensor_contents
    for head in range(4):
        own = slice(4 * head, 4 * head + 4)
        assert torch.equal(value(history, place(history, "0.attn", head=head)), before[..., own])
        q = value(history, place(history, "0.attn", part="q", head=head))
        assert torch.equal(q, projected[..., own])
    for head in range(2):  # as the projection makes them, before they are repeated
        own = slice(16 + 4 * head, 20 + 4 * head)
        k = value(history, place(history, "0.attn", part="k", head=head))
        assert torch.equal(k, projected[..., own])
        v = value(history, place(history, "0.attn", part="v", head=head, token=-1))
        assert torch.equal(v, projected[:, -1, 24 + 4 * head : 28 + 4 * head])


def test_before_and_after_a_block_are_what_it_was_given_and_what_it_returned() -> None:
    history, _ = logged()
    assert place(history, "1", part="before").entry == history["0"]._entry
    assert place(history, "1", part="after").entry == history["1"]._entry


def test_the_list_has_every_head_of_every_attention_and_the_residual_stream() -> None:
    history, _ = logged(is_fused=False)
    assert [str(site) for site in history.sites("head", within="1.attn")] == [
        f"1.attn[head {number}]" for number in range(4)
    ]
    assert len(history.sites("q")) == 8
    assert len(history.sites("k")) == len(history.sites("v")) == 4
    assert [site.key for site in history.sites("residual")] == [
        "input_1_0",
        *(each.end.layer_label for each in history.residuals()),
    ]
    assert [site.key for site in history.sites("module", within="0.*")][:2] == [
        "0.attn",
        "0.attn.qkv",
    ]
    assert len(history.sites("neuron")) == 48
    kinds: list[Any] = ["module", "residual", "head", "q", "k", "v"]
    assert len(history.sites()) == sum([len(history.sites(kind)) for kind in kinds])


def test_channels_are_listed_for_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    history = tl.log_forward_pass(model, torch.rand(2, 3, 8, 8))
    sites = history.sites("channel")
    assert [str(site) for site in sites][:2] == ["conv2d_1_1[channel 0]", "conv2d_1_1[channel 1]"]
    found = place(history, "0", channel=2)
    assert torch.equal(value(history, found), history["0"].tensor_contents[:, 2])


@pytest.mark.parametrize(
    "parts",
    [
        {"head": 2},
        {"head": [0, 3], "token": slice(1, 3)},
        {"head": 1, "token": -1},
        {"index": (slice(None), 0, 1)},
    ],
)
def test_writing_changes_the_part_alone_and_reading_gives_it_back(parts: dict[str, Any]) -> None:
    history, _ = logged()
    found = place(history, "0.attn", **parts)
    whole = history._log.value(found.entry)
    before = whole.clone()
    written = found.write(whole, torch.zeros_like(found.read(whole)))
    assert torch.equal(whole, before)
    assert not found.read(written).any()
    assert torch.equal(found.write(written, found.read(whole)), whole)


def test_a_subspace_is_read_as_coordinates_and_written_without_the_rest() -> None:
    history, _ = logged()
    torch.manual_seed(1)
    directions = torch.randn(2, 16)
    found = place(history, "0", directions=directions)
    whole = history["0"].tensor_contents
    assert found.read(whole).shape == (3, 5, 2)
    written = found.write(whole, torch.zeros(3, 5, 2))
    torch.testing.assert_close(found.read(written), torch.zeros(3, 5, 2), atol=1e-5, rtol=0)
    basis, _ = torch.linalg.qr(directions.T)
    torch.testing.assert_close(written, whole - whole @ basis @ basis.T, atol=1e-5, rtol=1e-4)


def test_gradients_flow_through_what_is_written() -> None:
    history, _ = logged()
    part = torch.zeros(3, 5, 4, requires_grad=True)
    found = place(history, "0.attn", head=0)
    found.write(history._log.value(found.entry), part).sum().backward()
    assert part.grad is not None
    assert part.grad.eq(1).all()


def test_errors_say_what_a_site_lacks() -> None:
    history, _ = logged()
    with pytest.raises(KeyError, match=r"'0\.up' has no attention\. A head is a slice"):
        place(history, "0.up", head=1)
    with pytest.raises(KeyError, match="which does not show its weights"):
        place(history, "0.attn", part="weights")
    with pytest.raises(IndexError, match=r"0\.attn\[head 4\] has 4 heads, numbered 0 to 3"):
        value(history, place(history, "0.attn", head=4))
    with pytest.raises(KeyError, match="Closest"):
        place(history, "0.atn")
    with pytest.raises(TypeError, match="head must be a number, a slice or a list"):
        Site("0.attn", head="three")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Give index= or the names"):
        Site("0.attn", head=1, index=0)
    with pytest.raises(ValueError, match="kind must be"):
        history.sites("heads")  # type: ignore[arg-type]
