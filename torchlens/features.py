"""Features of whole data sets: what `torchlens.extract` and its results need besides.

>>> torchlens.extract(model, data, layers, None, into=[torchlens.features.CKA()])
>>> torchlens.features.forecast(model, sample, layers, num_inputs=1_000_000)
"""

from torchlens._extract.analyses import cka, nearest, probe, rdm, rsa
from torchlens._extract.dissimilarity import RSA
from torchlens._extract.extractor import Extractor
from torchlens._extract.feature_store import Features, Verification
from torchlens._extract.forecast import Forecast, forecast
from torchlens._extract.plots import plot_mds, plot_nearest, plot_probe, plot_rdm, plot_similarity
from torchlens._extract.pools import SparseProjection
from torchlens._extract.reductions import CKA, PCA, IdleUnits, Moments, TopInputs

__all__ = [
    "CKA",
    "PCA",
    "RSA",
    "Extractor",
    "Features",
    "Forecast",
    "IdleUnits",
    "Moments",
    "SparseProjection",
    "TopInputs",
    "Verification",
    "cka",
    "forecast",
    "nearest",
    "plot_mds",
    "plot_nearest",
    "plot_probe",
    "plot_rdm",
    "plot_similarity",
    "probe",
    "rdm",
    "rsa",
]
