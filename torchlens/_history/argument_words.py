"""The arguments of an operation as text: `kernel 3×3, stride 2, padding 1`, `dim −1`."""

from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from torchlens._recording.functions import argument_names
from torchlens._recording.recording import Recording, Row

_LONGEST = 200
_SHORT_NAMES = {
    "kernel_size": "kernel", "normalized_shape": "shape", "output_size": "size",
    "negative_slope": "slope",
    "split_size_or_sections": "split_size", "dropout_p": "dropout", "is_causal": "causal",
}  # fmt: skip
# The subject of the operation rather than a setting of it: the value alone says enough.
_NAMELESS = {"self", "other", "exponent", "key", "equation", "input", "value", "tensors", "start"}
_SAME_EACH_WAY = {"stride", "padding", "dilation", "output_padding"}
_SIZES = {
    "size",
    "shape",
    "kernel_size",
    "normalized_shape",
    "output_size",
    "repeats",
    *_SAME_EACH_WAY,
}
_NOISE = {
    "cudnn_enabled",
    "cudnn_enable",
    "generator",
    "layout",
    "pin_memory",
    "inplace",
    "requires_grad",
}
_WRITTEN_AS_REPR = (
    int, float, str, bool, torch.SymFloat, torch.SymBool, torch.dtype, torch.device,
)  # fmt: skip
_PLAIN = (*_WRITTEN_AS_REPR, slice, np.generic)


class _AnyObject:
    """Takes the place of an object whose value is not known."""

    __name__ = "object"


_ANY_OBJECT = _AnyObject()
_DEVICES = {"cpu", "cuda", "mps", "xpu", "hpu", "xla", "meta"}
_MANY_SIZES = ("size", "shape", "dims", "repeats")  # may be given one by one
# Defaults of a convolution, which torch's schema does not always state.
_USUAL = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}


def argument_words(recording: Recording, row: Row) -> str:
    """The arguments of a call other than tensors, by name, without those that have the default."""
    if (
        not row.kwargs
        and all(given is None for given in row.args)
        and not row.operation.layer_type.startswith("conv")
    ):
        return ""
    words = [*_kernel(recording, row), *(_words_of(*given) for given in given_arguments(row))]
    text = ", ".join(words)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def structural_words(row: Row) -> list[str]:
    """The same as far as they say what is computed, in an order that does not depend on the call:
    without devices, and without the classes of objects, which a file may not have.
    """
    return sorted(
        _words_of(name, _without_objects(value))
        for name, value in given_arguments(row)
        if not _is_device(value)
    )


def _without_objects(value: Any) -> Any:
    if isinstance(value, list | tuple):
        inner = map(_without_objects, value)
        return list(inner) if isinstance(value, list) else tuple(inner)
    is_plain = value is None or value is Ellipsis or isinstance(value, _PLAIN)
    return value if is_plain or hasattr(value, "__name__") else _ANY_OBJECT


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (
        isinstance(value, str) and value.partition(":")[0] in _DEVICES
    )


def argument_position(row: Row, location: Any) -> Any:
    """The position of an argument, also of one that was given by keyword."""
    head, *rest = location if isinstance(location, tuple) else (location,)
    names, _ = _signature(row.operation.func)
    if isinstance(head, str) and head in names:
        head = names.index(head)
    return (head, *rest)


def _kernel(recording: Recording, row: Row) -> Iterator[str]:
    """The size of a convolution's kernel, which is that of its weight."""
    if not row.operation.layer_type.startswith("conv"):
        return
    given = (
        row.references.get(1)
        if isinstance(row.references, dict)
        else (*row.references, None, None)[1]
    )
    if given is None:
        return
    if given >= 0:
        shape = recording.rows[given].shape
    elif -1 - given < len(recording.params):
        shape = tuple(recording.params[-1 - given].shape)
    else:
        return
    if len(shape) > 2:
        yield f"kernel {'×'.join(map(str, shape[2:]))}"


