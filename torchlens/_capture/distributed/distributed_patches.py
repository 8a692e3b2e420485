"""The patches of torch.distributed, applied only if it is in use.

All its functions end in methods of a process group or its back end, so patching those methods
catches a function under any reference.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torchlens._capture.current import CURRENT
from torchlens._capture.distributed.collectives import (
    GROUP_METHODS,
    record_broadcast,
    record_collective,
    record_wait,
)
from torchlens._capture.distributed.sharding import (
    BOOKKEEPING,
    GATHERING,
    record_gathering,
    run_unrecorded,
)
from torchlens._capture.patches.torch_patches import Patch, opaque, quiet
from torchlens._recording.operations import named_operation


def distributed_patches() -> list[Patch]:
    """The patches; there is a process group."""
    distributed = torch.distributed
    c10d = distributed.distributed_c10d
    patches = quiet(c10d)
    patches += [
        _collective(owner, name)
        for owner in _with_subclasses(c10d.ProcessGroup, torch._C._distributed_c10d.Backend)
        for name in GROUP_METHODS
        if name in vars(owner)
    ]
    patches += [
        _waiting(owner, "wait") for owner in _with_subclasses(c10d.Work) if "wait" in vars(owner)
    ]
    patches += [_waiting(c10d.ProcessGroup, name) for name in ("barrier", "monitored_barrier")]
    for module, (owner, methods) in GATHERING.items():
        if module in sys.modules:
            patches += [_gathering(getattr(sys.modules[module], owner), name) for name in methods]
    patches += [
        _bookkeeping(sys.modules[module], name)
        for module, names in BOOKKEEPING.items()
        for name in names
        if hasattr(sys.modules.get(module), name)
    ]
    patches += [opaque(c10d, f"_{name}", name) for name in ("object_to_tensor", "tensor_to_object")]
    return [
        *patches,
        Patch(distributed, "_broadcast_coalesced", _patched_broadcast_coalesced(distributed)),
    ]


def _with_subclasses(*classes: type) -> list[type]:
    found: list[type] = []
    pending = list(classes)
    while pending:
        kind = pending.pop()
        if kind not in found:
            found.append(kind)
            pending += type.__subclasses__(kind)
    return found


def _collective(owner: Any, name: str) -> Patch:
    original = vars(owner)[name]

    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None or not tracker.recorder.is_on():
            return original(group, *args, **kwargs)
        run = partial(original, group, *args, **kwargs)
        return record_collective(tracker.recorder, name, run, group, args, kwargs)

    return Patch(owner, name, collective)


def _waiting(owner: Any, name: str) -> Patch:
    original = vars(owner)[name]

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None or tracker.recorder.collected is not None:
            return original(work, *args, **kwargs)
        return record_wait(tracker.recorder, partial(original, work, *args, **kwargs), work)

    return Patch(owner, name, wait)


def _gathering(owner: Any, name: str) -> Patch:
    original = vars(owner)[name]

    def gathering(group: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None or not tracker.recorder.is_on():
            return original(group, *args, **kwargs)
        return record_gathering(
            tracker.recorder, group, name, partial(original, group, *args, **kwargs)
        )

    return Patch(owner, name, gathering)


def _bookkeeping(owner: Any, name: str) -> Patch:
    original = vars(owner)[name]

    def bookkeeping(*args: Any, **kwargs: Any) -> Any:
        tracker = CURRENT.tracker
        if tracker is None or not tracker.recorder.is_on():
            return original(*args, **kwargs)
        return run_unrecorded(
            tracker.recorder, named_operation(name, original), partial(original, *args, **kwargs)
        )

    return Patch(owner, name, bookkeeping)


def _patched_broadcast_coalesced(distributed: Any) -> Callable[..., Any]:
    original = distributed._broadcast_coalesced

    def broadcast_coalesced(
        process_group: Any, tensors: Any, buffer_size: int, src: int = 0
    ) -> Any:
        tracker = CURRENT.tracker
        if tracker is None or tracker.recorder.collected is not None:
            return original(process_group, tensors, buffer_size, src)
        run = partial(original, process_group, tensors, buffer_size, src)
        return record_broadcast(tracker.recorder, run, process_group, tensors, src)

    return broadcast_coalesced
