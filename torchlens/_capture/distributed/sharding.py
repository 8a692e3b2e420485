"""Parameters that FSDP shards: `fully_shard`, and the older `FullyShardedDataParallel`.

Between FSDP's hooks, a module holds unsharded parameters, which are other tensors. A layer that
reads one reads the parameter. FSDP's gathering and freeing are not operations of the model and are
not recorded: recording would keep the whole model in memory, which FSDP avoids, and change the
numbers of layers.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchlens._capture.observer import CallKind
from torchlens._capture.recorder import Recorder
from torchlens._recording.operations import Operation, named_operation
from torchlens._recording.trees import plain_tensors
from torchlens._recording.unseen import NoTorchFunction

# By module of torch, which is imported only if it is used: the class whose methods bring
# pieces together or apart.
_GROUPS = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
GATHERING: dict[str, tuple[str, tuple[str, ...]]] = {
    _GROUPS: ("FSDPParamGroup", ("unshard", "wait_for_unshard", "reshard")),
    "torch.distributed.fsdp._flat_param": (
        "FlatParamHandle",
        ("pre_unshard", "unshard", "post_unshard", "reshard", "post_reshard"),
    ),
}
# Likewise, functions by which FSDP hooks the backward pass.
BOOKKEEPING: dict[str, tuple[str, ...]] = {
    "torch.distributed.fsdp._runtime_utils": (
        "_register_post_backward_hook",
        "_register_post_backward_reshard_only_hook",
    ),
}


class ShardedPair(NamedTuple):
    """A sharded parameter, and its unsharded tensor if there is one.

    `is_part`: FSDP has assembled the parameter from several; the tensor is a part of it and gets a
    part of its gradient.
    """

    parameter: torch.nn.Parameter
    whole: torch.Tensor | None
    is_part: bool = False


def parameter_pairs(modules: Iterable[torch.nn.Module]) -> Iterator[ShardedPair]:
    """The parameters of modules that `fully_shard` has sharded."""
    if _GROUPS not in sys.modules:
        return
    module: Any
    for module in modules:
        state = module._get_fsdp_state() if hasattr(type(module), "_get_fsdp_state") else None
        group = getattr(state, "_fsdp_param_group", None)
        for each in getattr(state, "_fsdp_param_groups", None) or (
            [] if group is None else [group]
        ):
            yield from _pairs_in(each)


def bring_apart(modules: Iterable[torch.nn.Module]) -> None:
    """Makes FSDP reshard all its parameters, as between two passes."""
    module: Any
    for module in modules:
        if hasattr(type(module), "_get_fsdp_state"):
            module.reshard()


def _pairs_in(group: Any) -> list[ShardedPair]:
    if hasattr(group, "fsdp_params"):
        return [
            ShardedPair(own.sharded_param, getattr(own, "_unsharded_param", None))
            for own in group.fsdp_params
        ]
    # The older FSDP: modules have views of one flat parameter, which wraps or replaces the
    # originals.
    flat = group.flat_param
    originals = flat._params
    return [
        ShardedPair(
            flat if originals is None else originals[number],
            getattr(module, name, None),
            originals is None,
        )
        for number, (name, module, _) in enumerate(flat._param_infos)
    ]


def _freed_by(group: Any, method: str) -> list[torch.Tensor]:
    """Tensors whose memory a method frees, even if other tensors share it."""
    if method != "reshard":
        return []
    flat = getattr(group, "flat_param", None)
    return (
        [pair.whole for pair in _pairs_in(group) if pair.whole is not None]
        if flat is None
        else [flat]
    )


def record_gathering(recorder: Recorder, group: Any, name: str, run: Callable[[], Any]) -> Any:
    """Runs an FSDP method that gathers parameters or frees the gathered ones."""
    result = run_unrecorded(
        recorder, named_operation(name, getattr(type(group), name)), run, _freed_by(group, name)
    )
    with NoTorchFunction():
        know_whole(recorder, _pairs_in(group))
    return result


def run_unrecorded(
    recorder: Recorder,
    operation: Operation,
    run: Callable[[], Any],
    freed: Sequence[torch.Tensor] = (),
) -> Any:
    """Runs a call without recording it; `freed` are tensors whose memory it frees."""
    with NoTorchFunction():
        observed = recorder.begin_observed(CallKind.ASIDE, operation, (), None, (), (), (None, 0))
        if freed:
            recorder.complete()
            recorder.memory.before_write(freed)
    try:
        with recorder.unrecorded():
            return run()
    finally:
        with NoTorchFunction():
            recorder.end_observed(observed, None)


def know_whole(recorder: Recorder, pairs: Iterable[ShardedPair]) -> None:
    """Maps each unsharded tensor to its parameter."""
    for parameter, whole, is_part in pairs:
        number = recorder.number_of(parameter)
        if number is not None and whole is not None and recorder.number_of(whole) != number:
            recorder.stand_in(number, whole, has_gradient=not is_part)
            if is_part:
                recorder.joint_params.add(-1 - number)


def is_bookkeeping(function: type) -> bool:
    """True for a custom autograd function of torch that computes nothing: by which FSDP hooks the
    backward pass, or by which a checkpoint keeps its inputs (until torch 2.10 or so).
    """
    return (
        function.__module__.startswith("torch.distributed.fsdp.")
        or function.__qualname__ == "_NoopSaveInputs"
    )


def hand_on(
    recorder: Recorder, function: type, args: tuple[Any, ...], run: Callable[[], Any]
) -> Any:
    """Runs an autograd function that computes nothing; what it returns has its arguments'
    entries.
    """
    result = run_unrecorded(recorder, named_operation(function.__name__, function), run)
    with NoTorchFunction():
        for (_, given), (_, returned) in zip(
            plain_tensors(args), plain_tensors(result), strict=False
        ):
            number = recorder.entry_of(given)
            if number is not None and returned is not given:
                recorder.stand_in(number, returned)
    return result
