"""A profile made up by hand: every number in it is known.

Net has a stem (a convolution and a ReLU that is called twice), a head, and a spare layer that is
never called. Three steps ran, the first to warm up.
"""

from typing import Any

from torchlens._profile.records import (
    CallRecord,
    Measurements,
    ModuleRecord,
    OperationRecord,
    ParameterRecord,
    ProfiledStep,
)

MS = 1e-3
KB = 1024


def call(step: int, address: str, pass_num: int = 1, **fields: Any) -> CallRecord:
    """A call of a module; what is not said is nothing."""
    values: dict[str, Any] = {
        "index": 0,
        "step": step,
        "address": address,
        "pass_num": pass_num,
        "module_type": "Module",
        "parent": -1 if address else None,  # the call around it, which is of no interest here
        "depth": address.count(".") + 1 if address else 0,
        "is_recomputed": False,
        "raised": None,
        "input_shapes": [(2, 3)],
        "output_shapes": [(2, 4)],
        "grad_in_shapes": [(2, 3)],
        "grad_out_shapes": [(2, 4)],
        "input_bytes": [24],
        "output_bytes": [32],
        "forward_seconds": 1 * MS,
        "forward_self_seconds": 1 * MS,
        "backward_seconds": None,
        "backward_self_seconds": None,
        "flops": None,
        "flops_backward": None,
        "saved_bytes": None,
        "peak_bytes": None,
        "added_bytes": None,
        "peak_bytes_backward": None,
        "added_bytes_backward": None,
        "forward_nonfinite": None,
        "grad_in_nonfinite": None,
        "grad_out_nonfinite": None,
    }
    return CallRecord(**values | fields)


def module(
    address: str,
    module_type: str,
    calls: list[CallRecord],
    children: list[ModuleRecord],
    **fields: Any,
) -> ModuleRecord:
    """A module; counts of parameters are none unless given."""
    counts = dict.fromkeys(
        (
            "num_parameters", "num_learnable", "param_bytes", "gradient_bytes",
            "own_num_parameters",
            "own_num_learnable", "own_param_bytes", "own_gradient_bytes",
        ), 0
    )  # fmt: skip
    values: dict[str, Any] = {
        "address": address,
        "aliases": [],
        "module_type": module_type,
        "depth": address.count(".") + 1 if address else 0,
        "children": children,
        "calls": calls,
        "warmup_steps": frozenset({1}),
    }
    return ModuleRecord(**values | counts | fields)


def parameter(address: str, shape: tuple[int, ...], **fields: Any) -> ParameterRecord:
    num_elements = 1
    for size in shape:
        num_elements *= size
    values: dict[str, Any] = {
        "address": address,
        "aliases": [],
        "module": address.rpartition(".")[0],
        "shape": shape,
        "num_elements": num_elements,
        "num_bytes": 4 * num_elements,
        "is_learnable": True,
        "gradient_bytes": 4 * num_elements,
        "num_gradients": 3,
    }
    return ParameterRecord(**values | fields)


