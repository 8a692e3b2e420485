"""Imports a feature when one of its functions is first called.

Importing all features takes longer than importing everything that a log needs. A file that calls a
feature declares its functions twice: for the type checker as they are, and at run time as functions
that import the feature.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_function(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of `module`, which is imported when it is called.

    >>> to_json = lazy_function('torchlens._export.json_graph', 'to_json')
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    return call


def lazy_functions(module: str, *names: str) -> list[Callable[..., Any]]:
    """Several functions of one module."""
    return [lazy_function(module, name) for name in names]
