"""Plants mistakes into ports, one at a time, and counts how many are located: `python -m
benchmarks.planted [name ...]`.
"""

import sys
import time
from types import ModuleType
from typing import Any, NamedTuple

import torchlens as tl
from benchmarks.planted import convnet, recurrent, transformer, unet

__all__ = ["PORTS", "Trial", "clean", "trial"]

PORTS: dict[str, ModuleType] = {
    "transformer": transformer,
    "convnet": convnet,
    "recurrent": recurrent,
    "unet": unet,
}


class Trial(NamedTuple):
    """One mistake: whether a culprit lies where it was planted, how many others there are, and the
    guess.
    """

    name: str
    is_located: bool
    num_extra: int
    first_is_it: bool  # without isolating: whether the first divergence is the mistake
    reason: str
    diff: tl.Diff


def _history(port: Any, model: Any, given: Any) -> tl.ModelHistory:
    convert = getattr(port, "candidate_input", None)
    return tl.log_forward_pass(model, given if convert is None else convert(given))


def clean(port: Any) -> tl.Diff:
    """The port without a mistake."""
    model, given = port.example()
    return tl.diff(
        tl.log_forward_pass(model, given), _history(port, port.ported(model), given), isolate=True
    )


def trial(port: Any, name: str) -> Trial:
    """Plants one mistake and looks for it."""
    model, given = port.example()
    address, mistake, *also = port.MISTAKES[name]
    candidate = _history(port, port.ported(model, {address: mistake}), given)
    reference = tl.log_forward_pass(model, given)
    first = tl.diff(reference, candidate).first
    diff = tl.diff(reference, candidate, isolate=True)
    hits = [culprit for culprit in diff.culprits if _is_at(culprit, candidate, {address, *also})]
    at_first = first is not None and _is_at(first, candidate, {address, *also})
    reason = hits[0].reason if hits else ""
    return Trial(name, bool(hits), len(diff.culprits) - bool(hits), at_first, reason, diff)


def _is_at(culprit: Any, candidate: tl.ModelHistory, addresses: set[str]) -> bool:
    """Whether an operation of the module that was tampered with is among those that the culprit
    names.
    """
    entries = [candidate[label] for label in culprit.candidate_operations]
    modules = {(entry.containing_module_origin or "").rpartition(":")[0] or (entry.containing_module_origin or "")
               for entry in entries}  # fmt: skip
    return bool(modules & addresses)


def main(names: list[str]) -> int:
    """Prints a line for each mistake and a sum; the exit code is that of a test."""
    num_located = num_first = num_total = num_false = 0
    started = time.perf_counter()
    for title, port in PORTS.items():
        if names and title not in names:
            continue
        found = clean(port)
        num_false += len(found.culprits)
        print(f"{title}: clean: {len(found.culprits)} culprits, {len(found.pairs)} pairs")
        for name in port.MISTAKES:
            done = trial(port, name)
            good = done.is_located and done.num_extra <= 1
            num_total, num_located, num_first = (
                num_total + 1,
                num_located + good,
                num_first + done.first_is_it,
            )
            mark = "located" if good else "MISSED "
            extra = f" (+{done.num_extra})" if done.num_extra else ""
            print(
                f"  {mark} {name}{extra}{'' if done.first_is_it else ' (not first)'}: {done.reason}"
            )
    seconds = time.perf_counter() - started
    print(
        f"{num_located} of {num_total} located, {num_first} as the first divergence; {num_false} "
        "culprits in clean ports"
    )
    print(f"{seconds:.0f} s")
    return 0 if num_located >= 0.9 * num_total and not num_false else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
