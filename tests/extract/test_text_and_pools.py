"""Ragged text (padding is never stored), pools, dtypes, and reading what is stored."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from benchmarks.zoo.libraries import import_transformers
from tests.networks import Model

TEXTS = [" ".join(["word"] * (1 + number * 7 % 9)) + f" {number % 5}" for number in range(24)]


class Tokenizer:
    """Words to numbers, padded on the right or the left."""

    name_or_path = "words"

    def __init__(self, side: str = "right") -> None:
        self.side = side

    def get_vocab(self) -> dict[str, int]:
        return {"word": 1}

    def __call__(self, texts: list[str], **options: Any) -> dict[str, torch.Tensor]:
        assert options == {"padding": True, "truncation": True, "return_tensors": "pt"}
        rows = [[hash(word) % 37 + 1 if word == "word" else int(word) + 40 for word in text.split()]
                for text in texts]  # fmt: skip
        longest = max(map(len, rows))
        ids, mask = (
            torch.zeros(len(rows), longest, dtype=torch.int64),
            torch.zeros(len(rows), longest, dtype=torch.int64),
        )
        for row, numbers in enumerate(rows):
            where = (
                slice(longest - len(numbers), None) if self.side == "left" else slice(len(numbers))
            )
            ids[row, where], mask[row, where] = torch.tensor(numbers), 1
        return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    transformers = import_transformers()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=60,
    )
    return transformers.BertModel(config).eval()


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    transformers = import_transformers()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=60,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2Model(config).eval()


def alone(model: nn.Module, text: str, key: str) -> np.ndarray:
    """The value of a layer for one text, without padding."""
    given = Tokenizer()([text], padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        return tl.log_forward_pass(model, None, given)[key].tensor_contents[0].numpy()


@pytest.mark.slow
def test_padding_is_never_stored_and_each_row_is_that_of_its_text_alone(
    bert: nn.Module, tmp_path: Path
) -> None:
    layers = ["encoder.layer.0", "encoder.layer.1.intermediate.dense"]
    features = tl.extract(
        bert, TEXTS, layers, tmp_path / "f", tokenizer=Tokenizer(), batch_size=7, shard_size=10
    )
    array = features[layers[0]]
    assert array.lengths.tolist() == [len(text.split()) for text in TEXTS]
    assert array.tokens.shape == (sum(len(text.split()) for text in TEXTS), 16)
    for number in (0, 9, 10, 23):
        for name in layers:
            assert np.allclose(features[name][number], alone(bert, TEXTS[number], name), atol=1e-4)
    assert [row.shape for row in array[3:6]] == [row.shape for row in array[[3, 4, 5]]]
    assert features.manifest["tokenizer"]["name"] == "words"
    assert features.verify(10)
    with pytest.raises(TypeError, match="different numbers of tokens"):
        array[:, 0]


@pytest.mark.slow
def test_flattened_tokens_of_gpt2_are_rows_of_tokens_again(gpt2: nn.Module, tmp_path: Path) -> None:
    features = tl.extract(
        gpt2, TEXTS, ["addmm_1", "h.1"], tmp_path / "f", tokenizer=Tokenizer(), batch_size=6
    )
    assert features["addmm_1"].shape == (24, None, 48)
    for name in features.layers:
        assert features[name][5].shape[0] == len(TEXTS[5].split())
    assert np.allclose(features["h.1"][5], alone(gpt2, TEXTS[5], "h.1"), atol=1e-4)


@pytest.mark.slow
def test_pools_respect_the_mask_on_either_side(bert: nn.Module, tmp_path: Path) -> None:
    name = "encoder.layer.1"
    whole = [alone(bert, text, name) for text in TEXTS[:8]]
    expected = {
        "mean": [row.mean(0) for row in whole],
        "max": [row.max(0) for row in whole],
        "cls": [row[0] for row in whole],
        "last": [row[-1] for row in whole],
    }
    for pool, rows in expected.items():
        features = tl.extract(
            bert, TEXTS[:8], name, tmp_path / pool, tokenizer=Tokenizer(), pool=pool, batch_size=4
        )
        assert np.allclose(features[name][:], np.stack(rows), atol=1e-4), pool


@pytest.mark.slow
def test_attention_over_padding_needs_a_pool(bert: nn.Module, tmp_path: Path) -> None:
    bert.set_attn_implementation("eager")
    try:
        with pytest.raises(ValueError, match=r"padding would be stored as data"):
            tl.extract(bert, TEXTS, "softmax_1", tmp_path / "f", tokenizer=Tokenizer())
    finally:
        bert.set_attn_implementation("sdpa")


@pytest.mark.slow
def test_a_model_that_ignores_the_mask_is_found_out(tmp_path: Path) -> None:
    def function(self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        return x + x.mean(1, keepdim=True)  # padding included

    model = Model(function, embedding=nn.Embedding(60, 4))
    with pytest.raises(ValueError, match="other padding"):
        tl.extract(model, TEXTS, "output", tmp_path / "f", tokenizer=Tokenizer())


# -- pools and dtypes ------------------------------------------------------------------------------


def test_pools_of_images(tmp_path: Path) -> None:
    data = torch.randn(6, 4, 8, 8)
    pools: dict[str, Any] = {
        "mean": data.mean((2, 3)),
        "max": data.amax((2, 3)),
        "grid:2": torch.nn.functional.adaptive_avg_pool2d(data, 2),
        "own": data[:, 1],
    }
    for name, expected in pools.items():
        pool = (lambda value: value[:, 1]) if name == "own" else name
        features = tl.extract(nn.Identity(), data, "output", tmp_path / name, pool=pool)
        assert np.allclose(features["output"][:], expected.numpy(), atol=1e-6), name
    with pytest.raises(ValueError, match="must return a tensor with one row for each of the 6"):
        tl.extract(nn.Identity(), data, "output", tmp_path / "x", pool=lambda value: value.sum())
    with pytest.raises(ValueError, match=r"'grid:2' is for values of"):
        tl.extract(nn.Flatten(2), data, "output", tmp_path / "y", pool="grid:2")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", torch.bfloat16, np.float16])
def test_dtypes(dtype: Any, tmp_path: Path) -> None:
    data = torch.randn(6, 4)
    features = tl.extract(nn.Identity(), data, "output", tmp_path / "f", dtype=dtype)
    own = {torch.bfloat16: torch.bfloat16, np.float16: torch.float16}.get(dtype)
    expected = data.to(own or getattr(torch, str(dtype)))
    assert np.array_equal(features["output"][:], expected.float().numpy())
    assert features.nbytes < 24 * expected.element_size() + 200
    assert features.verify(6)


def test_values_that_float16_cannot_hold_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"values of up to 1e\+06, which float16 cannot hold"):
        tl.extract(
            nn.Identity(), torch.full((3, 2), 1e6), "output", tmp_path / "f", dtype="float16"
        )


def test_whole_numbers_and_booleans_keep_their_dtype(tmp_path: Path) -> None:
    model = Model(lambda self, x: (x > 0, x.long()))
    features = tl.extract(
        model, torch.randn(5, 3) * 9, ["gt", "long"], tmp_path / "f", dtype="float16"
    )
    assert (features["gt"].dtype, features["long"].dtype) == (np.bool_, np.int64)


# -- reading ---------------------------------------------------------------------------------------


def test_indexing_is_numpys(tmp_path: Path) -> None:
    data = torch.randn(50, 3, 4)
    array = tl.extract(nn.Identity(), data, "output", tmp_path / "f", shard_size=7)["output"]
    whole, random = data.numpy(), np.random.default_rng(0)
    keys: list[Any] = [
        3, -1, np.int64(20), slice(5, 30), slice(40, 3, -3), slice(60, 70), [4, -2, 4],
        np.array([[1, 2], [30, 40]]), random.random(50) < 0.3, (slice(2, 20), 1),
        (slice(None), slice(0, 2), 3), ([3, 30], [0, 2]), (5, 1, 2), ([1, 49], slice(None), 2),
        Ellipsis, (Ellipsis, 2), None, (slice(None), [0, 2]), [], (7, [1, 0]),
    ]  # fmt: skip
    for key in keys:
        assert np.array_equal(array[key], whole[key]), key
        assert np.shape(array[key]) == np.shape(whole[key]), key
    assert np.array_equal(np.asarray(array), whole)
    assert np.array_equal(list(array), whole)
    assert (array.shape, len(array), array.nbytes) == (whole.shape, 50, whole.nbytes)
    with pytest.raises(IndexError, match="Row 50 is out of range: there are 50 rows"):
        array[50]
    with pytest.raises(TypeError, match="chosen by a number"):
        array[1.5]


def test_a_slice_reads_only_the_shards_that_it_needs(tmp_path: Path) -> None:
    features = tl.extract(nn.Identity(), torch.randn(50, 3), "output", tmp_path / "f", shard_size=7)
    (tmp_path / "f" / "output" / "00005.npy").unlink()
    assert features["output"][0:30].shape == (30, 3)
    with pytest.raises(FileNotFoundError):
        features["output"][30:40]
