"""A comparison in words, to fit a terminal."""

import shutil
import textwrap
from typing import TYPE_CHECKING

from torchlens.history.grid import Column, laid_out
from torchlens.history.units import shape_text

if TYPE_CHECKING:
    from torchlens.comparing.diff import BaseDiff, Divergence

__all__ = ["diff_text", "units_text"]

_MOST_SHOWN = 20


def diff_text(diff: "BaseDiff", width: int | None = None, color: bool = False) -> str:
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
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return found or [first.rstrip()]


def _output(diff: "BaseDiff") -> str:
    outputs = diff.outputs
    if outputs.error != outputs.error:
        return "not saved"
    if outputs.units == 0:
        return "the same"
    eps = outputs.error / outputs.units if outputs.units < float("inf") else 0.0
    if outputs.agree and diff.ok:
        return f"agrees: relative error {outputs.error:.1e} ({units_text(outputs.units, diff.unit)})"
    rounding = f"   (rounding would explain {diff.tolerance * eps:.0e})" if eps else ""
    verb = "differs" if not outputs.agree else "differs little"
    return f"{verb}: relative error {outputs.error:.1e}{rounding}"


def _agreement(diff: "BaseDiff") -> str:
    largest = max((pair.units for pair in diff.pairs if pair.units == pair.units), default=0.0)
    own = f"; given the reference's inputs, each to {units_text(diff.largest_own, diff.unit)}" if diff.is_isolated else ""
    return f"They agree: {len(diff.pairs)} pairs, the furthest {units_text(largest, diff.unit)} apart{own}."


# -- the first one -----------------------------------------------------------------------------------------------------


def _first(diff: "BaseDiff", width: int) -> list[str]:
    lines = _block(diff.culprits[0], "FIRST DIVERGENCE", width, diff.unit)
    others = diff.culprits[1:]
    for other in others[: _MOST_SHOWN - 1]:
        lines += ["", *_block(other, "ALSO, independent of it", width, diff.unit)]
    advice = (
        "Errors behind a divergence are hidden by it. To see each layer's own: isolate=True, --isolate "
        f"(needs the live candidate, runs its {diff.num_replayed} operations again)."
    )
    return [*lines, "", *_wrapped(advice, "", "", width)]


def _block(culprit: "Divergence", title: str, width: int, unit: str) -> list[str]:
    ours, theirs = culprit.reference_module or culprit.reference, culprit.candidate_module or culprit.candidate
    lines = _wrapped(f"{title}  {ours}  <->  {theirs}", "  ", "      ", width)
    names = [f"{culprit.reference} ({shape_text(culprit.reference_shape)})",
             f"{culprit.candidate} ({shape_text(culprit.candidate_shape)})"]  # fmt: skip
    longest = max(map(len, names))
    for name, line, steps in zip(
        names, (culprit.reference_line, culprit.candidate_line),
        (culprit.reference_operations, culprit.candidate_operations), strict=True,
    ):  # fmt: skip
        count = f", {len(steps)} operations" if len(steps) > 1 else ""
        lines += _wrapped(f"{name:<{longest}}   {line}{count}".rstrip(), "      ", "          ", width)
    agree = "exactly" if culprit.input_units == 0 else f"to {units_text(culprit.input_units, unit)}"
    apart = f"outputs differ by {culprit.error:.1e} = {units_text(culprit.units, unit)} (tolerance {culprit.tolerance:g})"
    if culprit.reference_shape != culprit.candidate_shape and culprit.error == float("inf"):
        apart = "outputs differ in shape"
    lines += _wrapped(f"inputs agree {agree}; {apart}", "      ", "      ", width)
    lines += _numbers(culprit, width)
    for number, reason in enumerate(culprit.reasons):
        lines += _wrapped(reason, "      -> " if not number else "       - ", "         ", width)
    if culprit.also:
        lines += _wrapped(f"with it: {', '.join(culprit.also)}", "      ", "      ", width)
    return lines


def _numbers(culprit: "Divergence", width: int) -> list[str]:
    ours, theirs = culprit.constants
    if not ours and not theirs:
        return []
    said = [f"{whose} {', '.join(own[:4])}" for whose, own in (("reference", ours), ("candidate", theirs)) if own]
    return _wrapped(f"numbers only in one of them: {'; '.join(said)}", "      ", "      ", width)


# -- each by itself ----------------------------------------------------------------------------------------------------


def _isolated(diff: "BaseDiff", width: int) -> list[str]:
    culprits = diff.culprits
    agreeing = sum(pair.agrees for pair in diff.pairs)
    one = len(culprits) == 1
    head = f"{len(culprits)} layer{'s' * (not one)} compute{'s' * one} something else; "
    head += f"the others agree to {units_text(diff.largest_own, diff.unit)} when given the reference's inputs."
    lines = [*_wrapped(head, "", "", width), ""] if agreeing or culprits else []
    shown = culprits[:_MOST_SHOWN]
    columns = [
        Column("own error", [units_text(c.units, "eps" if diff.unit == "eps" else "times") for c in shown]),
        Column("reference", [_what(c.reference_module, c.reference, c.reference_type) for c in shown], is_number=False),
        Column("candidate", [_steps(c) for c in shown], is_number=False),
    ]
    table = laid_out(columns, width - 2)
    for number, line in enumerate(table):
        lines.append(f"  {line}")
        if number >= 2:
            lines += _why(shown[number - 2], width)
    if len(culprits) > len(shown):
        lines.append(f"  and {len(culprits) - len(shown)} more: diff.culprits")
    if diff.outputs.mended is not None:
        eps = diff.outputs.error / diff.outputs.units if 0 < diff.outputs.units < float("inf") else 2.0**-23
        units = diff.outputs.mended / eps
        word = "agrees" if units <= diff.tolerance * 8 else "still differs"
        which = "this" if one else f"these {len(culprits)}"
        said = f"With {which} put right, the output {word}: {diff.outputs.mended:.1e} ({units_text(units, diff.unit)})."
        lines += ["", *_wrapped(said, "  ", "  ", width)]
    return lines


def _what(module: str, label: str, kind: str) -> str:
    return f"{module}  {kind}" if module else label


def _steps(culprit: "Divergence") -> str:
    count = len(culprit.candidate_operations)
    what = culprit.candidate_module or culprit.candidate
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
