"""What a folder of features was made with, and what of it must be the same when a run resumes."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchlens._extract.shard_files import MANIFEST, read_json, write_json
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
    "fitted": "what reduce was fitted to",
    "dtype": "dtype",
    "compile": "compile",
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


def digest_of_ids(ids: Iterable[Any] | None) -> str | None:
    """A digest of given ids, in order."""
    if ids is None:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for one in ids:
        digest.update(f"{type(one).__name__} {one}\n".encode(errors="backslashreplace"))
    return digest.hexdigest()
