"""What people do with features: compare layers and networks, decode, find the inputs of a unit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens._extract.dissimilarity import RSA
from torchlens._extract.exporters import library
from torchlens._extract.feature_store import Features
from torchlens._extract.reductions import CKA, Array, flat
from torchlens._extract.stored_array import RaggedArray
from torchlens._text.error_wording import got

if TYPE_CHECKING:
    import pandas as pd

_BLOCK = 256


def cka(a: Features, b: Features | None = None) -> "pd.DataFrame":
    """The CKA of each layer of `a` with each of `b`, or of `a` itself; for the same inputs.

    >>> plot_similarity(cka(resnet_features, vit_features))
    """
    made = CKA()
    _stream(made, a, b)
    return _block(made.result(), a, b)


def rsa(
    a: Features, b: Features | None = None, size: int | None = 512, metric: str = "correlation"
) -> "pd.DataFrame":
    """The agreement (Spearman) of the dissimilarities of inputs in each layer of `a` and of `b`."""
    made = RSA(size, metric)
    _stream(made, a, b)
    return _block(made.result(), a, b)


def rdm(features: Features, layer: str, metric: str = "correlation") -> "pd.DataFrame":
    """The dissimilarity of each input with each in one layer."""
    made = RSA(None, metric)
    made.update({layer: _rows(features, layer, slice(None))}, features.ids)
    return made.rdm(layer)


def _stream(made: Any, a: Features, b: Features | None) -> None:
    if b is not None and a.ids != b.ids:
        raise ValueError(
            f"Both features must be of the same inputs, in the same order: one has {len(a)} ids "
            f"from {a.ids[:1]} on, the other {len(b)} from {b.ids[:1]} on."
        )
    for start in range(0, len(a), _BLOCK):
        part = slice(start, start + _BLOCK)
        rows = {f"a/{name}": _rows(a, name, part) for name in a.layers}
        if b is not None:
            rows |= {f"b/{name}": _rows(b, name, part) for name in b.layers}
        made.update(rows, a.ids[part])


def _block(found: "pd.DataFrame", a: Features, b: Features | None) -> "pd.DataFrame":
    import pandas as pd

    rows = [f"a/{name}" for name in a.layers]
    columns = rows if b is None else [f"b/{name}" for name in b.layers]
    other = a if b is None else b
    return pd.DataFrame(found.loc[rows, columns].to_numpy(), index=a.layers, columns=other.layers)


def _rows(features: Features, layer: str, part: slice) -> Array:
    array = features[layer]
    if isinstance(array, RaggedArray):
        raise ValueError(
            f"{layer!r} has different numbers of tokens for each input. Extract it with a pool, "
            "such as pool='mean'."
        )
    return flat(array[part])


def probe(
    features: Features, targets: Sequence[Any] | Array, *, folds: int = 5, seed: int = 0
) -> "pd.Series":
    """How well a linear model reads `targets` from each layer, in cross-validation: the accuracy of
    a logistic regression for classes, R² of a ridge regression for fractions.

    `targets` has one item for each row, in the order of `features.ids`.
    """
    import pandas as pd

    model_selection = library("sklearn.model_selection")
    linear_model, pipeline = library("sklearn.linear_model"), library("sklearn.pipeline")
    preprocessing = library("sklearn.preprocessing")
    wanted = np.asarray(targets)
    if len(wanted) != len(features):
        raise ValueError(
            f"targets must have one item for each of the {len(features)} rows, got {len(wanted)}. "
            "features.ids has the order."
        )
    is_number = np.issubdtype(wanted.dtype, np.floating)
    if is_number:
        model: Any = linear_model.RidgeCV(np.logspace(-3, 3, 7))
        splits = model_selection.KFold(folds, shuffle=True, random_state=seed)
    else:
        model = linear_model.LogisticRegression(max_iter=1000)
        splits = model_selection.StratifiedKFold(folds, shuffle=True, random_state=seed)
    made = pipeline.make_pipeline(preprocessing.StandardScaler(), model)
    scores = {
        name: model_selection.cross_val_score(
            made, _rows(features, name, slice(None)), wanted, cv=splits
        ).mean()
        for name in features.layers
    }
    return pd.Series(scores, name="r2" if is_number else "accuracy")


def nearest(features: Features, layer: str, unit: int | Sequence[int], k: int = 9) -> "pd.Series":
    """The `k` inputs with the largest values of a unit: their ids and the values.

    `unit` is a number among the flattened units, or an index of one unit or of a map of them, of
    which the largest value counts: `unit=(5,)` is channel 5 of (channels, height, width).
    """
    import pandas as pd

    array = features[layer]
    if isinstance(array, RaggedArray):
        rows = np.stack([_of_unit(row, unit).max() for row in array])
    else:
        parts = [array[start : start + _BLOCK] for start in range(0, len(array), _BLOCK)]
        rows = np.concatenate([
            np.asarray([_of_unit(row, unit).max() for row in part]) for part in parts
        ])  # fmt: skip
    order = np.argsort(-rows, kind="stable")[:k]
    return pd.Series(rows[order], index=[features.ids[row] for row in order], name=layer)


def _of_unit(row: Array, unit: int | Sequence[int]) -> Array:
    if isinstance(unit, int):
        return np.asarray(row.reshape(-1)[unit])
    if not isinstance(unit, tuple):
        raise TypeError(f"unit must be a number or a tuple of numbers, got {got(unit)}.")
    return np.asarray(row[unit])
