"""Records a backward pass inside the model: test-time training, energy gradients, training steps.

It has no return value; its results are the `.grad` of leaves, which torch does not report. Each
such gradient is an entry whose parents are the differentiated tensors and the leaf.
"""

import sys
import weakref
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch

from torchlens._capture.gradients.backward_hooks import node_of
from torchlens._capture.observer import CallKind
from torchlens._capture.recorder import Recorder
from torchlens._recording.operations import named_operation
from torchlens._recording.origin import version_of
from torchlens._recording.trees import plain_tensors
from torchlens._recording.unseen import NoTorchFunction

Tensor = torch.Tensor


def record_backward(
    recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Runs `torch.autograd.backward` and adds a row for each gradient that it made or changed."""
    operation, frame = named_operation("backward", func), sys._getframe(2)
    place = recorder.user_code(frame)
    with NoTorchFunction():
        leaves = _leaves_of(args, kwargs)
        before = [leaf.grad for leaf in leaves]
        old = [gradient for gradient in before if gradient is not None]
        versions = [None if gradient is None else version_of(gradient) for gradient in before]
        given = recorder.references_to(args, kwargs)
        reads = [
            _with_captured(given, recorder.references_to((leaf, grad), None))
            for leaf, grad in zip(leaves, before, strict=True)
        ]
        references = {path: entry for read in reads for path, entry in read.items()} or given
        observed = recorder.prepare(
            CallKind.FUNCTION, operation, args, kwargs, references, old, place
        )
    start = perf_counter()
    recorder.collected = {}  # operations of hooks and custom functions are part of the call
    try:
        func(*args, **kwargs)
    except BaseException as error:
        recorder.fail(error, operation, args, kwargs, references, frame, observed)
        raise
    finally:
        recorder.collected = None
    seconds = perf_counter() - start
    with NoTorchFunction():
        changed = [
            (leaf, gradient, read)
            for leaf, gradient, version, read in zip(leaves, before, versions, reads, strict=True)
            if _has_new_gradient(leaf, gradient, version)
        ]
        made: list[Any] = [leaf.grad for leaf, _, _ in changed]
        written: list[Any] = [before for leaf, before, _ in changed if leaf.grad is before]
        recorder.differentiated += [weakref.ref(leaf) for leaf, _, _ in changed]
        call = recorder.made_call(operation, args, kwargs, references, place, seconds)
        recorder.append_results(call, made, written, each_reads=[read for _, _, read in changed])
        recorder.end_observed(observed, made)


def _has_new_gradient(leaf: Tensor, before: Tensor | None, version: int | None) -> bool:
    if leaf.grad is None:
        return False
    return leaf.grad is not before or version_of(leaf.grad) != version


def gradients_left(recorder: Recorder) -> list[Tensor]:
    """Gradients that outlive the pass, and that a later backward pass accumulates into."""
    leaves = [leaf for reference in recorder.differentiated if (leaf := reference()) is not None]
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def _leaves_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The leaves whose `.grad` a backward pass changes: those in `inputs`, or all in the graph."""
    named = kwargs.get("inputs", args[5] if len(args) > 5 else None)
    if named is not None:
        return [tensor for _, tensor in plain_tensors((named,))]
    tensors = [tensor for _, tensor in plain_tensors((kwargs.get("tensors", args[:1]),))]
    found = {id(tensor): tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf}
    return list({**found, **_accumulated_below(tensors)}.values())


def _accumulated_below(tensors: list[Tensor]) -> dict[int, Tensor]:
    """The leaves, by id, that autograd's graph of the tensors leads to."""
    found: dict[int, Tensor] = {}
    pending = [node for tensor in tensors if (node := node_of(tensor)) is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        variable = getattr(node, "variable", None)  # an accumulation node
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return found


def _with_captured(given: dict[Any, int], others: Mapping[Any, int]) -> dict[Any, int]:
    return {
        **given,
        **{("captured", entry): entry for entry in others.values() if entry not in given.values()},
    }
