"""The names of a torch function's arguments."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["argument_names"]


def argument_names(func: Callable[..., Any]) -> tuple[str, ...]:
    """`('input', 'weight', ...)`; empty where nobody says."""
    try:
        return tuple(inspect.signature(func).parameters)
    except (TypeError, ValueError):  # written in C: ask torch's schemas, then its documentation
        name = getattr(func, "__name__", "")
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    if schemas:
        longest = max(schemas, key=lambda schema: len(schema.arguments))
        return tuple(argument.name for argument in longest.arguments if not argument.is_out)
    documented = re.search(rf"\b{re.escape(name)}\(([^)]*)\)", getattr(func, "__doc__", None) or "") if name else None
    if documented is None:
        return ()
    words = (part.split("=")[0].strip(" *\\") for part in documented.group(1).split(","))
    return tuple(word for word in words if word.isidentifier())
