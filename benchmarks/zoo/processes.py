"""Checking models in processes of their own."""

import signal
import time
from collections.abc import Iterator
from multiprocessing import connection, get_context
from typing import Any

from benchmarks.zoo import SPECIMENS
from benchmarks.zoo.check import Result, check

__all__ = ["check_all"]


def check_all(names: list[str], num_jobs: int, timeout: float) -> Iterator[Result]:
    """Yields results as they come. The workers are forked from a server that has imported the
    libraries once.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.zoo.preload"])
    waiting = list(reversed(names))
    running: dict[Any, tuple[str, Any, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num_jobs:
                name = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(name, sender), name=name)
                process.start()
                sender.close()
                running[receiver] = (name, process, time.monotonic() + timeout)
            patience = max(
                0.0, min(deadline for _, _, deadline in running.values()) - time.monotonic()
            )
            for ready in connection.wait(list(running), patience):
                name, process, _ = running.pop(ready)
                yield _receive(name, process, ready)
            now = time.monotonic()
            for late in [own for own, (_, _, deadline) in running.items() if deadline < now]:
                name, process, _ = running.pop(late)
                process.kill()
                process.join()
                yield Result(name, [f"no result after {timeout:.0f} s; stopped"], seconds=timeout)
    finally:
        for _, process, _ in running.values():
            process.kill()


def _receive(name: str, process: Any, receiver: Any) -> Result:
    try:
        return receiver.recv()
    except EOFError:  # the process ended without a result
        process.join()
        code = process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return Result(name, [f"the process crashed ({how})"])


def _work(name: str, sender: Any) -> None:
    sender.send(check(SPECIMENS[name]))
    sender.close()
