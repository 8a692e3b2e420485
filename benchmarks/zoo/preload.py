"""Imported once by the process that the zoo's workers are forked from: everything that takes long
to import.
"""

import torch

from benchmarks.zoo import check
from benchmarks.zoo.libraries import (
    import_geometric,
    import_timm,
    import_torchvision,
    import_transformers,
)

__all__ = ["check"]

torch.set_num_threads(1)
import_torchvision()
import_timm()
import_transformers()
import_geometric()
