"""The attention weights in the panel of the page."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchlens as tl
from torchlens._attention.attention import small_attention
from torchlens._page.page import explore


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.fixture(scope="module")
def history() -> tl.ModelHistory:
    torch.manual_seed(0)
    return tl.log_forward_pass(Attending(), 3 * torch.randn(2, 6, 8))


PIXELS = """[...document.querySelector('#panel .attention canvas').getContext('2d')
  .getImageData(0, 0, 6, 6).data].filter((_, i) => i % 4 === 0)"""


def test_the_panel_shows_the_attention_of_each_head(visit, history, tmp_path) -> None:
    explore(history, tmp_path / "attention.html")
    tab = visit(tmp_path / "attention.html")
    (title,) = [title for title in tab.titles() if "attention" in title]
    tab.click(title)
    panel = tab.page.locator("#panel .attention")
    assert "Head" in panel.inner_text()
    assert "6 queries down, 6 keys across" in panel.inner_text()
    seen = []
    for head in range(2):
        assert f"{head + 1} / 2" in panel.inner_text()
        reds = torch.tensor(tab.run(PIXELS)).reshape(6, 6)
        weights = history.attention("scaleddot", head).weights[0]
        hidden = reds[torch.ones(6, 6).triu(1).bool()]
        assert len(set(hidden.tolist())) == 1, "the masked keys have the colour of zero"
        assert reds[weights == weights.max()][0] != hidden[0]
        seen.append(reds)
        tab.page.get_by_label("Next head").click()
    assert not torch.equal(*seen)


def test_a_page_of_long_sequences_carries_thinned_pictures() -> None:
    history = tl.log_forward_pass(Attending(), torch.randn(1, 300, 8))
    data: Any = explore(history, None).html
    assert len(data) < 400_000
    (call,) = [e._entry for e in history.find("scaleddot*")]
    small, queries, keys = small_attention(history._log, call, 32)
    assert (tuple(small.shape), queries, keys) == ((2, 32, 32), 300, 300)
    places = torch.linspace(0, 299, 32).round().long()
    whole = history.attention("scaleddot").weights[0]
    torch.testing.assert_close(small, whole[:, places][:, :, places].detach())
