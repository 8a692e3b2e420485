"""The result of a comparison."""

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torchlens._diff.printed import diff_text
from torchlens._history.receipt import exported_receipt
from torchlens._text.error_wording import check_count
from torchlens._text.json_text import write_json

if TYPE_CHECKING:
    import pandas

    from torchlens._page.page import Exploration


@dataclass(frozen=True)
class Pair:
    """A layer of the reference and the layer of the candidate that corresponds to it.

    `error` is the relative error ‖a - b‖ / ‖a‖; `units` is the same in units of rounding. `layout`
    describes the order of the candidate's axes.
    """

    reference: str
    candidate: str
    reference_module: str
    candidate_module: str
    error: float
    units: float
    agrees: bool
    layout: str = ""


@dataclass(frozen=True)
class Divergence:
    """A place where the two compute something different from the same inputs.

    `reference_operations` and `candidate_operations` are the steps from the inputs that agree to
    the result that does not. `reasons` are guesses, the likeliest first; `reason` is the first, or
    "". If one of the two does not return an output of the other, the fields of its side are empty.
    """

    reference: str
    candidate: str
    reference_module: str
    candidate_module: str
    reference_line: str
    candidate_line: str
    reference_type: str
    candidate_type: str
    reference_shape: tuple[int, ...]
    candidate_shape: tuple[int, ...]
    error: float
    units: float
    tolerance: float
    input_units: float
    is_own: bool
    reference_operations: tuple[str, ...] = ()
    candidate_operations: tuple[str, ...] = ()
    constants: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    reasons: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """The likeliest reason, in a few words."""
        return self.reasons[0] if self.reasons else ""


@dataclass(frozen=True)
class Unmatched:
    """Labels of the layers without a counterpart: intermediate steps that only one of the two
    takes.
    """

    reference: tuple[str, ...]
    candidate: tuple[str, ...]


@dataclass(frozen=True)
class Outputs:
    """The largest relative error of the outputs, as a number and in units of rounding.

    `missing` and `extra` are the paths of the outputs that only the reference, or only the
    candidate, returns. `mended` is the error with the reference's values at all culprits.
    """

    error: float
    units: float
    agree: bool
    mended: float | None = None
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Diff:
    """Where two histories diverge. Print it.

    >>> diff = torchlens.diff(reference, candidate)
    >>> diff.ok, diff.first, diff.culprits, diff.pairs, diff.unmatched
    """

    reference_name: str
    candidate_name: str
    ok: bool
    pairs: list[Pair]
    culprits: list[Divergence]
    unmatched: Unmatched
    outputs: Outputs
    weights: str
    layers: str
    tolerance: float
    is_isolated: bool
    notes: tuple[str, ...] = ()
    num_replayed: int = 0
    largest_own: float = 0.0
    unit: str = "eps"
    _histories: tuple[Any, Any] = field(default=(None, None), repr=False, compare=False)

    @property
    def first(self) -> Divergence | None:
        """The first divergence: inputs agree, outputs do not. None if there is none."""
        return self.culprits[0] if self.culprits else None

    def __str__(self) -> str:
        return diff_text(self)

    def __repr__(self) -> str:
        count = len(self.culprits)
        state = "agrees" if self.ok else f"{count} divergence{'s' * (count != 1)}"
        return (
            f"<Diff of {self.reference_name} and {self.candidate_name}: {state}; print() it to see "
            "more>"
        )

    def text(self, width: int | None = None, color: bool = False) -> str:
        """What printing shows, for a terminal of a given width."""
        if width is not None:
            check_count("width", width, 1)
        return diff_text(self, width, color)

    def to_json(
        self, path: str | os.PathLike[str] | None = None, indent: int | None = None
    ) -> str | None:
        """Returns everything as JSON, or writes it to `path`."""
        return write_json(_finite(self._facts()), path, indent)

    def _facts(self) -> dict[str, Any]:
        return {
            "reference": self.reference_name,
            "candidate": self.candidate_name,
            "ok": self.ok,
            "tolerance": self.tolerance,
            "isolated": self.is_isolated,
            "weights": self.weights,
            "layers": self.layers,
            "outputs": asdict(self.outputs),
            "culprits": [
                {**asdict(culprit), "reason": culprit.reason} for culprit in self.culprits
            ],
            "pairs": [asdict(pair) for pair in self.pairs],
            "unmatched": asdict(self.unmatched),
            "notes": list(self.notes),
        }

    def explore(self, path: str | os.PathLike[str] | None = "diff.html") -> "Exploration":
        """Writes one HTML file with both graphs side by side: the matches, their errors, and the
        culprits with reasons.

        >>> diff.explore('diff.html')
        """
        from torchlens._page.pairs import ShownPair
        from torchlens._page.together import explore_together

        shown = {}
        for pair in self.pairs:
            ends = pair.reference, pair.candidate
            colour = "#7bbf8e" if pair.agrees else "#f0b35e"
            shown[ends] = ShownPair(*ends, note="", error=pair.error, colour=colour)
        for culprit in self.culprits:
            key = culprit.reference, culprit.candidate
            error = shown[key].error if key in shown else culprit.error
            note = culprit.reason or "computes something different from the same inputs"
            shown[key] = ShownPair(
                culprit.reference or None,
                culprit.candidate or None,
                note=note,
                error=error,
                colour="#d9534f",
            )
        names = (f"{self.reference_name} (reference)", f"{self.candidate_name} (candidate)")
        return explore_together(*self._histories, path, pairs=[*shown.values()], names=names)

    def to_pandas(self) -> "pandas.DataFrame":
        """A table with one row per pair, in the order of the reference."""
        import pandas

        columns = list(Pair.__dataclass_fields__)
        table = pandas.DataFrame([asdict(pair) for pair in self.pairs], columns=columns)
        for name, history in zip(("reference", "candidate"), self._histories, strict=True):
            if history is not None:
                table.attrs[name] = exported_receipt(history._log).to_dict()
        return table


def _finite(tree: Any) -> Any:
    """With text in place of numbers that JSON cannot express."""
    if isinstance(tree, dict):
        return {key: _finite(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(item) for item in tree]
    if isinstance(tree, float) and (tree != tree or tree in (float("inf"), -float("inf"))):
        return str(tree)
    return tree
