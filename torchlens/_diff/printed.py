"""A comparison as text, wrapped to the width of a terminal."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchlens._recording.tolerance import epsilon_of
from torchlens._text.grid import Column, laid_out
from torchlens._text.numbers import first_few, shape_text
from torchlens._text.plain_text import printable

if TYPE_CHECKING:
    from torchlens._diff.result import Diff, Divergence


_MOST_SHOWN = 20


def diff_text(diff: "Diff", width: int | None = None, color: bool = False) -> str:
    """What printing a diff shows."""
    lines = _Text(diff, max(40, width or shutil.get_terminal_size((100, 24)).columns)).lines()
    # Names come from files: escape sequences in them must not reach the terminal.
    text = "\n".join(printable(line.rstrip()) for line in lines)
    return _colored(text) if color else text


def units_text(units: float, unit: str = "eps") -> str:
    """`46,785 eps`, `1.3e7 eps`."""
    if units != units:
        return "?"
    if units == float("inf"):
        return "no end"
    if units >= 1e6:
        mantissa, _, exponent = f"{units:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)} {unit}"
    return f"{units:,.0f} {unit}" if units >= 100 else f"{units:.1f} {unit}"


class _Text:
    """The lines of one comparison, in a width."""

    def __init__(self, diff: "Diff", width: int) -> None:
        self._diff, self._outputs, self._width = diff, diff.outputs, width
        # The culprits that are layers, not outputs that only one model returns.
        self._num_layers = sum(map(_has_both, diff.culprits))

    def lines(self) -> list[str]:
        diff = self._diff
        found = [f"{diff.reference_name} (reference)  vs  {diff.candidate_name} (candidate)", ""]
        for name, text in (
            ("weights", diff.weights),
            ("layers", diff.layers),
            ("output", self._output()),
        ):
            found += self._wrapped(text, f"  {name:<9} ", " " * 12)
        found.append("")
        if diff.ok:
            found += self._wrapped(self._agreement())
        else:
            found += self._isolated() if diff.is_isolated else self._first()
        for note in diff.notes:
            found += ["", *self._wrapped(note)]
        return found

    def _wrapped(self, text: str, first: str = "", rest: str = "") -> list[str]:
        wrapper = textwrap.TextWrapper(
            self._width, first, rest, break_long_words=False, break_on_hyphens=False
        )
        return wrapper.wrap(text) or [first.rstrip()]

    def _units(self, units: float) -> str:
        return units_text(units, self._diff.unit)

    # -- outputs

    def _output(self) -> str:
        """The error of the outputs, and the outputs that only one model returns."""
        outputs = self._outputs
        only = [
            f"{first_few(paths)} only in the {whose}"
            for paths, whose in ((outputs.missing, "reference"), (outputs.extra, "candidate"))
            if paths
        ]
        if not only:
            return self._error()
        others = f"; the others: {self._error()}" if outputs.error == outputs.error else ""
        return f"differs: {'; '.join(only)}{others}"

    def _error(self) -> str:
        outputs, tolerance = self._outputs, self._diff.tolerance
        if outputs.error != outputs.error:
            return "not saved"
        if outputs.units == 0:
            return "the same"
        text = f"relative error {outputs.error:.1e}"
        if outputs.agree and not self._num_layers:
            return f"agrees: {text} ({self._units(outputs.units)})"
        if tolerance < outputs.units < float("inf"):
            text += f"   (rounding would explain {tolerance * self._epsilon():.0e})"
        return f"differs{' little' * outputs.agree}: {text}"

    def _epsilon(self) -> float:
        """The unit of rounding of the outputs."""
        outputs = self._outputs
        is_known = 0 < outputs.units < float("inf")
        return outputs.error / outputs.units if is_known else epsilon_of()

    def _agreement(self) -> str:
        diff = self._diff
        largest = max((pair.units for pair in diff.pairs if pair.units == pair.units), default=0.0)
        text = f"They agree: {len(diff.pairs)} pairs, the furthest {self._units(largest)} apart"
        if diff.is_isolated:
            text += f"; given the reference's inputs, each to {self._units(diff.largest_own)}"
        return f"{text}."

    # -- the first divergence

    def _first(self) -> list[str]:
        culprits = self._diff.culprits
        lines = self._block(culprits[0], "FIRST DIVERGENCE")
        for other in culprits[1:_MOST_SHOWN]:
            lines += ["", *self._block(other, "ALSO, independent of it")]
        if not self._num_layers:
            return lines
        advice = (
            "Errors behind a divergence are hidden by it. To see each layer's own: isolate=True, "
            "--isolate (needs the live candidate, runs its "
            f"{self._diff.num_replayed} operations again)."
        )
        return [*lines, "", *self._wrapped(advice)]

    def _block(self, culprit: "Divergence", title: str) -> list[str]:
        ours = culprit.reference_module or culprit.reference or "nothing"
        theirs = culprit.candidate_module or culprit.candidate or "nothing"
        lines = self._wrapped(f"{title}  {ours}  <->  {theirs}", "  ", "      ")
        lines += self._sides(culprit)
        if _has_both(culprit):
            units = culprit.input_units
            agree = f"to {self._units(units)}" if units else "exactly"
            text = f"inputs agree {agree}; {self._how_far(culprit)}"
            lines += self._wrapped(text, "      ", "      ")
        ours, theirs = (", ".join(own[:4]) for own in culprit.constants)
        said = [f"reference {ours}"] * bool(ours) + [f"candidate {theirs}"] * bool(theirs)
        if said:
            text = f"numbers only in one of them: {'; '.join(said)}"
            lines += self._wrapped(text, "      ", "      ")
        lines += self._reasons(culprit.reasons)
        if culprit.also:
            lines += self._wrapped(f"with it: {', '.join(culprit.also)}", "      ", "      ")
        return lines

    def _sides(self, culprit: "Divergence") -> list[str]:
        """A line for each side: its label, shape, source line and number of operations."""
        sides = [
            (culprit.reference, culprit.reference_shape, culprit.reference_line,
             culprit.reference_operations),
            (culprit.candidate, culprit.candidate_shape, culprit.candidate_line,
             culprit.candidate_operations),
        ]  # fmt: skip
        names = [f"{label} ({shape_text(shape)})" if label else "" for label, shape, _, _ in sides]
        lines: list[str] = []
        for name, (_, _, line, steps) in zip(names, sides, strict=True):
            if name:
                count = f", {len(steps)} operations" if len(steps) > 1 else ""
                text = f"{name:<{max(map(len, names))}}   {line}{count}"
                lines += self._wrapped(text.rstrip(), "      ", "          ")
        return lines

    def _how_far(self, culprit: "Divergence") -> str:
        if culprit.reference_shape != culprit.candidate_shape and culprit.error == float("inf"):
            return "outputs differ in shape"
        text = f"outputs differ by {culprit.error:.1e}"
        if culprit.tolerance == 0:
            return f"{text} (whole numbers are exact)"
        return f"{text} = {self._units(culprit.units)} (tolerance {culprit.tolerance:g})"

    def _reasons(self, reasons: Sequence[str]) -> list[str]:
        lines = []
        for number, reason in enumerate(reasons):
            lines += self._wrapped(reason, "       - " if number else "      -> ", "         ")
        return lines

    # -- isolated divergences

    def _isolated(self) -> list[str]:
        culprits, wrong, mended = self._diff.culprits, self._num_layers, self._outputs.mended
        head = "All layers"
        if wrong:
            verb = "layer computes" if wrong == 1 else "layers compute"
            head = f"{wrong} {verb} something else; the others"
        own = self._units(self._diff.largest_own)
        text = f"{head} agree to {own} when given the reference's inputs."
        lines = [*self._wrapped(text), "", *self._table(culprits[:_MOST_SHOWN])]
        if len(culprits) > _MOST_SHOWN:
            lines.append(f"  and {len(culprits) - _MOST_SHOWN} more: diff.culprits")
        if mended is not None and wrong:
            lines += ["", *self._wrapped(self._mended(mended), "  ", "  ")]
        return lines

    def _table(self, shown: Sequence["Divergence"]) -> list[str]:
        """A table of divergences, each row followed by its reasons and its source line."""
        ours = [_layer(c.reference_module, c.reference, c.reference_type) for c in shown]
        columns = [
            Column("own error", [self._own_error(c) for c in shown]),
            Column("reference", ours, is_number=False),
            Column("candidate", [_steps(c) for c in shown], is_number=False),
        ]
        header, rule, *rows = laid_out(columns, self._width - 2)
        lines = [f"  {header}", f"  {rule}"]
        for row, culprit in zip(rows, shown, strict=True):
            lines += [f"  {row}", *self._reasons(culprit.reasons[:2])]
            if culprit.candidate_line:
                lines += self._wrapped(culprit.candidate_line, "         at ", "            ")
        return lines

    def _mended(self, error: float) -> str:
        """`With these 3 put right, the output agrees: 1.7e-07 (1.4 eps).`"""
        units, wrong, outputs = error / self._epsilon(), self._num_layers, self._outputs
        verb = "agrees" if units <= self._diff.tolerance * 8 else "still differs"
        which = "this" if wrong == 1 else f"these {wrong}"
        what = "what both return" if outputs.missing or outputs.extra else "the output"
        return f"With {which} put right, {what} {verb}: {error:.1e} ({self._units(units)})."

    def _own_error(self, culprit: "Divergence") -> str:
        unit = self._diff.unit if self._diff.unit == "eps" else "times"
        return units_text(culprit.units, unit) if _has_both(culprit) else ""


def _has_both(culprit: "Divergence") -> bool:
    """True unless it is an output that only one model returns."""
    return bool(culprit.reference and culprit.candidate)


def _layer(module: str, label: str, kind: str) -> str:
    return f"{module}  {kind}" if module else label or "nothing"


def _steps(culprit: "Divergence") -> str:
    count = len(culprit.candidate_operations)
    what = culprit.candidate_module or culprit.candidate or "nothing"
    return f"{what}  {count} ops" if count > 1 else f"{what}  {culprit.candidate_type}"


def _colored(text: str) -> str:
    """Colours the most important words, for a terminal."""
    marks = {
        "FIRST DIVERGENCE": "31;1",
        "ALSO, independent of it": "31",
        "They agree": "32",
        "differs": "31",
        "agrees": "32",
    }
    for words, code in marks.items():
        text = text.replace(words, f"\033[{code}m{words}\033[0m", 1)
    return text.replace("      -> ", "      \033[33m->\033[0m ")
