"""Access to the classic TorchLens's fields, which the main interface does not list."""

from typing import TYPE_CHECKING, Any

from torchlens._text.lazy_import import lazy_function

if not TYPE_CHECKING:
    classic_field = lazy_function("torchlens._history.classic", "classic_field")


class ClassicAccess:
    """Looks up a field that the class itself does not have among those of the classic."""

    __slots__ = ()

    if not TYPE_CHECKING:  # so that a type checker still reports fields that do not exist

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") and not hasattr(
                type(self), name
            ):  # what copy, IPython, numpy ask every object for
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return classic_field(self, name)
