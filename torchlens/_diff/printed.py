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
    width = max(40, width or shutil.get_terminal_size((100, 24)).columns)
    lines = [f"{diff.reference_name} (reference)  vs  {diff.candidate_name} (candidate)", ""]
    lines += _fact("weights", diff.weights, width)
    lines += _fact("layers", diff.layers, width)
    lines += _fact("output", _output(diff), width)
    lines.append("")
    if diff.ok:
        lines += _wrapped(_agreement(diff), "", "", width)
    elif diff.is_isolated:
        lines += _isolated(diff, width)
    else:
        lines += _first(diff, width)
    for note in diff.notes:
        lines += ["", *_wrapped(note, "", "", width)]
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


def _fact(name: str, text: str, width: int) -> list[str]:
    return _wrapped(text, f"  {name:<9} ", " " * 12, width)


def _wrapped(text: str, first: str, rest: str, width: int) -> list[str]:
    found = textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return found or [first.rstrip()]


def _output(diff: "Diff") -> str:
    """The error of the outputs, and the outputs that only one model returns."""
    outputs = diff.outputs
    only = [
        f"{first_few(paths)} only in the {whose}"
        for paths, whose in ((outputs.missing, "reference"), (outputs.extra, "candidate"))
        if paths
    ]
    if not only:
        return _error(diff)
    others = f"; the others: {_error(diff)}" if outputs.error == outputs.error else ""
    return f"differs: {'; '.join(only)}{others}"


def _error(diff: "Diff") -> str:
    outputs = diff.outputs
    if outputs.error != outputs.error:
        return "not saved"
    if outputs.units == 0:
        return "the same"
    text = f"relative error {outputs.error:.1e}"
    if outputs.agree and not any(map(_has_both, diff.culprits)):
        return f"agrees: {text} ({units_text(outputs.units, diff.unit)})"
    if diff.tolerance < outputs.units < float("inf"):
        text += f"   (rounding would explain {diff.tolerance * _epsilon(diff):.0e})"
    return f"differs{' little' * outputs.agree}: {text}"


def _epsilon(diff: "Diff") -> float:
    """The unit of rounding of the outputs."""
    outputs = diff.outputs
    is_known = 0 < outputs.units < float("inf")
    return outputs.error / outputs.units if is_known else epsilon_of()


def _agreement(diff: "Diff") -> str:
    largest = max((pair.units for pair in diff.pairs if pair.units == pair.units), default=0.0)
    own = (
        f"; given the reference's inputs, each to {units_text(diff.largest_own, diff.unit)}"
        if diff.is_isolated
        else ""
    )
    return (
        f"They agree: {len(diff.pairs)} pairs, the furthest {units_text(largest, diff.unit)} "
        f"apart{own}."
    )


# -- the first divergence
# --------------------------------------------------------------------------------------------------


def _first(diff: "Diff", width: int) -> list[str]:
    lines = _block(diff.culprits[0], "FIRST DIVERGENCE", width, diff.unit)
    others = diff.culprits[1:]
    for other in others[: _MOST_SHOWN - 1]:
        lines += ["", *_block(other, "ALSO, independent of it", width, diff.unit)]
    if not any(map(_has_both, diff.culprits)):
        return lines
    advice = (
        "Errors behind a divergence are hidden by it. To see each layer's own: isolate=True, "
        f"--isolate (needs the live candidate, runs its {diff.num_replayed} operations again)."
    )
    return [*lines, "", *_wrapped(advice, "", "", width)]


def _block(culprit: "Divergence", title: str, width: int, unit: str) -> list[str]:
    ours = culprit.reference_module or culprit.reference or "nothing"
    theirs = culprit.candidate_module or culprit.candidate or "nothing"
    lines = _wrapped(f"{title}  {ours}  <->  {theirs}", "  ", "      ", width)
    lines += _sides(culprit, width)
    if _has_both(culprit):
        agree = f"to {units_text(culprit.input_units, unit)}" if culprit.input_units else "exactly"
        text = f"inputs agree {agree}; {_how_far(culprit, unit)}"
        lines += _wrapped(text, "      ", "      ", width)
    lines += _numbers(culprit, width)
    lines += _reasons(culprit.reasons, width)
    if culprit.also:
        lines += _wrapped(f"with it: {', '.join(culprit.also)}", "      ", "      ", width)
    return lines


