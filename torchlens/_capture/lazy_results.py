"""Results that are still to be computed when a model has returned: what a generator yields, what is
to be awaited.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Coroutine
from typing import Any

_LAZY = (map, filter, zip)


def finished(result: Any) -> Any:
    """What a model returned, computed to its end: of a generator and its like, the list of what it
    yields.

    A model that streams its output does nothing at all before somebody asks for it.
    """
    if inspect.isgenerator(result) or isinstance(result, _LAZY):
        return list(result)
    if inspect.isasyncgen(result):
        return _awaited(_list_of(result))
    if inspect.iscoroutine(result):
        return finished(_awaited(result))
    return result


async def _list_of(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in an event loop of its own; inside another loop, as in a notebook, step by
    step without one.
    """
    if asyncio._get_running_loop() is None:
        loop = asyncio.new_event_loop()  # not `asyncio.run`, which takes the thread's loop away
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
    try:
        while coroutine.send(None) is None:
            pass
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError(
        "The model awaits something in the event loop that is running here, which the log blocks. "
        "Log it from a thread: `await asyncio.to_thread(torchlens.log_forward_pass, model, x)`."
    )
