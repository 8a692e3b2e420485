"""Representational similarity analysis, from projected features."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from torchlens._extract.pools import SparseProjection
from torchlens._extract.reductions import Array, Arrays, flat
from torchlens._text.error_wording import check_choice, check_count

if TYPE_CHECKING:
    import pandas as pd

METRICS = ("correlation", "euclidean")


class RSA:
    """Dissimilarities between inputs, in each layer, and their agreement between layers.

    Rows of more than `size` numbers are projected at random to that many, which keeps distances up
    to a few percent; `size=None` keeps them whole. What is kept grows with the number of inputs.
    """

    def __init__(self, size: int | None = 512, metric: str = "correlation", seed: int = 0) -> None:
        if size is not None:
            check_count("size", size, 1)
        check_choice("metric", metric, METRICS)
        self.size = size
        self.metric = metric
        self.ids: list[Any] = []
        self._rows: dict[str, list[Array]] = {}
        self._projection = None if size is None else SparseProjection(size, seed)

    def update(self, rows: Arrays, ids: Sequence[Any]) -> None:
        """Adds a batch."""
        self.ids += ids
        for name, own in rows.items():
            if len(own) != len(ids):
                raise ValueError(
                    f"{name!r} has {len(own)} tokens for {len(ids)} inputs: give a pool, such as "
                    "pool='mean', to compare inputs by it."
                )
            wide = flat(own)
            if self.metric == "correlation":
                wide = wide - wide.mean(1, keepdims=True)
            if self._projection is not None and wide.shape[1] > self._projection.size:
                wide = self._projection.transform(name, wide)
            self._rows.setdefault(name, []).append(wide)

    def merge(self, other: Self) -> None:
        """Adds what another one has seen."""
        self.ids += other.ids
        for name, rows in other._rows.items():
            self._rows.setdefault(name, []).extend(rows)

    def rdm(self, layer: str) -> "pd.DataFrame":
        """The dissimilarity of each input with each in a layer: 1 - correlation, or distances."""
        import pandas as pd

        rows = np.concatenate(self._rows[layer]).astype(np.float64)
        products = rows @ rows.T
        squares = np.diag(products)
        if self.metric == "correlation":
            scale = np.sqrt(np.maximum(np.outer(squares, squares), 1e-300))
            matrix = 1 - products / scale
        else:
            matrix = np.sqrt(np.maximum(squares[:, None] + squares - 2 * products, 0))
        np.fill_diagonal(matrix, 0)
        return pd.DataFrame(matrix, index=self.ids, columns=self.ids)

    def result(self) -> "pd.DataFrame":
        """The rank correlation (Spearman) of the dissimilarities of each pair of layers."""
        import pandas as pd

        upper = np.triu_indices(len(self.ids), 1)
        ranks = [pd.Series(self.rdm(name).to_numpy()[upper]).rank() for name in self._rows]
        matrix = np.corrcoef(np.stack([rank.to_numpy() for rank in ranks]))
        names = list(self._rows)
        return pd.DataFrame(np.atleast_2d(matrix), index=names, columns=names)
