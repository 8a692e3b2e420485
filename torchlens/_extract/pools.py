"""What is made of a value before it is stored: pooled, projected, converted to a dtype."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from torchlens._extract.exporters import library
from torchlens._text.error_wording import check_count, did_you_mean, got, one_of

Pool: TypeAlias = "str | Callable[..., torch.Tensor] | Mapping[str, Any] | None"
POOLS = ("mean", "max", "cls", "last", "grid:N")
DTYPES = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The rows of one layer for one batch.

    With `lengths`, the inputs have different numbers of tokens: `values` holds the tokens of all
    inputs one after the other, without padding.
    """

    values: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any] | None = None


def checked_pool(pool: Any) -> Pool:
    """The option `pool`, checked."""
    if isinstance(pool, Mapping):
        return {str(name): checked_pool(own) for name, own in pool.items()}
    if pool is None or (callable(pool) and not isinstance(pool, type)):
        return pool
    if isinstance(pool, str) and (pool in POOLS[:-1] or re.fullmatch("grid:[1-9][0-9]*", pool)):
        return pool
    raise ValueError(
        f"pool must be {one_of(POOLS)} (N cells a side), a function of a value and its mask, a "
        f"dict of these by layer, or None, got {got(pool)}. {did_you_mean(pool, POOLS)}".rstrip()
    )


def checked_dtype(dtype: Any) -> str | None:
    """The option `dtype` by name."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, str | torch.dtype) else None
    if isinstance(dtype, type | np.dtype) and dtype is not None:
        name = np.dtype(dtype).name
    if dtype is None or name in DTYPES:
        return name
    raise ValueError(
        f"dtype must be {one_of(DTYPES)}, or None for that of the model, got {got(dtype)}."
    )


def pool_of(pool: Pool, name: str) -> Any:
    """The pool of one layer."""
    return pool.get(name) if isinstance(pool, Mapping) else pool


def described_pool(pool: Pool) -> Any:
    """A pool as the manifest has it."""
    if isinstance(pool, Mapping):
        return {name: described_pool(own) for name, own in pool.items()}
    if callable(pool):
        return f"function {getattr(pool, '__qualname__', type(pool).__qualname__)}"
    return pool


def pooled(
    name: str, value: torch.Tensor, pool: Pool, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A value after pooling, and the mask of its tokens if it still has padding."""
    has_tokens = mask is not None and value.shape[:2] == mask.shape
    own = pool_of(pool, name)
    if own is not None:
        return _pooled(name, value, own, mask if has_tokens else None), None
    if mask is None:
        return value, None
    if has_tokens:
        return value, mask
    if mask.shape[1] in value.shape[1:] and not bool(mask.all()):
        raise ValueError(
            f"{name!r} has the shape {tuple(value.shape)} and the batch {mask.shape[1]} tokens, "
            "some of them padding: with the tokens in another axis than the second, padding would "
            "be stored as data. Give a pool for this layer: pool={...: function of value and mask}."
        )
    return value, None


def _pooled(name: str, value: torch.Tensor, pool: Any, mask: torch.Tensor | None) -> torch.Tensor:
    if callable(pool):
        return _checked_rows(name, pool(value) if mask is None else pool(value, mask), value)
    if value.ndim < 3:
        return value
    if pool.startswith("grid"):
        return _grid(name, value, int(pool.partition(":")[2]))
    if pool == "cls":
        return (
            value[:, 0] if mask is None else value[torch.arange(len(value)), mask.int().argmax(1)]
        )
    if mask is not None:
        return _of_tokens(value, pool, mask.bool())
    if pool == "last":
        return value[:, -1]
    axes = [1] if value.ndim == 3 else list(range(2, value.ndim))
    return value.mean(axes) if pool == "mean" else value.amax(axes)


