"""Parameters that FSDP keeps in pieces (`fully_shard`).

Between its hooks, a module has its parameters whole: other tensors than those that it has before and after. A layer that
reads one reads the parameter. What FSDP does to bring the pieces together and apart is no operation of the model, and is
not recorded: it would hold the whole model in memory, which is what FSDP is there to avoid, and give every layer other
numbers than those that it has without FSDP.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from torchlens.capture.observer import CallKind
from torchlens.capture.operations import Operation, named_operation
from torchlens.capture.recorder import Recorder
from torchlens.capture.trees import plain_tensors

__all__ = ["GROUP_MODULE", "bring_apart", "hand_on", "is_bookkeeping", "know_whole", "parameter_pairs", "record_gathering"]

# Where torch has what this is about. Not imported before somebody uses it.
GROUP_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"

Pair = tuple[torch.nn.Parameter, torch.nn.Parameter | None]


def parameter_pairs(modules: Iterable[torch.nn.Module]) -> Iterator[Pair]:
    """The parameters of modules that FSDP has in pieces: as it keeps them, and whole if they ever were."""
    if GROUP_MODULE not in sys.modules:
        return
    module: Any
    for module in modules:
        state = module._get_fsdp_state() if hasattr(type(module), "_get_fsdp_state") else None
        group = getattr(state, "_fsdp_param_group", None)
        for each in getattr(state, "_fsdp_param_groups", None) or ([] if group is None else [group]):
            yield from _pairs_in(each)


def bring_apart(modules: Iterable[torch.nn.Module]) -> None:
    """Lets FSDP have all its parameters in pieces, as they are between one pass and the next."""
    module: Any
    for module in modules:
        if hasattr(type(module), "_get_fsdp_state"):
            module.reshard()


def _pairs_in(group: Any) -> list[Pair]:
    return [(own.sharded_param, getattr(own, "_unsharded_param", None)) for own in group.fsdp_params]


def record_gathering(recorder: Recorder, group: Any, name: str, run: Callable[[], Any]) -> Any:
    """Runs a method of FSDP that brings the pieces of parameters together, or lets go of what was whole."""
    freed = [whole for _, whole in _pairs_in(group) if whole is not None] if name == "reshard" else []
    result = _run_aside(recorder, named_operation(name, getattr(type(group), name)), run, freed)
    with torch._C.DisableTorchFunction():
        know_whole(recorder, _pairs_in(group))
    return result


def _run_aside(recorder: Recorder, operation: Operation, run: Callable[[], Any], freed: Sequence[torch.Tensor] = ()) -> Any:
    """Runs what leaves no trace, and frees memory that others may look at."""
    with torch._C.DisableTorchFunction():
        observed = recorder.begin_observed(CallKind.ASIDE, operation, (), None, (), (), (None, 0))
        if freed:
            recorder.complete()
            recorder.memory.before_free(freed)
    try:
        with recorder.aside():
            return run()
    finally:
        with torch._C.DisableTorchFunction():
            recorder.end_observed(observed, None)


def know_whole(recorder: Recorder, pairs: Iterable[Pair]) -> None:
    """Lets the whole of each parameter pass for the parameter."""
    for sharded, whole in pairs:
        number = recorder.number_of(sharded)
        if number is not None and whole is not None and recorder.number_of(whole) != number:
            recorder.stand_in(number, whole)


def is_bookkeeping(function: type) -> bool:
    """Whether a custom autograd function is one by which FSDP hears of the backward pass: it computes nothing."""
    return function.__module__.startswith("torch.distributed.fsdp.")


def hand_on(recorder: Recorder, function: type, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
    """Runs an autograd function that returns the tensors it is given: what it returns are the same entries."""
    result = _run_aside(recorder, named_operation(function.__name__, function), run)
    with torch._C.DisableTorchFunction():
        for (_, given), (_, returned) in zip(plain_tensors(args), plain_tensors(result), strict=True):
            number = recorder.entry_of(given)
            if number is not None and returned is not given:
                recorder.stand_in(number, returned)
    return result
