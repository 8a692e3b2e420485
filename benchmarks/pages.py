"""Opens the pages of fifteen models of many kinds in Chromium, and looks at them: python -m
benchmarks.pages [name ...]

For each: complaints and requests (none), the size beside the data, the time to open, text at least
11 px, no node over another (as opened, and with everything expanded), clicks that keep the node
under the pointer, and how long they take.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Browser, sync_playwright
from torch import nn

import torchlens as tl
from benchmarks.zoo.libraries import import_geometric, import_torchvision, import_transformers
from tests.networks import Model
from tests.page.conftest import _FLAGS, Tab, chromium
from torchlens._history.model_history import ModelHistory
from torchlens._page.page import explore

_MOST_CLICKS = 12
_OVERLAPS = """(() => {
  const all = [...torchlens.scene.nodes.values()], parent = torchlens.D.parts.parent, found = [];
  const holds = (box, i) => { while (i > box) i = parent[i]; return i === box; };
  all.sort((a, b) => a.y - b.y);
  for (let i = 0; i < all.length; i++) for (let j = i + 1; j < all.length && all[j].y < all[i].y + all[i].h; j++) {
    const a = all[i], b = all[j];
    if (a.x < b.x + b.w && b.x < a.x + a.w && !(a.isBox && holds(a.id, b.id)) && !(b.isBox && holds(b.id, a.id)))
      found.push(torchlens.title(a.id) + ' / ' + torchlens.title(b.id));
  }
  return found;
})()"""


def _torchvision(name: str, *shape: int) -> Callable[[], ModelHistory]:
    def make() -> ModelHistory:
        models = import_torchvision().models
        kinds = {"deeplabv3_resnet50": {"weights_backbone": None}}
        builder = getattr(models.segmentation if "deeplab" in name else models, name)
        return tl.log_forward_pass(
            builder(weights=None, **kinds.get(name, {})).eval(), torch.randn(1, 3, *shape)
        )

    return make


def _t5() -> ModelHistory:
    library = import_transformers()
    model = library.T5Model(
        library.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=6, num_heads=4, vocab_size=100)
    )
    ids = torch.randint(0, 100, (1, 9))
    return tl.log_forward_pass(
        model.eval(), [], {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    )


def _whisper() -> ModelHistory:
    library = import_transformers()
    config = library.WhisperConfig(
        d_model=64, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=100, max_source_positions=50,
        pad_token_id=0,
    )  # fmt: skip
    sound, ids = torch.randn(1, 80, 100), torch.randint(0, 100, (1, 5))
    return tl.log_forward_pass(
        library.WhisperModel(config).eval(), [], {"input_features": sound, "decoder_input_ids": ids}
    )


def _mixtral() -> ModelHistory:
    library = import_transformers()
    config = library.MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8, vocab_size=100,
    )  # fmt: skip
    return tl.log_forward_pass(library.MixtralModel(config).eval(), torch.randint(0, 100, (1, 9)))


class _TreeLSTM(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.leaf, self.gates, self.size = (
            nn.Linear(size, 2 * size),
            nn.Linear(2 * size, 5 * size),
            size,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tree(list(x.unbind(0)))[0]

    def tree(self, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if len(leaves) == 1:
            state, cell = self.leaf(leaves[0]).chunk(2, -1)
            return state, cell
        middle = len(leaves) // 2
        (one, first), (other, second) = self.tree(leaves[:middle]), self.tree(leaves[middle:])
        i, f, g, u, o = self.gates(torch.cat([one, other], -1)).chunk(5, -1)
        cell = (
            torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(f) * first + torch.sigmoid(g) * second
        )
        return torch.sigmoid(o) * torch.tanh(cell), cell


def _lstm_cell() -> ModelHistory:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], 16), torch.zeros(x.shape[0], 16)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state[0])

    return tl.log_forward_pass(
        Model(forward, cell=nn.LSTMCell(8, 16), head=nn.Linear(16, 4)), torch.randn(2, 50, 8)
    )


def _rnn() -> ModelHistory:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        state, found = torch.zeros(x.shape[0], 16), []
        for step in range(x.shape[1]):
            state = torch.tanh(self.inner(x[:, step]) + self.across(state))
            found.append(self.head(state))
        return torch.stack(found, 1)

    parts = {"inner": nn.Linear(8, 16), "across": nn.Linear(16, 16), "head": nn.Linear(16, 4)}
    return tl.log_forward_pass(Model(forward, **parts), torch.randn(2, 50, 8))


def _gat() -> ModelHistory:
    library = import_geometric()
    model = library.nn.GAT(8, 16, num_layers=3, out_channels=4, heads=4)
    return tl.log_forward_pass(model.eval(), [torch.randn(12, 8), torch.randint(0, 12, (2, 40))])


def _unet() -> ModelHistory:
    def twice(before: int, after: int) -> nn.Module:
        convs = [
            nn.Conv2d(before, after, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.ReLU(),
        ]
        return nn.Sequential(*convs)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([rise(x), kept.pop()], 1))
        return self.head(x)

    sizes = [8, 16, 32]
    parts = {
        "down": nn.ModuleList(twice(a, b) for a, b in zip([3, *sizes], sizes, strict=False)),
        "middle": twice(32, 64),
        "rise": nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in reversed(sizes)),
        "up": nn.ModuleList(twice(2 * size, size) for size in reversed(sizes)),
        "head": nn.Conv2d(8, 2, 1),
    }
    return tl.log_forward_pass(Model(forward, **parts), torch.randn(1, 3, 32, 32))


def _many_modules() -> ModelHistory:
    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.fc, self.number = nn.Linear(4, 4), number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fc(x)
            for step in range(10 + self.number % 3):
                y = torch.sin(y * (step + self.number))
            return x + y

    stages = [
        nn.Sequential(*(Block(7 * stage + number) for number in range(50))) for stage in range(20)
    ]
    return tl.log_forward_pass(nn.Sequential(*stages), torch.randn(2, 4))


def _flat() -> ModelHistory:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for step in range(10_000):
            x = torch.sin(x + step)
        return x

    return tl.log_forward_pass(Model(forward), torch.randn(2, 4))


def _failing() -> ModelHistory:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 16)), nn.Sequential(nn.Linear(8, 8))
    )
    try:
        return tl.log_forward_pass(model, torch.randn(2, 4))
    except RuntimeError as error:
        history: ModelHistory = error.partial_history  # type: ignore[attr-defined]  # torchlens puts it there
        return history


MODELS: dict[str, Callable[[], ModelHistory]] = {
    "swin_v2": _torchvision("swin_v2_t", 64, 64),
    "densenet": _torchvision("densenet121", 64, 64),
    "deeplab": _torchvision("deeplabv3_resnet50", 64, 64),
    "efficientnet": _torchvision("efficientnet_b0", 64, 64),
    "t5": _t5,
    "whisper": _whisper,
    "mixtral": _mixtral,
    "tree_lstm": lambda: tl.log_forward_pass(_TreeLSTM(), torch.randn(9, 16)),
    "lstm_cell": _lstm_cell,
    "rnn": _rnn,
    "gat": _gat,
    "unet": _unet,
    "modules_24k": _many_modules,
    "flat_20k": _flat,
    "failing": _failing,
}


def look_at(browser: Browser, history: ModelHistory, path: Path) -> dict[str, Any]:
    """What the page of a history is like."""
    text = explore(history, path).html
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    page = browser.new_page(viewport={"width": 1600, "height": 1000})
    tab = Tab(page, path)
    page.goto(path.as_uri())
    found: dict[str, Any] = {
        "operations": history.num_operations,
        "KB beside data": round(
            len(text.encode()) / 1024 - len(data.group(1).encode() if data else b"") / 1024
        ),
        "open ms": round(tab.run("torchlens.timings.open")),
        "nodes": tab.run("torchlens.shown()"),
        "text px": round(12 * tab.run("torchlens.state.view.k"), 1),
        "overlaps": tab.run(_OVERLAPS),
    }
    found |= _click(tab)
    found["expand all ms"] = round(
        tab.run(
            "(() => { const t = performance.now(); torchlens.openTo(99); return performance.now() "
            "- t; })()"
        )
    )
    found["nodes then"] = tab.run("torchlens.shown()")
    found["overlaps"] += tab.run(_OVERLAPS)
    found["complaints"] = tab.complaints
    found["requests"] = [
        url for url in tab.requests if not url.startswith(("data:", path.as_uri()))
    ]
    page.close()
    return found


def _click(tab: Tab) -> dict[str, Any]:
    """Opens boxes one after the other, as they stand on the stage, and looks whether they stay
    under the pointer.
    """
    kept = clicks = 0
    slowest = 0.0
    tried: set[int] = set()
    while clicks < _MOST_CLICKS:
        boxes = tab.run("""[...torchlens.scene.nodes.values()].filter(n => !n.isBox && document.querySelector(
          `[data-id="${n.id}"][aria-expanded=false]`)).map(n => ({id: n.id, ...torchlens.screen(n.id)}))""")
        seen = [
            box
            for box in boxes
            if box["id"] not in tried
            and 60 < box["y"] < 950
            and 20 < box["x"] + box["w"] / 2 < 1200
        ]
        if not seen:
            break
        box = seen[clicks % len(seen)]
        tried.add(box["id"])
        x, y = box["x"] + box["w"] * 0.6, box["y"] + min(10, box["h"] / 3)
        tab.page.mouse.click(x, y)
        now = tab.run(f"torchlens.screen({box['id']})")
        clicks += 1
        slowest = max(slowest, tab.run("torchlens.timings.click"))
        kept += bool(
            now and now["x"] <= x <= now["x"] + now["w"] and now["y"] <= y <= now["y"] + 42
        )
    return {"clicks kept": f"{kept} of {clicks}", "slowest click ms": round(slowest, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *MODELS])
    wanted = parser.parse_args().names or list(MODELS)
    is_well = True
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium(), args=_FLAGS)
        for name in wanted:
            torch.manual_seed(0)
            found = look_at(browser, MODELS[name](), Path(folder) / f"{name}.html")
            kept, clicks = map(int, found["clicks kept"].split(" of "))
            wrong = (
                found["complaints"]
                or found["requests"]
                or found["overlaps"]
                or found["text px"] < 11
            )
            is_well = is_well and not (wrong or kept < clicks or found["KB beside data"] > 300)
            print(
                name,
                "  ".join(f"{key}: {value}" for key, value in found.items() if value != []),
                flush=True,
            )
        browser.close()
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
