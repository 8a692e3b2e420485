"""Edits in a file: a safetensors file with the tensors, and what is no tensor as JSON."""

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from torchlens._edit.changes import Adding, At, Control, Scaling
from torchlens._edit.plan import pairs_of
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.sites import Place, Site, axes_of
from torchlens._text.error_wording import got
from torchlens._text.whole_files import whole_file

Tensor = torch.Tensor
_NAME, _VERSION = "torchlens_edits", 1
_PARTS = [field.name for field in fields(Site) if field.name not in ("key", "directions")]


def save_edits(edits: Mapping[Any, Any], path: str | os.PathLike[str]) -> None:
    """As `torchlens.edits.save`."""
    save_file = _safetensors().save_file
    writer = _EditWriter()
    listed = [
        {"site": writer.site(site), "edit": writer.edit(site, edit)}
        for site, edit in pairs_of(edits)
    ]
    text = json.dumps({"version": _VERSION, "edits": listed})
    with whole_file(Path(path)) as beside:
        save_file(writer.tensors, beside, metadata={_NAME: text})


def load_edits(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """As `torchlens.edits.load`."""
    safetensors = _safetensors()
    with safetensors.safe_open(os.fspath(path), "pt") as file:
        text = (file.metadata() or {}).get(_NAME)
        if text is None:
            raise ValueError(f"{Path(path).name} has no edits: torchlens.edits.save writes them.")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    document = json.loads(text)
    if document.get("version") != _VERSION:
        raise ValueError(f"{Path(path).name} is of a newer torchlens. Update it to load this file.")
    return {
        _site_from(each["site"], tensors): _edit_from(each["edit"], tensors)
        for each in document["edits"]
    }


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "Edits are kept in safetensors files: pip install 'torchlens[trace]'"
        ) from error
    safetensors.save_file = safetensors.torch.save_file  # type: ignore[attr-defined]
    return safetensors


class _EditWriter:
    """Makes JSON of sites and edits, and collects their tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def _tensor(self, tensor: Tensor) -> str:
        name = f"tensor_{len(self.tensors)}"
        self.tensors[name] = tensor.detach().cpu().contiguous().clone()
        return name

    def site(self, site: Site) -> dict[str, Any]:
        key = site.key.layer_label if isinstance(site.key, LayerEntry) else site.key
        parts = {name: _plain(getattr(site, name), site) for name in _PARTS}
        found = {"key": key} | {name: own for name, own in parts.items() if own is not None}
        if site.directions is not None:
            found["directions"] = self._tensor(site.directions)
        return found

    def edit(self, site: Site, edit: Any) -> dict[str, Any]:
        if isinstance(edit, At):
            inner = self.edit(site, edit.edit)
            return {"at": [_plain(edit.steps, site), _plain(edit.tokens, site)], "edit": inner}
        if isinstance(edit, Control):
            return {"control": edit.seed, "edit": self.edit(site, edit.edit)}
        if isinstance(edit, Adding):
            return {"add": self._tensor(edit.direction)}
        if isinstance(edit, Scaling):
            return {"scale": edit.factor}
        if isinstance(edit, LayerEntry):
            value = edit.tensor_contents
            place = Place(-1, axes_of(site, value.shape), site)
            return {"tensor": self._tensor(place.read(value))}
        if isinstance(edit, Tensor):
            return {"tensor": self._tensor(edit)}
        if isinstance(edit, str | int | float):
            return {"value": edit}
        raise TypeError(
            f"The edit of {site} is {got(edit)}, and a file keeps numbers, words, tensors, entries "
            "and at(add=, scale=). Save the weights of a spliced module by themselves."
        )


def _plain(value: Any, site: Site) -> Any:
    """Numbers, slices, lists and tuples of them as JSON."""
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop, value.step]}
    if isinstance(value, tuple):
        return {"tuple": [_plain(each, site) for each in value]}
    if isinstance(value, list | range):
        return [_plain(each, site) for each in value]
    if value is Ellipsis:
        return {"ellipsis": True}
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"{site} has an index that no file keeps: {got(value)}.")


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "slice" in value:
        return slice(*value["slice"])
    return tuple(_from_plain(each) for each in value["tuple"]) if "tuple" in value else Ellipsis


def _site_from(document: dict[str, Any], tensors: dict[str, Tensor]) -> Site:
    parts = {name: _from_plain(document.get(name)) for name in _PARTS}
    directions = document.get("directions")
    own = None if directions is None else tensors[directions]
    return Site(document["key"], **parts, directions=own)


def _edit_from(document: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    if "at" in document:
        steps, tokens = map(_from_plain, document["at"])
        return At(steps, tokens, _edit_from(document["edit"], tensors))
    if "control" in document:
        return Control(_edit_from(document["edit"], tensors), document["control"])
    if "add" in document:
        return Adding(tensors[document["add"]])
    if "scale" in document:
        return Scaling(document["scale"])
    return tensors[document["tensor"]] if "tensor" in document else document["value"]
