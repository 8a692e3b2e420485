"""What running a JAX callable may change: the attributes of objects. Arrays never change."""

from types import MemberDescriptorType
from typing import Any

from torchlens._jax.arrays import is_array
from torchlens._jax.callables import holders_in
from torchlens._jax.trees import parts_of


class KeptState:
    """The attributes of every object that a callable and its arguments hold, to be put back:
    counters, statistics.
    """

    def __init__(self, model: Any, arguments: Any) -> None:
        self._objects: dict[int, tuple[Any, Any, list[tuple[Any, Any]]]] = {}
        for tree in (*(holder.tree for holder in holders_in(model)), arguments):
            for part in parts_of(tree):
                for value in (part.value, part.variable):
                    self._keep(value)

    def _keep(self, value: Any) -> None:
        if id(value) in self._objects or value is None or is_array(value) or _is_frozen(value):
            return
        if isinstance(value, dict | list):
            self._objects[id(value)] = (value, value.copy(), [])
        else:
            self._objects[id(value)] = (
                value,
                dict(getattr(value, "__dict__", {})),
                _slots_of(value),
            )

    def restore(self) -> None:
        """Puts everything back."""
        for value, before, slots in self._objects.values():
            if isinstance(value, list):
                value[:] = before
                continue
            own = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            own.clear()
            own.update(before)
            for slot, content in slots:
                slot.__set__(value, content)


def _slots_of(value: Any) -> list[tuple[Any, Any]]:
    """The attributes that are no items of a dict, as the descriptors that set them, and their
    values.
    """
    found = []
    for kind in type(value).__mro__:
        if "__slots__" not in vars(kind):  # written in C: what it has of its own cannot be set
            continue
        for slot in vars(kind).values():
            if isinstance(slot, MemberDescriptorType):
                try:
                    found.append((slot, slot.__get__(value)))
                except AttributeError:  # not set yet
                    continue
    return found


def _is_frozen(value: Any) -> bool:
    parameters: Any = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)
