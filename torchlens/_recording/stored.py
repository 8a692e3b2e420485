"""Values that are read from a file on first access.

A recording that was loaded holds one `StoredValue` in place of each tensor. Code that needs the
tensor reads it; asking whether there is one does not.
"""

from collections.abc import Iterator
from typing import Any

import torch


class StoredValue:
    """A placeholder for one value. It has no version, since it cannot be written to."""

    __slots__ = ()
    _version = -1

    def read(self) -> Any:
        """The value, from the file."""
        raise NotImplementedError


def opened(value: Any) -> Any:
    """The value, read from its file if it is stored in one."""
    return value.read() if isinstance(value, StoredValue) else value


class StoredMapping(dict[int, Any]):
    """A dictionary that reads stored values on access."""

    def __getitem__(self, key: int) -> Any:
        return opened(super().__getitem__(key))

    def get(self, key: int, default: Any = None) -> Any:
        return opened(super().get(key, default))

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return map(opened, super().values())

    def items(self) -> Iterator[tuple[int, Any]]:  # type: ignore[override]
        return ((key, opened(value)) for key, value in super().items())

    def __copy__(self) -> "StoredMapping":
        return StoredMapping(super().items())  # as they are


class StoredParams(list[torch.nn.Parameter]):
    """Parameters on the meta device; `read` returns one with its values if the file has them."""

    def __init__(self, shapes: list[torch.nn.Parameter], stored: dict[int, StoredValue]) -> None:
        super().__init__(shapes)
        self._stored = stored

    @property
    def numbers(self) -> list[int]:
        """The indices of parameters whose values are in the file."""
        return list(self._stored)

    def read(self, number: int) -> torch.nn.Parameter:
        stored = self._stored.get(number)
        return self[number] if stored is None else stored.read()


def opened_params(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Parameters with their values, where the file has them."""
    return (
        list(map(params.read, range(len(params)))) if isinstance(params, StoredParams) else params
    )
