"""A comparison in words, to fit a terminal."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchlens._text.grid import Column, laid_out
from torchlens._text.numbers import shape_text

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
    text = "\n".join(line.rstrip() for line in lines)
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
    """The outputs that both return, and which only one does."""
    outputs = diff.outputs
    only = [
        f"{_listed(paths)} only in the {whose}"
        for paths, whose in ((outputs.missing, "reference"), (outputs.extra, "candidate"))
        if paths
    ]
    if not only:
        return _error(diff)
    others = f"; the others: {_error(diff)}" if outputs.error == outputs.error else ""
    return f"differs: {'; '.join(only)}{others}"


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _error(diff: "Diff") -> str:
    outputs = diff.outputs
    if outputs.error != outputs.error:
        return "not saved"
    if outputs.units == 0:
        return "the same"
    eps = outputs.error / outputs.units if outputs.units < float("inf") else 0.0
    if outputs.agree and not any(_has_both(culprit) for culprit in diff.culprits):
        return (
            f"agrees: relative error {outputs.error:.1e} ({units_text(outputs.units, diff.unit)})"
        )
    rounding = (
        f"   (rounding would explain {diff.tolerance * eps:.0e})"
        if eps and outputs.units > diff.tolerance
        else ""
    )
    verb = "differs" if not outputs.agree else "differs little"
    return f"{verb}: relative error {outputs.error:.1e}{rounding}"


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


# -- the first one
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
    sides = [
        (f"{label} ({shape_text(shape)})", line, steps)
        for label, shape, line, steps in (
            (
                culprit.reference,
                culprit.reference_shape,
                culprit.reference_line,
                culprit.reference_operations,
            ),
            (
                culprit.candidate,
                culprit.candidate_shape,
                culprit.candidate_line,
                culprit.candidate_operations,
            ),
        )
        if label
    ]
    longest = max(len(name) for name, _, _ in sides)
    for name, line, steps in sides:
        count = f", {len(steps)} operations" if len(steps) > 1 else ""
        lines += _wrapped(
            f"{name:<{longest}}   {line}{count}".rstrip(), "      ", "          ", width
        )
    agree = "exactly" if culprit.input_units == 0 else f"to {units_text(culprit.input_units, unit)}"
    apart = (
        f"outputs differ by {culprit.error:.1e} = {units_text(culprit.units, unit)} (tolerance "
        f"{culprit.tolerance:g})"
    )
    if culprit.tolerance == 0:
        apart = f"outputs differ by {culprit.error:.1e} (whole numbers are exact)"
    if culprit.reference_shape != culprit.candidate_shape and culprit.error == float("inf"):
        apart = "outputs differ in shape"
    if _has_both(culprit):
        lines += _wrapped(f"inputs agree {agree}; {apart}", "      ", "      ", width)
    lines += _numbers(culprit, width)
    for number, reason in enumerate(culprit.reasons):
        lines += _wrapped(reason, "      -> " if not number else "       - ", "         ", width)
    if culprit.also:
        lines += _wrapped(f"with it: {', '.join(culprit.also)}", "      ", "      ", width)
    return lines


def _has_both(culprit: "Divergence") -> bool:
    """Whether it is something that both compute, not an output that only one returns."""
    return bool(culprit.reference and culprit.candidate)


def _numbers(culprit: "Divergence", width: int) -> list[str]:
    ours, theirs = culprit.constants
    if not ours and not theirs:
        return []
    said = [
        f"{whose} {', '.join(own[:4])}"
        for whose, own in (("reference", ours), ("candidate", theirs))
        if own
    ]
    return _wrapped(f"numbers only in one of them: {'; '.join(said)}", "      ", "      ", width)


# -- each by itself
# --------------------------------------------------------------------------------------------------


def _isolated(diff: "Diff", width: int) -> list[str]:
    culprits = diff.culprits
    agreeing = sum(pair.agrees for pair in diff.pairs)
    wrong = sum(map(_has_both, culprits))
    one = wrong == 1
    head = (
        f"{wrong} layer{'s' * (not one)} compute{'s' * one} something else; the others"
        if wrong
        else "All layers"
    )
    head += (
        f" agree to {units_text(diff.largest_own, diff.unit)} when given the reference's inputs."
    )
    lines = [*_wrapped(head, "", "", width), ""] if agreeing or culprits else []
    shown = culprits[:_MOST_SHOWN]
    columns = [
        Column("own error", [_own_error(c, diff.unit) for c in shown]),
        Column(
            "reference",
            [_layer(c.reference_module, c.reference, c.reference_type) for c in shown],
            is_number=False,
        ),
        Column("candidate", [_steps(c) for c in shown], is_number=False),
    ]
    table = laid_out(columns, width - 2)
    for number, line in enumerate(table):
        lines.append(f"  {line}")
        if number >= 2:
            lines += _why(shown[number - 2], width)
    if len(culprits) > len(shown):
        lines.append(f"  and {len(culprits) - len(shown)} more: diff.culprits")
    if diff.outputs.mended is not None and wrong:
        eps = (
            diff.outputs.error / diff.outputs.units
            if 0 < diff.outputs.units < float("inf")
            else 2.0**-23
        )
        units = diff.outputs.mended / eps
        word = "agrees" if units <= diff.tolerance * 8 else "still differs"
        which = "this" if one else f"these {wrong}"
        what = "what both return" if diff.outputs.missing or diff.outputs.extra else "the output"
        said = (
            f"With {which} put right, {what} {word}: {diff.outputs.mended:.1e} "
            f"({units_text(units, diff.unit)})."
        )
        lines += ["", *_wrapped(said, "  ", "  ", width)]
    return lines


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


def _why(culprit: "Divergence", width: int) -> list[str]:
    lines = []
    for number, reason in enumerate(culprit.reasons[:2]):
        lines += _wrapped(reason, "      -> " if not number else "       - ", "         ", width)
    if culprit.candidate_line:
        lines += _wrapped(culprit.candidate_line, "         at ", "            ", width)
    return lines


def _colored(text: str) -> str:
    """With the words that matter most in colour, for a terminal."""
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
