"""Kinds of data beyond arrays: dicts, tokenizers' mappings, data sets of dicts, odd loaders."""

from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchlens as tl
from tests.networks import MLP, Model


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 3)

    def forward(self, input_ids: Any, attention_mask: Any = None, **others: Any) -> torch.Tensor:
        assert "text" not in others
        return self.embedding(input_ids)


class Tokenizer:
    """A word is its length; pads on the left."""

    def __call__(self, texts: list[str], **options: Any) -> Any:
        assert options == {"padding": True, "truncation": True, "return_tensors": "pt"}
        return self.pad([{"input_ids": list(map(len, text.split()))} for text in texts])

    def pad(self, items: list[dict[str, list[int]]], return_tensors: str = "pt") -> Any:
        rows = [item["input_ids"] for item in items]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        return UserDict({"input_ids": ids, "attention_mask": (ids > 0).long()})


TEXTS = ["a bb", "ccc", "dd e f", "gg"]
TOKENS = [[1, 2], [3], [2, 1, 1], [2]]


def expected(model: Words, number: int) -> np.ndarray:
    return model.embedding(torch.tensor(TOKENS[number])).detach().numpy()


@pytest.mark.parametrize("kind", ["texts", "dicts of texts", "dicts of tokens", "batches"])
def test_texts_and_tokens_in_each_form_give_the_same_rows(kind: str, tmp_path: Path) -> None:
    model, tokenizer = Words(), Tokenizer()
    dicts = [{"text": text, "label": 1} for text in TEXTS]
    tokens = [{"input_ids": row, "text": "x"} for row in TOKENS]
    data: Any = {"texts": TEXTS, "dicts of texts": dicts, "dicts of tokens": tokens}.get(kind)
    options: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": 2}
    if data is None:
        asked = {"padding": True, "truncation": True, "return_tensors": "pt"}
        data = (tokenizer(TEXTS[start : start + 2], **asked) for start in (0, 2))
        options = {}
    features = tl.extract(model, data, "embedding", tmp_path / "f", **options)
    for number in range(4):
        assert np.array_equal(features["embedding"][number], expected(model, number))
    assert "embedding: tokens of (3,), float32" in repr(features)


def test_pools_find_the_first_and_last_token_where_the_padding_is_on_the_left(
    tmp_path: Path,
) -> None:
    model = Words()
    for pool, place in {"cls": 0, "last": -1}.items():
        found = tl.extract(
            model, TEXTS, "embedding", tmp_path / pool, tokenizer=Tokenizer(), pool=pool
        )["embedding"][:]
        assert np.array_equal(found, [expected(model, number)[place] for number in range(4)])


def test_lists_of_numbers_in_dicts_are_rows_as_hugging_face_data_sets_have_them(
    tmp_path: Path,
) -> None:
    items = [{"input_ids": [n, n + 1, n + 2], "text": "a"} for n in range(5)]
    model = Words()
    features = tl.extract(model, items, "embedding", tmp_path / "f", batch_size=2)
    assert features["embedding"].shape == (5, 3, 3)
    direct = model.embedding(torch.tensor([4, 5, 6])).detach().numpy()
    assert np.array_equal(features["embedding"][4], direct)


def test_a_loader_whose_data_set_makes_its_own_batches(tmp_path: Path) -> None:
    data = torch.randn(4, 3, 4)
    features = tl.extract(
        MLP(), DataLoader(TensorDataset(data), batch_size=None), "fc1", tmp_path / "f"
    )
    assert len(features) == 12


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (
            DataLoader(TensorDataset(torch.randn(4, 4))),
            {"transform": abs},
            "transform and tokenizer are for data",
        ),
        (iter([torch.randn(4, 4)]), {"ids": ["a", "b"]}, "ids has 2 items, and the data has more"),
        (iter([torch.randn(1, 4)]), {"ids": ["a", "b"]}, "ids has 2 items, and the data had 1"),
        (iter([torch.randn(2, 4)]), {"ids": ["a", "a"]}, "ids must differ"),
        ([3, 4], {"tokenizer": Tokenizer()}, "With a tokenizer, an input must be a text"),
        (torch.randn(2, 4), {"pool": {"fc3": "mean"}}, "pool names 'fc3', which is none of the"),
        (torch.randn(0, 4), {}, "data holds no inputs"),
    ],
)
def test_what_does_not_fit_together_is_said(
    data: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        tl.extract(MLP(), data, "fc1", tmp_path / "f", **options)


def test_a_batch_that_cannot_be_made_names_its_inputs(tmp_path: Path) -> None:
    rows = [torch.randn(4), torch.randn(4), torch.randn(5)]
    with pytest.raises(RuntimeError) as caught:
        tl.extract(MLP(), rows, "fc1", tmp_path / "f", ids=list("abc"))
    assert caught.value.__notes__[-1] == "torchlens: raised when reading inputs 'a' to 'c'."


def test_other_ids_of_a_stream_are_found_when_it_resumes(tmp_path: Path) -> None:
    batch = torch.randn(2, 4)
    model = MLP()
    tl.extract(model, iter([batch]), "fc1", tmp_path / "f", ids=["a", "b"])
    with pytest.raises(tl.FeaturesError, match="Different is ids"):
        tl.extract(model, iter([batch]), "fc1", tmp_path / "f", ids=["a", "c"])


def test_a_model_on_the_meta_device_has_no_values(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on the meta device, where tensors have no values"):
        tl.extract(MLP().to("meta"), torch.randn(2, 4), "fc1", tmp_path / "f")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_compile_runs_one_function_and_says_why_where_it_cannot(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)).eval()
    data = torch.randn(10, 4)
    features = tl.extract(
        model, data, ["0", "relu", "2"], tmp_path / "f", batch_size=4, compile=True
    )
    whole = tl.extract(model, data, ["0", "relu", "2"], tmp_path / "g", batch_size=4)
    for name in features.layers:
        assert np.allclose(features[name][:], whole[name][:], atol=1e-6)
    assert (features["0"][:] < 0).any(), "as it was before the ReLU wrote to it"
    assert features.verify(10)
    with pytest.raises(tl.FeaturesError, match="Different is compile"):
        tl.extract(model, data, ["0", "relu", "2"], tmp_path / "f", batch_size=4)
    branches = Model(lambda self, x: x.sin() if x.sum() > 0 else x.cos())
    with pytest.warns(UserWarning, match="runs without compile=True"):
        tl.extract(branches, data.abs(), "output", tmp_path / "h", compile=True)