def made_up(**fields: Any) -> Measurements:
    """The profile of Net."""
    # In units of a millisecond, by step: the first is the slow one that must not count.
    pace = {1: 100.0, 2: 1.0, 3: 1.5}
    calls: dict[str, list[CallRecord]] = {
        "": [],
        "stem": [],
        "stem.conv": [],
        "stem.act": [],
        "head": [],
    }
    for step, factor in pace.items():
        unit = factor * MS

        def add(address: str, pass_num: int = 1, step: int = step, **fields: Any) -> None:
            calls[address].append(call(step, address, pass_num, **fields))

        add(
            "", forward_seconds=10 * unit, forward_self_seconds=1 * unit,
            backward_seconds=20 * unit,
            backward_self_seconds=2 * unit, flops=5_400_000, flops_backward=10_800_000,
            saved_bytes=70 * KB,
            peak_bytes=100 * KB, added_bytes=60 * KB, output_shapes=[(2, 10)], module_type="Net",
            input_bytes=[600],
            peak_bytes_backward=50 * KB, added_bytes_backward=-60 * KB,
        )  # fmt: skip
        add(
            "stem", forward_seconds=8 * unit, forward_self_seconds=0.5 * unit,
            backward_seconds=15 * unit,
            backward_self_seconds=0.1 * unit, flops=5_200_000, flops_backward=10_400_000,
            saved_bytes=66 * KB,
            peak_bytes=90 * KB, added_bytes=50 * KB, output_shapes=[(2, 8, 16, 16)],
            module_type="Sequential",
        )  # fmt: skip
        add(
            "stem.conv", forward_seconds=6 * unit, forward_self_seconds=6 * unit,
            backward_seconds=12 * unit,
            backward_self_seconds=12 * unit, flops=5_200_000, flops_backward=10_400_000,
            saved_bytes=40 * KB,
            peak_bytes=80 * KB, added_bytes=30 * KB, output_shapes=[(2, 8, 16, 16)],
            module_type="Conv2d",
        )  # fmt: skip
        for number in (1, 2):
            add(
                "stem.act", number, forward_seconds=0.75 * unit, forward_self_seconds=0.75 * unit,
                backward_seconds=1 * unit, backward_self_seconds=1 * unit, saved_bytes=13 * KB,
                peak_bytes=16 * KB * number, added_bytes=10 * KB, output_shapes=[(2, 8, 16, 16)],
                module_type="ReLU",
            )  # fmt: skip
        add(
            "head", forward_seconds=0.5 * unit, forward_self_seconds=0.5 * unit,
            backward_seconds=3 * unit,
            backward_self_seconds=3 * unit, flops=200_000, flops_backward=400_000,
            saved_bytes=4 * KB,
            peak_bytes=1 * KB, added_bytes=1 * KB, output_shapes=[(2, 10)], module_type="Linear",
        )  # fmt: skip
    conv = module("stem.conv", "Conv2d", calls["stem.conv"], [], **_counts(224, own=224))
    act = module("stem.act", "ReLU", calls["stem.act"], [])
    stem = module("stem", "Sequential", calls["stem"], [conv, act], **_counts(224, own=0))
    head = module("head", "Linear", calls["head"], [], **_counts(20490, own=20490))
    spare = module(
        "spare",
        "Linear",
        [],
        [],
        **_counts(20490, own=20490, gradient_bytes=0, own_gradient_bytes=0),
    )
    root = module(
        "", "Net", calls[""], [stem, head, spare], **_counts(41204, own=0, gradient_bytes=4 * 20714)
    )
    steps = [
        ProfiledStep(
            number=step,
            is_warmup=step == 1,
            forward_seconds=10 * factor * MS,
            backward_seconds=20 * factor * MS,
            num_backward_passes=1,
            peak_bytes=150 * KB,
            added_bytes=0,
        )
        for step, factor in pace.items()
    ]
    parameters = [
        parameter("stem.conv.weight", (8, 3, 3, 3)),
        parameter("stem.conv.bias", (8,)),
        parameter("head.weight", (10, 2048)),
        parameter("head.bias", (10,)),
        parameter("spare.weight", (10, 2048), num_gradients=0, gradient_bytes=0),
        parameter("spare.bias", (10,), num_gradients=0, gradient_bytes=0),
    ]
    values: dict[str, Any] = {
        "model_name": "Net",
        "level": "module",
        "check": None,
        "root": root,
        "steps": steps,
        "calls": [record for own in calls.values() for record in own],
        "operations": [],
        "parameters": parameters,
        "flops_not_counted": {},
        "problems": [],
    }
    if "calls" not in fields:
        values["calls"] = _nested((values | fields)["root"])
    return Measurements(**values | fields)


def _nested(root: ModuleRecord) -> list[CallRecord]:
    """All calls, each inside that of the nearest module around its own."""
    calls = sorted((each for record in root.walk() for each in record.calls), key=lambda c: c.step)
    first: dict[tuple[int, str], int] = {}
    for index, each in enumerate(calls):
        each.index = first.setdefault((each.step, each.address), index)
    for index, each in enumerate(calls):
        each.index, each.parent, address = index, None, each.address
        while address and each.parent is None:
            address = address.rpartition(".")[0]
            each.parent = first.get((each.step, address))
    return calls


def _counts(number: int, own: int, **fields: int) -> dict[str, int]:
    counts = {
        "num_parameters": number,
        "num_learnable": number,
        "param_bytes": 4 * number,
        "gradient_bytes": 4 * number,
        "own_num_parameters": own,
        "own_num_learnable": own,
        "own_param_bytes": 4 * own,
        "own_gradient_bytes": 4 * own,
    }
    return counts | fields


def operations() -> list[OperationRecord]:
    """Those of Net, in three steps."""
    found = []
    for step, factor in ((1, 100.0), (2, 1.0), (3, 1.5)):
        rows = [
            ("conv2d_1_1", "stem.conv", "conv2d", (2, 8, 16, 16), 6.0, 5_200_000),
            ("relu_1_2", "stem.act", "relu", (2, 8, 16, 16), 0.5, None),
            ("linear_1_3", "head", "linear", (2, 10), 0.4, 200_000),
            (None, "head", "zeros", (2, 10), 0.1, None),
        ]
        for entry, (label, address, layer_type, shape, time, flops) in enumerate(rows):
            found.append(
                OperationRecord(
                    step=step,
                    entry=entry,
                    label=label,
                    call=0,
                    address=address,
                    layer_type=layer_type,
                    shape=shape,
                    num_bytes=4 * 2 * 10,
                    forward_seconds=time * factor * MS,
                    backward_seconds=2 * time * factor * MS,
                    flops=flops,
                    flops_backward=None,
                    peak_bytes=8 * KB,
                    added_bytes=8 * KB,
                )
            )
    return found
