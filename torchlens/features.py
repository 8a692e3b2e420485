"""Features of whole data sets: what `torchlens.extract` and its results need besides.

>>> torchlens.extract(model, data, layers, None, into=[torchlens.features.CKA()])
>>> torchlens.features.forecast(model, sample, layers, num_inputs=1_000_000)
"""

from torchlens._extract.feature_store import Features, Verification
from torchlens._extract.pools import SparseProjection

__all__ = ["Features", "SparseProjection", "Verification"]
