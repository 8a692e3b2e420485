"""The cost of a call that is being made, from its arguments and result themselves."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchlens.capture.arguments import shape_of
from torchlens.capture.trees import plain_tensors
from torchlens.graph.flops.call import VARYING, Call
from torchlens.graph.flops.free import FREE
from torchlens.graph.flops.registry import FORMULAS, backward_flops, forward_flops

__all__ = ["Cost", "cost_of_call"]


class Cost(NamedTuple):
    """Floating-point operations, forward and backward; None where they are not known."""

    forward: int | None
    backward: int | None


_NOTHING = Cost(0, 0)
_UNKNOWN = Cost(None, None)


def cost_of_call(layer_type: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Any) -> Cost:
    """What `layer_type(*args, **kwargs)`, which gave `result`, costs; backward only if the result wants a gradient.

    To be called right after the call: an argument may be changed later.
    """
    if layer_type in FREE:
        return _NOTHING
    if layer_type not in FORMULAS:
        return _UNKNOWN
    shapes, wanting = {}, set()
    for arguments in (args, kwargs or {}):
        for path, tensor in plain_tensors(arguments):
            location = path[0] if len(path) == 1 else path
            shapes[location] = tuple(shape_of(tensor)) if tensor.layout is torch.strided else VARYING
            if tensor.requires_grad:
                wanting.add(location)
    results = [tensor for _, tensor in plain_tensors(result)]
    if not results:
        return _UNKNOWN
    call = Call(shapes, tuple(shape_of(results[0])), args, kwargs)
    forward = forward_flops(layer_type, call)
    if forward is None:
        return _UNKNOWN
    wants = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in results)
    return Cost(forward, backward_flops(layer_type, call, wanting) if wants else 0)