def _checked_rows(name: str, made: Any, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(made, torch.Tensor) or not made.ndim or len(made) != len(value):
        raise ValueError(
            f"The pool of {name!r} must return a tensor with one row for each of the "
            f"{len(value)} inputs, got {got(made)}."
        )
    return made


def _of_tokens(value: torch.Tensor, pool: str, is_token: torch.Tensor) -> torch.Tensor:
    """The mean, the largest or the last of the tokens that are no padding."""
    if pool == "last":
        places = torch.arange(is_token.shape[1], device=is_token.device)
        last = torch.where(is_token, places, 0).amax(1)
        return value[torch.arange(len(value), device=value.device), last]
    is_token = is_token.reshape(*is_token.shape, *[1] * (value.ndim - 2))
    if pool == "max":
        return value.masked_fill(~is_token, -torch.inf).amax(1)
    return value.masked_fill(~is_token, 0).sum(1) / is_token.sum(1)


def _grid(name: str, value: torch.Tensor, size: int) -> torch.Tensor:
    if value.ndim != 4:
        raise ValueError(
            f"pool='grid:{size}' is for values of (inputs, channels, height, width), and {name!r} "
            f"has the shape {tuple(value.shape)}."
        )
    return F.adaptive_avg_pool2d(value, size)


def as_array(name: str, value: torch.Tensor, dtype: str | None) -> np.ndarray[Any, Any]:
    """A value as an array; bfloat16, which NumPy lacks, as its bits."""
    wanted = DTYPES[dtype] if dtype else value.dtype
    if value.is_complex() or not value.dtype.is_floating_point:
        wanted = value.dtype
    converted = value.to(wanted)
    if wanted is torch.float16 and value.dtype is not wanted:
        is_lost = converted.isinf() & value.isfinite()
        if bool(is_lost.any()):
            raise ValueError(
                f"{name!r} has values of up to {float(value.abs().max()):.3g}, which float16 "
                "cannot hold. Use dtype='bfloat16' or 'float32'."
            )
    converted = converted.contiguous().cpu()
    if wanted is torch.bfloat16:
        return converted.view(torch.int16).numpy().view(np.uint16)
    return converted.numpy()


def to_rows(
    name: str, value: torch.Tensor, mask: torch.Tensor | None, dtype: str | None
) -> LayerRows:
    """The rows of a value to store; of ragged text, the tokens alone."""
    if mask is None:
        return LayerRows(as_array(name, value, dtype))
    is_token = mask.bool()
    lengths = is_token.sum(1).cpu().numpy().astype(np.int64)
    return LayerRows(as_array(name, value[is_token], dtype), lengths)


# -- random projection -----------------------------------------------------------------------------


class SparseProjection:
    """A sparse random projection to `size` numbers (scikit-learn's), for `reduce=`.

    Its matrix depends on the seed, the name of the layer and the sizes alone, so that all processes
    have the same.

    >>> torchlens.extract(model, data, layers, 'features/', reduce=SparseProjection(512))
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        check_count("size", size, 1)
        check_count("seed", seed, 0)
        self.size = size
        self.seed = seed
        self._made: dict[tuple[str, int], Any] = {}

    def describe(self) -> dict[str, Any]:
        """The entry of the manifest."""
        return {"kind": "sparse random projection", "size": self.size, "seed": self.seed}

    def transform(self, name: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The projected rows of one layer, in float32."""
        flat = np.ascontiguousarray(rows.reshape(len(rows), -1), dtype=np.float32)
        key = name, flat.shape[1]
        if key not in self._made:
            self._made[key] = self._projection(name, flat.shape[1])
        return np.ascontiguousarray(self._made[key].transform(flat), dtype=np.float32)

    def _projection(self, name: str, num_features: int) -> Any:
        random_projection = library("sklearn.random_projection")
        text = f"{self.seed}/{name}/{num_features}/{self.size}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
        projection = random_projection.SparseRandomProjection(
            self.size, dense_output=True, random_state=np.random.RandomState(seed)
        )
        return projection.fit(np.zeros((1, num_features), dtype=np.float32))
