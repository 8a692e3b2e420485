"""Importing the libraries that the models come from, quietly and beside any build of torch."""

import os
import warnings
from types import ModuleType
from typing import Any

import torch

__all__ = ["import_geometric", "import_timm", "import_torchvision", "import_transformers"]

# Operators defined here live as long as the library object does.
_torchvision_operators: Any = None


def import_torchvision() -> ModuleType:
    """torchvision, also where its compiled operators are missing or were built for another torch.

    Without them, importing it fails at the first mention of `nms`, which no model of the zoo calls;
    so its signature is declared in its place.
    """
    global _torchvision_operators
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchvision
        except RuntimeError as error:
            if "nms" not in str(error):
                raise
            _torchvision_operators = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                _torchvision_operators.define(
                    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
            import torchvision
    return torchvision


def import_timm() -> ModuleType:
    """timm; it imports torchvision."""
    import_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import timm
    return timm


def import_transformers() -> ModuleType:
    """transformers, offline and without its advice on the terminal."""
    import_torchvision()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    transformers.logging.set_verbosity_error()
    return transformers


def import_geometric() -> ModuleType:
    """torch_geometric with its models and layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch_geometric.nn
    return torch_geometric
