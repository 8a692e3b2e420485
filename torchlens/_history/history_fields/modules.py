"""The modules that ran."""

from torchlens._history.history_fields.reading import HistoryReading


class ModuleFields(HistoryReading):
    """The modules that ran."""

    @property
    def module_addresses(self) -> list[str]:
        """The modules that ran, in the order of their first call."""
        return list(self._log.graph.module_tree.num_passes)

    @property
    def module_types(self) -> dict[str, str]:
        """Module address → its class."""
        return {
            address: self._log.recording.module_classes[address]
            for address in self.module_addresses
        }

    @property
    def module_passes(self) -> list[str]:
        """Every call of a module, as `address:pass`, in order."""
        return self._log.module_passes(range(1, len(self._log.recording.module_calls)))

    @property
    def module_num_passes(self) -> dict[str, int]:
        """Module address → how often it was called."""
        return dict(self._log.graph.module_tree.num_passes)

    @property
    def module_children(self) -> dict[str, list[str]]:
        """Module address → the modules called inside it."""
        return {
            address: list(below) for address, below in self._log.graph.module_tree.children.items()
        }

    @property
    def top_level_modules(self) -> list[str]:
        """The modules that the model itself calls."""
        return list(self._log.graph.module_tree.top_level)

    @property
    def module_nparams(self) -> dict[str, int]:
        """Module address → how many numbers are in its parameters and in those of all modules below
        it.

        A parameter that is shared counts once in each.
        """
        own, params = self._log.recording.module_params, self._log.recording.params
        found: dict[str, set[int]] = {}
        for address, numbers in own.items():
            parts = address.split(".")
            for end in range(1, len(parts) + 1):
                found.setdefault(".".join(parts[:end]), set()).update(numbers)
        return {
            address: sum(params[number].numel() for number in found.get(address, ()))
            for address in self.module_addresses
        }

    @property
    def module_layers(self) -> dict[str, list[str]]:
        """Module address → labels of the entries computed inside it."""
        calls = self._log.recording.module_calls
        found: dict[str, dict[str, None]] = {address: {} for address in self.module_addresses}
        for label, row in zip(
            self._log.labels(self._everything), self._log.rows(self._everything), strict=True
        ):
            for call in self._log.graph.module_chains[row.module_call]:
                found[calls[call].address][label] = None
        return {address: list(labels) for address, labels in found.items()}
