"""What a folder of features was made with, and what of it must be the same when a run resumes."""

import hashlib
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchlens._extract.shard_files import MANIFEST, bytes_of, read_json, write_json
from torchlens._history.model_history import ModelHistory
from torchlens._recording.recording import located
from torchlens.errors import FeaturesError

FORMAT = 1
# The fields that a resumed run must share, each with its name in messages.
_MUST_AGREE = {
    "models": "the class of the model",
    "weights": "the weights of the model",
    "structure": "the operations of the model",
    "layers": "layers",
    "pool": "pool",
    "reduce": "reduce",
    "dtype": "dtype",
    "batch_size": "batch_size",
    "shard_size": "shard_size",
    "num_inputs": "the number of inputs",
    "ids": "ids",
    "transform": "the transform of the data",
    "tokenizer": "the tokenizer",
    "arrays": "the shapes or dtypes of the values",
}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None if it has none. Raises if it is not one of features."""
    if not (folder / MANIFEST).is_file():
        return None
    found = read_json(folder / MANIFEST)
    if not isinstance(found, dict) or "torchlens_features" not in found:
        raise FeaturesError(f"{str(folder / MANIFEST)!r} is not the manifest of features.")
    if found["torchlens_features"] > FORMAT:
        raise FeaturesError(
            f"{str(folder)!r} was written by a newer torchlens "
            f"({found.get('versions', {}).get('torchlens')}). Upgrade: pip install -U torchlens."
        )
    return found


def write_manifest(folder: Path, manifest: Mapping[str, Any], tag: str) -> None:
    """Writes the manifest, unless another process has done so."""
    if read_manifest(folder) is None:
        write_json(folder / MANIFEST, {"torchlens_features": FORMAT, **manifest}, tag)


def check_same(folder: Path, stored: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises if the features in a folder were made with something else."""
    for field, words in _MUST_AGREE.items():
        if field in own and stored.get(field) != own[field]:
            raise FeaturesError(
                f"{str(folder)!r} holds features that were made with other settings. Different is "
                f"{words}: {_short(stored.get(field))} there, {_short(own[field])} now. Resume "
                "with the same settings, or name another folder."
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


# -- digests ---------------------------------------------------------------------------------------


def digest_of_weights(model: torch.nn.Module) -> str:
    """A digest of all parameters and buffers, by name."""
    digest = hashlib.blake2b(digest_size=16)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        value = tensor.detach().cpu().contiguous()
        if value.numel():
            digest.update(bytes_of(value.reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def digest_of_structure(history: ModelHistory) -> str:
    """A digest of the operations, their modules, and what each reads."""
    recording = history._log.recording
    digest = hashlib.blake2b(digest_size=16)
    for row in recording.rows:
        module = recording.module_calls[row.module_call].address
        digest.update(
            f"{row.operation.name} {module} {row.output_index} {located(row.references)}\n".encode()
        )
    return digest.hexdigest()


def digest_of_ids(ids: Iterable[Any] | None) -> str | None:
    """A digest of given ids, in order."""
    if ids is None:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for one in ids:
        digest.update(f"{type(one).__name__} {one}\n".encode())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """The versions of the packages that decide about the numbers."""
    return {
        "torchlens": version("torchlens"),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
