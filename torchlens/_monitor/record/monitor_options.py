"""What the caller of `monitor` asked for, checked once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torchlens._compat.monitor_names import LOG_WORDS
from torchlens._monitor.record.series import KINDS
from torchlens._monitor.sinks.sink import Sink
from torchlens._text.error_wording import (
    check_choice,
    check_count,
    check_seconds,
    did_you_mean,
    got,
    one_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorOptions:
    """The options of `torchlens.monitor`; see there."""

    every: int = 1
    log: Any = KINDS
    modules: Any = None
    seconds: float | None = None
    budget: int = 64 << 20
    graph: str = "operations"
    compiled: str = "boundary"
    step: int | None = None
    evaluation: bool = False
    sinks: Any = ()

    def __post_init__(self) -> None:
        check_count("every", self.every, 1, "1 records every step")
        check_count("budget", self.budget, 1 << 20, "bytes of the run's files")
        if self.step is not None:
            check_count("step", self.step, 0, "where the training goes on")
        check_choice("graph", self.graph, ("operations", "modules"))
        check_choice("compiled", self.compiled, ("boundary", "eager"))
        if not isinstance(self.evaluation, bool):
            raise TypeError(f"evaluation must be True or False, got {got(self.evaluation)}.")
        check_seconds(self.seconds)
        object.__setattr__(self, "sinks", _checked_sinks(self.sinks))
        object.__setattr__(self, "log", _checked_kinds(self.log))
        object.__setattr__(self, "modules", _checked_modules(self.modules))

    def wants(self, address: str) -> bool:
        """Whether a module is to be recorded."""
        return self.modules is None or any(fnmatchcase(address, each) for each in self.modules)

    def check_modules(self, addresses: Sequence[str]) -> list[str]:
        """Raises if `modules` means none of the model's; returns those of its patterns that mean
        none.
        """
        missing = [
            each
            for each in self.modules or ()
            if not any(fnmatchcase(address, each) for address in addresses)
        ]
        if missing and len(missing) == len(self.modules):
            raise ValueError(
                "modules must name modules of the model, such as "
                f"{one_of(list(filter(None, addresses))[:3] or [''])}, got {one_of(missing)}: no "
                f"module has such an address. {did_you_mean(missing[0], addresses)}".rstrip()
            )
        return missing

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return {
            "every": self.every, "log": sorted(self.log), "seconds": self.seconds,
            "budget": self.budget,
            "graph": self.graph, "compiled": self.compiled, "evaluation": self.evaluation,
        }  # fmt: skip


def _checked_kinds(log: Any) -> frozenset[str]:
    if not isinstance(log, Iterable):
        raise TypeError(f"log must be a list of {one_of(KINDS)}, got {got(log)}.")
    found = frozenset(own for kind in _listed(log) for own in _kinds_named(kind))
    return frozenset(KINDS) if found & {"*", "all"} else found


def _kinds_named(kind: Any) -> tuple[str, ...]:
    """The kinds that a word stands for; it may be a kind itself."""
    named = LOG_WORDS.get(kind, (kind,)) if isinstance(kind, str) else ()
    if not named or not {*KINDS, "*", "all"}.issuperset(named):
        raise ValueError(
            f"log must be made of {one_of(KINDS)}, got {got(kind)}. "
            f"{did_you_mean(kind, KINDS)}".rstrip()
        )
    return named


def _checked_sinks(sinks: Any) -> tuple[Sink, ...]:
    found = _listed(sinks)
    for each in found:
        if not isinstance(each, Sink):
            raise TypeError(
                "sinks must be made of torchlens.sinks.TensorBoard('tb/'), Wandb(), "
                f"Trackio('project'), MLflow() or your own torchlens.sinks.Sink, got {got(each)}."
            )
    return tuple(found)


def _checked_modules(modules: Any) -> tuple[str, ...] | None:
    """Addresses: one means the module alone, `*` anything, `layer1.*` all that is inside."""
    if modules is None:
        return None
    given = _listed(modules)
    for each in given:
        if not isinstance(each, str):
            raise TypeError(
                "modules must be addresses such as 'layer1.0.conv1' or 'layer1.*', got "
                f"{got(each)}."
            )
    return tuple(given)


def _listed(given: Any) -> list[Any]:
    """What was given as one or as several."""
    is_several = isinstance(given, Iterable) and not isinstance(given, str)
    return list(given) if is_several else [given]
