"""What belongs to a log: operations do not vanish because the boundary on their side holds no
tensor.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import Model


class Captioner(nn.Module):
    """Text in, text out: a loop that picks one character after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, text: str) -> str:
        ids = torch.tensor([[ord(letter) % 50 for letter in text]])
        answer = ""
        for _ in range(3):
            best = self.head(self.embed(ids).mean(1)).argmax(-1)
            if best == 51:
                break
            answer += chr(40 + best.item())
            ids = torch.cat([ids, best[None]], 1)
        return answer


class Policy(nn.Module):
    """An observation in, the number of an action out; what it thinks the state is worth stays
    inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 3), nn.Linear(4, 1)
        self.value: Any = None

    def forward(self, observation: np.ndarray) -> int:
        state = torch.as_tensor(observation, dtype=torch.float32)
        self.value = self.critic(state)
        return int(
            torch.distributions.Categorical(logits=self.actor(state), validate_args=False).sample()
        )


MODELS = {"text": (Captioner, "hello"), "policy": (Policy, np.ones(4))}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_tensors_going_in_or_out_is_logged_whole(name: str) -> None:
    kind, given = MODELS[name]
    history = tl.log_forward_pass(kind(), [given])
    assert history.num_operations_left_out == 0
    assert history.input_layers == history.output_layers == []
    assert history.total_flops > 0
    assert {"text": "embed:3", "policy": "critic"}[name] in history
    assert len(history) == history.num_tensors_total > 5


@pytest.mark.parametrize("name", MODELS)
def test_such_a_log_can_be_looked_at_in_every_way(name: str, tmp_path: Path) -> None:
    kind, given = MODELS[name]
    model = kind()
    history = tl.log_forward_pass(model, [given], random_seed=1)
    for entry in history:
        assert entry.layer_label in str(entry)
        assert not entry.has_input_ancestor
        assert not entry.is_output_ancestor
    text = str(history)
    assert "No tensor goes in or comes out; Python reads the values of " in text
    assert "left out" not in text
    assert len(history.to_pandas()) == len(history)
    assert "FLOPs" in str(history.summary())
    assert len(json.loads(history.to_json())["layers"]) == len(history.layer_labels_no_pass)
    page = history.explore(tmp_path / "page.html")
    assert Path(str(page.path)).stat().st_size > 10_000
    for how in ("rolled", "unrolled"):
        history.render_graph(
            how, vis_outpath=str(tmp_path / f"{how}.gv"), vis_save_only=True, vis_fileformat="svg"
        )
        assert "linear" in (tmp_path / f"{how}.gv").read_text()
    assert tl.validate_saved_activations(model, [given], random_seed=1)


def test_the_condition_that_ends_a_text_is_told_from_what_writes_it() -> None:
    history = tl.log_forward_pass(Captioner(), "hello")
    assert [entry.layer_type for entry in history if entry.in_cond_branch] == ["eq"] * 3
    assert history.conditional_branch_edges == [
        (f"argmax_1_5:{n}", f"eq_1_6:{n}") for n in (1, 2, 3)
    ]


def test_printing_says_which_side_holds_no_tensor() -> None:
    inward = tl.log_forward_pass(Model(lambda self, x: x.sum().item()), torch.rand(3))
    assert "\n\tNo tensor comes out; Python reads the values of sum_1_1.\n" in str(inward)
    outward = tl.log_forward_pass(Model(lambda self, xs: torch.tensor(xs) * 2), [[1.0, 2.0]])
    assert "\n\tNo tensor goes in.\n" in str(outward)
    both = tl.log_forward_pass(Model(lambda self, x: x * 2), torch.rand(3))
    assert "No tensor" not in str(both)


def test_nothing_is_left_out_where_one_side_holds_no_tensor() -> None:
    def inward(self: Model, x: torch.Tensor) -> float:
        noise = torch.ones(3) * 2
        return (x.sum() + 1).item() + noise.sum().item()

    history = tl.log_forward_pass(Model(inward), torch.rand(3))
    assert [entry.layer_type for entry in history] == ["input", "ones", "mul", "sum", "add", "sum"]

    def outward(self: Model, words: list[str]) -> torch.Tensor:
        lengths = torch.tensor([len(word) for word in words])
        self.longest = lengths.max()
        return self.embed(lengths)

    history = tl.log_forward_pass(Model(outward, embed=nn.Embedding(9, 2)), [["a", "bc"]])
    assert [entry.layer_type for entry in history] == ["tensor", "max", "embedding", "output"]
    assert history.num_operations_left_out == 0


def test_what_a_model_returns_as_numbers_beside_tensors_is_kept() -> None:
    def forward(self: Model, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        torch.zeros(2) + 1  # not read
        scores = self.fc(torch.ones(4))
        return x + 1, {"scores": [scores.tolist()], "note": "good" if torch.ones(1) > 0 else "bad"}

    history = tl.log_forward_pass(Model(forward, fc=nn.Linear(4, 3)), torch.rand(3))
    assert [entry.layer_type for entry in history] == [
        "input",
        "ones",
        "linear",
        "add",
        "ones",
        "gt",
        "output",
    ]
    assert history.num_operations_left_out == 2
    assert "2 tensors that have to do with neither input nor output are left out" in str(history)


@pytest.mark.parametrize("read", [
    torch.Tensor.item, torch.Tensor.tolist, float, int, complex, str, repr, "{:.1f}".format,
    torch.Tensor.numpy, np.asarray,
    lambda t: range(9)[t.long()], lambda t: torch.equal(t, t), lambda t: t.is_nonzero(), bool,
])  # fmt: skip
def test_every_way_to_take_a_value_out_of_torch_counts(read: Any) -> None:
    model = Model(lambda self, x: (x + 1, "text", [read(torch.ones(()) * 2)]))
    types = [entry.layer_type for entry in tl.log_forward_pass(model, torch.rand(3))]
    assert types[1:4] == ["add", "ones", "mul"]


def test_flags_and_sizes_are_no_data() -> None:
    model = Model(lambda self, x: (x + 1, True, None, x.shape, (torch.ones(()) * 2).item())[:4])
    assert len(tl.log_forward_pass(model, torch.rand(3))) == 3
