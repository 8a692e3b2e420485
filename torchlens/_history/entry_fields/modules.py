"""The modules that an entry was computed in, given to and returned by."""

from torchlens._history import columns
from torchlens._history.entry_fields.reading import EntryReading


class ModuleFields(EntryReading):
    """The modules that an entry was computed in, given to and returned by."""

    __slots__ = ()

    @property
    def containing_module_origin(self) -> str | None:
        """The innermost module that was running, as `address:pass`; None in the model itself."""
        return self._one(columns.containing_module_origin)

    @property
    def containing_modules_origin_nested(self) -> list[str]:
        """All modules that were running, as `address:pass`, outermost first."""
        return self._one(columns.containing_modules_origin_nested)

    @property
    def module_nesting_depth(self) -> int:
        """How many nested modules were running."""
        return self._one(columns.module_nesting_depth)

    @property
    def modules_entered(self) -> list[str]:
        """Addresses of the modules it was given to."""
        return self._one(columns.modules_entered)

    @property
    def module_passes_entered(self) -> list[str]:
        """The module calls it was given to, as `address:pass`."""
        return self._one(columns.module_passes_entered)

    @property
    def modules_exited(self) -> list[str]:
        """Addresses of the modules that returned it, innermost first."""
        return self._one(columns.modules_exited)

    @property
    def module_passes_exited(self) -> list[str]:
        """The module calls that returned it, as `address:pass`, innermost first."""
        return self._one(columns.module_passes_exited)

    @property
    def is_submodule_input(self) -> bool:
        """Whether it was given to a module."""
        return self._one(columns.is_submodule_input)

    @property
    def is_submodule_output(self) -> bool:
        """Whether a module returned it."""
        return self._one(columns.is_submodule_output)

    @property
    def bottom_level_submodule_pass_exited(self) -> str | None:
        """The module without modules inside that returned it, as `address:pass`; None if none
        did.
        """
        return self._one(columns.bottom_level_submodule_pass_exited)

    @property
    def is_bottom_level_submodule_output(self) -> bool:
        """Whether a module without modules inside returned it."""
        return self._one(columns.is_bottom_level_submodule_output)
