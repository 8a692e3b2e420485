"""Architectures from other libraries, each logged and compared with a plain run."""

from benchmarks.zoo import (
    from_geometric,
    from_timm,
    from_torch,
    from_torchvision,
    from_transformers,
)
from benchmarks.zoo.specimen import Specimen

__all__ = ["SPECIMENS"]

SPECIMENS: dict[str, Specimen] = {
    specimen.name: specimen
    for module in (from_torch, from_torchvision, from_timm, from_transformers, from_geometric)
    for specimen in module.SPECIMENS
}
