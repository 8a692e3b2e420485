"""Numbers laid over a log: for layers by label, for modules by address."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from torchlens._history.log import Log


class Overlay(dict[str, float]):
    """A number per layer label or module address (`''` is the model), with what the numbers are.

    A module's number covers everything in it; `own` has its own share, without the modules inside.
    If several things are drawn as one, sums (time, bytes) are added up, and other numbers are
    averaged. Keys that a history does not have are ignored, because an overlay may come from
    another run of the model.

    >>> times = Overlay({'fc1': 0.002}, title='time', unit='seconds', is_sum=True)
    >>> history.render_graph(vis_color_by=times)
    """

    def __init__(
        self,
        values: Mapping[str, float],
        *,
        title: str,
        unit: str = "",
        is_sum: bool = False,
        own: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(values)
        self.title = title
        self.unit = unit  # 'seconds', 'bytes', 'FLOPs' or nothing
        self.is_sum = is_sum
        self.own = dict(own or {})


class Marks:
    """The numbers that a mapping of keys gives to the entries and module calls of one log.

    `find` gives the entries of a key that is neither a label nor a module, or raises. `number`
    makes a number of a value, or None of one that means nothing.
    """

    def __init__(
        self,
        log: Log,
        values: Mapping[Any, Any],
        find: Callable[[Any], Iterable[int]],
        number: Callable[[Any, Any], float | None],
    ) -> None:
        self.is_sum = isinstance(values, Overlay) and values.is_sum
        self._log = log
        self._of_entry: dict[int, float] = {}
        self._of_call: dict[int, float] = {}
        self._own_of_call: dict[int, float] = {}
        labels, calls = _labels(log), _module_calls(log)
        unknown = []
        for key, given in values.items():
            value = number(given, key)
            if key in labels:
                self._mark(self._of_entry, labels[key], value)
            elif key in calls:
                self._mark(self._of_call, calls[key], value)
            elif isinstance(values, Overlay):
                unknown.append(key)
            else:
                self._mark(self._of_entry, find(key), value)
        if unknown and len(unknown) == len(values):
            raise ValueError(
                f"None of the {len(unknown)} layers and modules of this overlay is in this "
                f"history, for instance {unknown[0]!r}. Was it made from another model?"
            )
        own = values.own if isinstance(values, Overlay) else {}
        for key, given in own.items():
            self._mark(self._own_of_call, calls.get(key, ()), number(given, key))

    @staticmethod
    def _mark(found: dict[int, float], places: Iterable[int], value: float | None) -> None:
        if value is not None:
            found.update(dict.fromkeys(places, value))

    def of(self, entries: Iterable[int], calls: Iterable[int] = ()) -> float | None:
        """The number of what is drawn as one: these entries, or the module calls that it is.

        An entry without a number of its own has that of the innermost module around it that has
        one. Several entries may have one and the same module's: it counts once.
        """
        whole = [self._of_call.get(call) for call in calls]
        known = [value for value in whole if value is not None]
        if not known or len(known) < len(whole):
            sources: dict[Hashable, float] = {}
            for entry in entries:
                if entry in self._of_entry:
                    sources["entry", entry] = self._of_entry[entry]
                else:
                    self._add_module(entry, sources)
            known = list(sources.values())
        if not known:
            return None
        return sum(known) if self.is_sum else sum(known) / len(known)

    def _add_module(self, entry: int, sources: dict[Hashable, float]) -> None:
        graph = self._log.graph
        is_operation = (
            len(graph.inputs) + len(graph.buffers)
            <= entry
            < len(graph.recorded) - len(graph.outputs)
        )
        if not is_operation or not (self._of_call or self._own_of_call):
            return
        for call in reversed((0, *self._log.module_chain(entry))):
            value = self._own_of_call.get(call, self._of_call.get(call))
            if value is not None:
                sources["call", call] = value
                return


def _labels(log: Log) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for entry in range(len(log.graph.recorded)):
        for label in (log.label_no_pass(entry), log.label_w_pass(entry)):
            found.setdefault(label, []).append(entry)
    return found


def _module_calls(log: Log) -> dict[Any, list[int]]:
    """The calls of each module, by address and by address with pass."""
    found: dict[Any, list[int]] = {"": [0]}
    for call in range(1, len(log.recording.module_calls)):
        for key in (log.recording.module_calls[call].address, log.module_pass(call)):
            found.setdefault(key, []).append(call)
    return found
