"""Formulas that the user gave to torch: `torch.utils.flop_counter.register_flop_formula`."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from torchlens._graph.flops.call import Call


def may_be_registered(func: Callable[..., Any]) -> bool:
    """Whether there may be a formula for it: only operators have one."""
    return isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)


def registered_flops(func: Callable[..., Any], call: Call) -> int | None:
    """What the formula registered for an operator of the user's own says; None if there is none."""
    operator = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
    # Who registered a formula has imported the module; for the others it takes too long to import.
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None or not isinstance(operator, torch._ops.OpOverloadPacket):
        return None
    formula = counter.flop_registry.get(operator)
    is_of_torch = operator._qualified_op_name.startswith("aten::")  # which are ours to count
    if (
        formula is None
        or is_of_torch
        or any(size < 0 for shape in (*call.shapes.values(), call.output) for size in shape)
    ):
        return None
    args, kwargs = _arguments(operator, call)
    try:
        return int(formula(*args, **kwargs, out_val=torch.empty(call.output, device="meta")))
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ):  # it cannot make sense of this call
        return None


def _arguments(operator: Any, call: Call) -> tuple[list[Any], dict[Any, Any]]:
    arguments: dict[Any, Any] = {**dict(enumerate(call.args)), **(call.kwargs or {})}
    # A formula takes shapes, or the tensors themselves: tensors without numbers serve for both.
    for location, shape in call.shapes.items():
        path = location if isinstance(location, tuple) else (location,)
        arguments[path[0]] = _with_tensor(arguments[path[0]], path[1:], shape)
    args = [arguments.pop(position) for position in range(len(call.args))]
    # What was given by name comes by position, as torch's dispatcher hands it on.
    for name in _positional_names(operator)[len(args) :]:
        if name not in arguments:
            break
        args.append(arguments.pop(name))
    return args, arguments


def _positional_names(operator: Any) -> list[str]:
    schema = getattr(operator, operator.overloads()[0])._schema
    return [argument.name for argument in schema.arguments if not argument.kwarg_only]


def _with_tensor(argument: Any, path: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    if not path:
        return torch.empty(shape, device="meta")
    items = dict(argument) if isinstance(argument, dict) else dict(enumerate(argument))
    items[path[0]] = _with_tensor(items[path[0]], path[1:], shape)
    return items if isinstance(argument, dict) else list(items.values())