def given_arguments(row: Row) -> Iterator[tuple[str, Any]]:
    """The arguments by name ("" if unknown), without tensors and those that have the default."""
    names, defaults = _signature(row.operation.func)
    args = _with_sizes_together(names, list(row.args))
    given = [(names[at] if at < len(names) else "", value) for at, value in enumerate(args)]
    for name, value in [*given, *(row.kwargs or {}).items()]:
        if name in _NOISE or not _says_something(value) or _is_default(name, value, defaults):
            continue
        yield name, value


def _with_sizes_together(names: tuple[str, ...], args: list[Any]) -> list[Any]:
    """The arguments of `x.view(2, 3)` as those of `x.view((2, 3))`."""
    if names and names[-1] in _MANY_SIZES and len(args) > len(names):
        start = len(names) - 1
    elif len(names) > 1 and names[1] in _MANY_SIZES and _all_sizes(args[1:]):
        start = 1
    elif names and names[0] in ("size", "shape") and _all_sizes(args):
        start = 0
    else:
        return args
    return [*args[:start], tuple(args[start:])]


def _words_of(name: str, value: Any) -> str:
    """An argument with its name, where the value alone does not say enough."""
    shown_name = "" if isinstance(value, torch.dtype) else _SHORT_NAMES.get(name, name)
    shown_name = shown_name.replace("_", " ").strip()
    if name in _SIZES:
        text = _size_text(_alone(value) if name in _SAME_EACH_WAY else value)
    else:
        text = plain_argument(value)
    if value is True:
        return shown_name or text
    return f"{shown_name} {text}" if shown_name and name not in _NAMELESS else text


def _all_sizes(values: list[Any]) -> bool:
    return len(values) > 1 and all(
        isinstance(value, int) and not isinstance(value, bool) for value in values
    )


def _says_something(value: Any) -> bool:
    """Whether there is anything in it but tensors, which the log has as None."""
    if isinstance(value, list | tuple) and value and not isinstance(value, torch.Size):
        return any(map(_says_something, value))
    return value is not None


def _is_default(name: str, value: Any, defaults: dict[str, Any]) -> bool:
    one = _alone(value)
    usual = [_alone(known[name]) for known in (defaults, _USUAL) if name in known]
    return any(type(one) is type(known) and one == known for known in usual)


def _alone(value: Any) -> Any:
    """`2` for `(2, 2)`."""
    if isinstance(value, list | tuple) and value and _plain(value) and len(set(value)) == 1:
        return value[0]
    return value


def _plain(values: Any) -> bool:
    """Whether these are plain numbers: comparing symbolic ones would add a guard."""
    return all(type(value) in (int, float) for value in values)


def _signature(func: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    # The calls of scripted functions cannot be hashed in torch 2.15.
    return _known_signature(func) if isinstance(func, Hashable) else ((), {})


@lru_cache(maxsize=1024)
def _known_signature(func: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    names = argument_names(func)
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{getattr(func, '__name__', '')}")
    defaults: dict[str, Any] = {}
    for schema in schemas:
        if tuple(argument.name for argument in schema.arguments if not argument.is_out) == names:
            defaults = {
                one.name: one.default_value for one in schema.arguments if one.has_default_value()
            }
    return names, defaults


def _size_text(value: Any) -> str:
    if isinstance(value, list | tuple) and all(isinstance(one, int) for one in value):
        return "×".join(map(plain_argument, value))
    return plain_argument(value)


def plain_argument(value: Any) -> str:
    """An argument as one would write it; tensors, which the log has as None, as a dot."""
    if value is None:
        return "·"
    if value is Ellipsis:
        return "…"
    if isinstance(value, slice):
        return _slice_text(value)
    if isinstance(value, tuple | list):
        inner = ", ".join(map(plain_argument, value))
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if type(value) in (int, float) and value < 0:
        return f"−{-value!r}"
    if isinstance(value, np.generic):
        return plain_argument(value.item())
    if isinstance(value, _WRITTEN_AS_REPR):
        return repr(value).removeprefix("torch.")
    return value.__name__ if hasattr(value, "__name__") else type(value).__name__


def _slice_text(value: slice) -> str:
    parts = [value.start, value.stop, *([] if value.step is None else [value.step])]
    return ":".join("" if part is None else plain_argument(part) for part in parts)
