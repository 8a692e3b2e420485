"""All that a history says, as plain data, so that two histories, also of two processes, can be
compared field by field.
"""

import hashlib
import inspect
from typing import Any

import numpy as np
import torch

import torchlens as tl
from torchlens._draw.draw_options import draw_options
from torchlens._draw.drawing import make_drawing
from torchlens._history.classic import ENTRY_FIELDS, HISTORY_FIELDS
from torchlens._recording.functions import StandIn

METHODS = {
    name for name in dir(tl.ModelHistory) if inspect.isfunction(getattr(tl.ModelHistory, name))
}


def fields_of(thing: Any) -> list[str]:
    """The public fields, and those of the classic."""
    classic = ENTRY_FIELDS if isinstance(thing, tl.LayerEntry) else HISTORY_FIELDS
    own = [name for name in dir(type(thing)) if not name.startswith("_") and name not in METHODS]
    return [
        *own,
        *(name for name in classic if name != "activation_postfunc"),
    ]  # which may be a lambda


def facts_of(history: Any) -> dict[str, Any]:
    """Every field of the history and of each of its entries, and what can be made of it."""
    facts = {
        name: plain(getattr(history, name))
        for name in fields_of(history)
        if name not in ("layer_list", "output")
    }
    for entry in history:
        facts |= {
            f"{entry.layer_label_w_pass}.{name}": field_of(entry, name) for name in fields_of(entry)
        }
        facts[f"{entry.layer_label_w_pass} printed"] = str(entry)
        for key in entry.lookup_keys:
            assert history[key].layer_label_w_pass == entry.layer_label_w_pass
    facts["printed"] = str(history)
    facts["summary"] = str(history.summary(width=100)), str(history.summary(depth=2, width=100))
    facts["json"] = history.to_json()
    facts["pandas"] = history.to_pandas().to_csv()
    for vis_opt in ("rolled", "unrolled"):
        facts[vis_opt] = make_drawing(
            history, draw_options({"vis_opt": vis_opt, "vis_buffer_layers": True})
        ).source
    facts["page"] = history.explore(None).html
    return facts


def field_of(entry: Any, name: str) -> Any:
    try:
        return plain(getattr(entry, name))
    except Exception as error:
        return type(error).__name__, str(error)


def plain(value: Any) -> Any:
    """The value as something that `==` compares; tensors with all there is to see of them."""
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.tolist()
    if isinstance(value, dict):
        return {"dict": [(plain(key), plain(item)) for key, item in value.items()]}
    if isinstance(value, list | tuple | set):
        items = sorted(value) if isinstance(value, set) else value
        return type(value).__name__, [plain(item) for item in items]
    if value is None or isinstance(value, bool | int | str | torch.dtype | torch.device | StandIn):
        return value
    if isinstance(value, float):
        return repr(value)
    if callable(value):
        return f"function {getattr(value, '__name__', value)}"
    return repr(value)


def _plain_tensor(tensor: torch.Tensor) -> Any:
    kind = (type(tensor).__name__, str(tensor.dtype), str(tensor.layout), str(tensor.device))
    tensor = tensor.detach()
    if tensor.is_meta:
        return (*kind, tuple(tensor.shape), tensor.stride())
    if tensor.is_nested:
        return (*kind, [plain(part) for part in tensor.unbind()])
    if tensor.is_quantized:
        return (*kind, plain(tensor.int_repr()), repr(tensor.qscheme()))
    if tensor.layout is torch.sparse_coo:
        return (*kind, plain(tensor.coalesce().indices()), plain(tensor.coalesce().values()))
    if tensor.layout is not torch.strided:
        return (*kind, tuple(tensor.shape), plain(tensor.values()))
    place = (tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    if tensor.numel() < 1000:
        return (*kind, *place, repr(tensor.tolist()))
    numbers = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return (*kind, *place, hashlib.sha256(numbers.tobytes()).hexdigest())


def differences(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The facts that are not the same in both."""
    names = first.keys() | second.keys()
    return {
        name: (first.get(name), second.get(name))
        for name in sorted(names)
        if first.get(name) != second.get(name)
    }
