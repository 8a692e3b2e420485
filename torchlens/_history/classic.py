"""The classic TorchLens (0.1): its fields that the main interface does not have, so that code
written for it runs.

A history and its entries look here for a name that is not theirs. A field is a function of the
history (`classic_history`) or of the entry (`classic_entry`). docs/coming-from-torchlens.md lists
them all, and those that mean nothing here with the reason.
"""

from collections.abc import Callable
from functools import partial
from inspect import isfunction
from types import MethodType, ModuleType
from typing import Any

from torchlens._capture.options import Transform
from torchlens._compat.torchlens_names import ENTRY_NAMES, HISTORY_NAMES, no_such_name
from torchlens._history import classic_entry, classic_history
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log


def _option(name: str, owner: Any) -> Any:
    """What an option of `log_forward_pass` was."""
    log: Log = owner._log
    if name == "keep_unsaved_layers":
        return log.keeps_unsaved
    if name == "mark_input_output_distances":
        return log.marks_distances
    if name == "save_function_args":
        return log.options.keeps_args
    if name == "save_gradients":
        return log.options.keeps_gradients
    transform = log.options.transform
    return getattr(transform if isinstance(transform, Transform) else Transform(), name)


Field = Callable[[Any], Any]


def _functions(module: ModuleType) -> dict[str, Field]:
    """The functions that a module defines, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


HISTORY_FIELDS: dict[str, Field] = _functions(classic_history) | {
    name: partial(_option, name)
    for name in (
        "activation_postfunc", "detach_saved_tensors", "keep_unsaved_layers",
        "mark_input_output_distances",
        "output_device", "save_function_args", "save_gradients",
    )
}  # fmt: skip
ENTRY_METHODS = {method.__name__: method for method in classic_entry.METHODS}
ENTRY_FIELDS: dict[str, Field] = {
    name: field for name, field in _functions(classic_entry).items() if name not in ENTRY_METHODS
} | {
    "activation_postfunc": partial(_option, "activation_postfunc"),
    "detach_saved_tensor": partial(_option, "detach_saved_tensors"),
    "output_device": partial(_option, "output_device"),
    "save_gradients": partial(_option, "save_gradients"),
}

# Names of the classic that mean nothing here, and why.
NOT_HERE = {
    "current_function_call_barcode": "it was the classic's own bookkeeping",
    "logging_mode": "there is one way of logging",
    "orphan_layers": "what has nothing to do with input or output gets no label; "
    "num_operations_left_out counts it",
    "module_layer_argnames": "the log notes which tensors a module was given (modules_entered), "
    "not as which argument",
    "modules_entered_argnames": "the log notes which modules it was given to (modules_entered), "
    "not as which argument",
    "validate_saved_activations": "use torchlens.validate_saved_activations(model, x), which runs "
    "the model anew",
    "func_rng_states": "the generators' states are not kept; torchlens.validate_saved_activations "
    "replays every operation",
    "layer_label_raw": "labels are final from the start",
    "tensor_label_raw": "labels are final from the start",
    "module_entry_exit_thread_output": "use module_passes_exited",
    "module_entry_exit_threads_inputs": "use module_passes_entered of the parents",
    "log_tensor_grad": "gradients arrive by themselves; see docs/gradients.md",
    "save_tensor_data": "use history.save_new_activations(model, x)",
}


def classic_field(owner: Any, name: str) -> Any:
    """The value of a classic field; AttributeError says what to write instead of an unknown one."""
    kind = type(owner)
    if hasattr(kind, name):
        return object.__getattribute__(owner, name)  # raises again what reading the field raised
    is_entry = isinstance(owner, LayerEntry)
    fields = ENTRY_FIELDS if is_entry else HISTORY_FIELDS
    if name in fields:
        return fields[name](owner)
    if is_entry and name in ENTRY_METHODS:
        return MethodType(ENTRY_METHODS[name], owner)
    # Without `obj`, or Python would add a guess of its own to the hint.
    raise AttributeError(_no_field(LayerEntry if is_entry else kind, name, is_entry), name=name)


def _no_field(kind: type, name: str, is_entry: bool) -> str:
    if name in NOT_HERE:
        return f"{kind.__name__!r} has no field {name!r}, unlike the classic: {NOT_HERE[name]}."
    foreign = ENTRY_NAMES if is_entry else HISTORY_NAMES
    is_of_entry = hasattr(LayerEntry, name) or name in ENTRY_FIELDS
    if not is_entry and name not in foreign and is_of_entry:
        each = f"history[0].{name}, or [entry.{name} for entry in history]"
        return f"{kind.__name__!r} has no field {name!r}, but each of its entries has. Use {each}."
    own = [*dir(kind), *(ENTRY_FIELDS if is_entry else HISTORY_FIELDS)]
    listing = f"help(torchlens.{'LayerEntry' if is_entry else 'ModelHistory'}) lists them."
    return no_such_name(repr(kind.__name__), "field", name, foreign, own, listing)
