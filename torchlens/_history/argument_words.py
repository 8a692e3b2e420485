"""The arguments of an operation as a reader says them: `kernel 3×3, stride 2, padding 1`, `dim
−1`.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from torchlens._recording.functions import argument_names
from torchlens._recording.recording import Recording, Row

_LONGEST = 200
_SHORT_NAMES = {
    "kernel_size": "kernel", "normalized_shape": "shape", "output_size": "size",
    "negative_slope": "slope",
    "split_size_or_sections": "split_size", "dropout_p": "dropout", "is_causal": "causal",
}  # fmt: skip
# What is the operation's subject rather than a setting of it: the value says enough.
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
# Where torch has these among a convolution's arguments without saying that they are the usual ones.
_USUAL = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}


def argument_words(recording: Recording, row: Row) -> str:
    """What a call was given besides tensors, by name; what is left out is what everybody knows to
    be the default.
    """
    if (
        not row.kwargs
        and row.args.count(None) == len(row.args)
        and not row.operation.layer_type.startswith("conv")
    ):
        return ""
    words = [*_kernel(recording, row), *_named(row)]
    text = ", ".join(words)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


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


def _named(row: Row) -> Iterator[str]:
    names, defaults = _signature(row.operation.func)
    args = list(row.args)
    if names and names[-1] in ("size", "shape", "dims", "repeats") and len(args) > len(names):
        args[len(names) - 1 :] = [tuple(args[len(names) - 1 :])]  # x.view(2, 3) is x.view((2, 3))
    elif (
        len(names) > 1 and names[1] in ("size", "shape", "dims", "repeats") and _all_sizes(args[1:])
    ):
        args[1:] = [tuple(args[1:])]
    elif names and names[0] in ("size", "shape") and _all_sizes(args):
        args = [tuple(args)]
    given = [(names[at] if at < len(names) else "", value) for at, value in enumerate(args)]
    for name, value in [*given, *(row.kwargs or {}).items()]:
        shown_name = _name_of(name, value)
        if name in _NOISE or not _says_something(value) or _is_default(name, value, defaults):
            continue
        text = (
            _size_text(_alone(value) if name in _SAME_EACH_WAY else value)
            if name in _SIZES
            else plain_argument(value)
        )
        if value is True:
            yield shown_name or text
        else:
            yield f"{shown_name} {text}" if shown_name and name not in _NAMELESS else text


def _name_of(name: str, value: Any) -> str:
    if isinstance(value, torch.dtype):
        return ""
    return _SHORT_NAMES.get(name, name).replace("_", " ").strip()


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
    """Whether these are numbers, none of them symbolic: looking whether those are equal would be
    noted as a decision.
    """
    return all(type(value) in (int, float) for value in values)


@lru_cache(maxsize=1024)
def _signature(func: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
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
    if isinstance(value, slice):
        ends = [
            "" if end is None else plain_argument(end)
            for end in (value.start, value.stop, value.step)
        ]
        return ":".join(ends[:2] if not ends[2] else ends)
    if isinstance(value, tuple | list):
        inner = ", ".join(map(plain_argument, value))
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if value is Ellipsis:
        return "…"
    if type(value) in (int, float) and value < 0:
        return f"−{-value!r}"
    if isinstance(
        value,
        int | float | str | bool | torch.SymFloat | torch.SymBool | torch.dtype | torch.device,
    ):
        return repr(value).removeprefix("torch.")
    return value.__name__ if hasattr(value, "__name__") else type(value).__name__