def _sides(culprit: "Divergence", width: int) -> list[str]:
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
            lines += _wrapped(text.rstrip(), "      ", "          ", width)
    return lines


def _how_far(culprit: "Divergence", unit: str) -> str:
    if culprit.reference_shape != culprit.candidate_shape and culprit.error == float("inf"):
        return "outputs differ in shape"
    if culprit.tolerance == 0:
        return f"outputs differ by {culprit.error:.1e} (whole numbers are exact)"
    units = units_text(culprit.units, unit)
    return f"outputs differ by {culprit.error:.1e} = {units} (tolerance {culprit.tolerance:g})"


def _reasons(reasons: Sequence[str], width: int) -> list[str]:
    lines = []
    for number, reason in enumerate(reasons):
        lines += _wrapped(reason, "       - " if number else "      -> ", "         ", width)
    return lines


def _has_both(culprit: "Divergence") -> bool:
    """True unless it is an output that only one model returns."""
    return bool(culprit.reference and culprit.candidate)


def _numbers(culprit: "Divergence", width: int) -> list[str]:
    ours, theirs = (", ".join(own[:4]) for own in culprit.constants)
    said = [f"reference {ours}"] * bool(ours) + [f"candidate {theirs}"] * bool(theirs)
    text = f"numbers only in one of them: {'; '.join(said)}"
    return _wrapped(text, "      ", "      ", width) if said else []


# -- isolated divergences
# --------------------------------------------------------------------------------------------------


def _isolated(diff: "Diff", width: int) -> list[str]:
    culprits = diff.culprits
    wrong = sum(map(_has_both, culprits))
    head = "All layers"
    if wrong:
        verb = "layer computes" if wrong == 1 else "layers compute"
        head = f"{wrong} {verb} something else; the others"
    own = units_text(diff.largest_own, diff.unit)
    text = f"{head} agree to {own} when given the reference's inputs."
    shown = culprits[:_MOST_SHOWN]
    lines = [*_wrapped(text, "", "", width), "", *_table(shown, diff.unit, width)]
    if len(culprits) > len(shown):
        lines.append(f"  and {len(culprits) - len(shown)} more: diff.culprits")
    if diff.outputs.mended is not None and wrong:
        lines += ["", *_wrapped(_mended(diff, diff.outputs.mended, wrong), "  ", "  ", width)]
    return lines


def _table(shown: Sequence["Divergence"], unit: str, width: int) -> list[str]:
    """A table of divergences, each row followed by its reasons and its source line."""
    ours = [_layer(c.reference_module, c.reference, c.reference_type) for c in shown]
    columns = [
        Column("own error", [_own_error(c, unit) for c in shown]),
        Column("reference", ours, is_number=False),
        Column("candidate", [_steps(c) for c in shown], is_number=False),
    ]
    header, rule, *rows = laid_out(columns, width - 2)
    lines = [f"  {header}", f"  {rule}"]
    for row, culprit in zip(rows, shown, strict=True):
        lines += [f"  {row}", *_reasons(culprit.reasons[:2], width)]
        if culprit.candidate_line:
            lines += _wrapped(culprit.candidate_line, "         at ", "            ", width)
    return lines


def _mended(diff: "Diff", error: float, wrong: int) -> str:
    """`With these 3 put right, the output agrees: 1.7e-07 (1.4 eps).`"""
    units = error / _epsilon(diff)
    verb = "agrees" if units <= diff.tolerance * 8 else "still differs"
    which = "this" if wrong == 1 else f"these {wrong}"
    is_part = diff.outputs.missing or diff.outputs.extra
    what = "what both return" if is_part else "the output"
    units_left = units_text(units, diff.unit)
    return f"With {which} put right, {what} {verb}: {error:.1e} ({units_left})."


def _own_error(culprit: "Divergence", unit: str) -> str:
    return (
        units_text(culprit.units, "eps" if unit == "eps" else "times") if _has_both(culprit) else ""
    )


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
