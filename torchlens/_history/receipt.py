"""What made a history: its model, structure, weights, inputs and versions."""

from dataclasses import dataclass, field
from typing import Any

from torchlens._history.log import Log
from torchlens._history.structure_hash import structure_hash
from torchlens._recording.origin import LiveOrigin, versions_now

_MOST_HASHED = 100_000_000  # bytes
_MOST_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class Receipt:
    """What made a history, as every exported table, page, picture and file says it.

    Two histories with equal digests are of equal weights and inputs. A digest is None where the
    values are not known: the log was made without them (meta tensors), they were changed in place
    since, or the inputs were neither saved nor kept. Exports of large models leave some out.
    """

    model: str
    structure: str | None
    weights: str | None
    inputs: str | None
    versions: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The receipt for JSON."""
        return {
            "model": self.model,
            "structure": self.structure,
            "weights": self.weights,
            "inputs": self.inputs,
            "versions": dict(self.versions),
        }

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        digests = [
            f"{name} {digest}"
            for name in ("structure", "weights", "inputs")
            if (digest := getattr(self, name)) is not None
        ]
        made_by = f" ({versions})" if versions else ""  # the graph of a run has none
        return f"{self.model}: {', '.join(digests)}{made_by}"


def receipt_of(log: Log) -> Receipt:
    """The receipt of a log."""
    origin = log.settle_origin()
    return Receipt(
        log.recording.model_name,
        structure_hash(log),
        origin.weights,
        origin.inputs,
        dict(origin.versions),
    )


def exported_receipt(log: Log) -> Receipt:
    """The receipt that an exported file or table carries: without what would take longer than the
    export, the structure of more than 10,000 entries and the digests of a model with more than
    100 MB of weights, unless they are known already.
    """
    model, origin = log.recording.model_name, log.recording.origin
    is_long = len(log.graph.recorded) > _MOST_ENTRIES
    structure = None if is_long else structure_hash(log)
    if isinstance(origin, LiveOrigin) and _size(origin) > _MOST_HASHED:
        return Receipt(model, structure, None, None, versions_now(origin.framework))
    origin = log.settle_origin()
    return Receipt(model, structure, origin.weights, origin.inputs, dict(origin.versions))


def _size(origin: LiveOrigin) -> int:
    return sum(weight.numel() * weight.element_size() for weight in origin.weights)
