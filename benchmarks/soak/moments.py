"""An interrupt at each moment that Python has for them, one by one."""

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torchlens as tl
from benchmarks.soak.figures import Figures
from benchmarks.soak.interrupts import Interrupt, told_of_dropped
from benchmarks.soak.subjects import Subject, all_subjects, check_torch
from benchmarks.zoo.torch_state import state_of_torch

__all__ = ["run_moments"]


def run_moments(figures: Figures, max_moments: int) -> None:
    """An interrupt at each moment, from the call of a log to its return, at which Python would let
    one in.

    Python looks for interrupts when a function begins and when a call has returned, so these
    moments can be visited one by one, a log for each, instead of waiting for chance to find the bad
    one.
    """
    subject = all_subjects()[4]  # the one that writes through views
    before = state_of_torch()
    total, _ = _interrupt_at(-1, subject.log)
    step = -(-total // max_moments)
    dropped: list[Any] = []
    with told_of_dropped(lambda: dropped.append(None)):
        num_done = _visit(
            subject, range(random.randrange(step), total, step), dropped, before, figures
        )
    subject.check(subject.log(), figures)
    figures.logs += 1
    figures.moments += num_done
    print(
        f"  {num_done} interrupts, at one of every {step} of the {total} moments that there are",
        flush=True,
    )


def _visit(
    subject: Subject, moments: range, dropped: list[Any], before: Any, figures: Figures
) -> int:
    num_done = 0
    for number in moments:
        try:
            _, place = _interrupt_at(number, subject.log)
        except Interrupt as interrupt:
            place = str(interrupt)
            num_done += 1
        else:
            if (
                not place
            ):  # a log that looks at the clock has some moments more, or less, than the one before
                continue
            figures.expect(bool(dropped), f"an interrupt at {place} was lost")
        dropped.clear()
        problems = len(figures.problems)
        check_torch(before, figures, f"an interrupt at {place}")
        subject.check_model(figures)
        if len(figures.problems) > problems:
            break  # whatever comes next would only repeat it
    return num_done


def _interrupt_at(number: int, work: Callable[[], Any]) -> tuple[int, str]:
    """Runs `work`, raising Interrupt at one moment in the package's code; answers how many there
    were, and where it was.
    """
    package = str(Path(tl.__file__).parent) + os.sep
    num_seen = 0
    place = ""

    def is_ours(frame: FrameType | None) -> bool:
        return frame is not None and frame.f_code.co_filename.startswith(package)

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal num_seen, place
        if (
            event == "c_call"
            or event == "c_exception"
            or not (is_ours(frame) or is_ours(frame.f_back))
        ):
            return
        num_seen += 1
        if num_seen == number + 1:
            sys.setprofile(None)
            place = f"{frame.f_code.co_filename.removeprefix(package)}:{frame.f_lineno} ({event})"
            raise Interrupt(place)

    sys.setprofile(watch)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    del result  # now: what strikes while a log is freed is raised a moment later, and not here
    return num_seen, place
