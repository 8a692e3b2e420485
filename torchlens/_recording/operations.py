"""Which torch callables are operations, and what each is called.

The recorder is given each call with the callable that torch reports. The facts about a callable
(its name, whether it makes tensors, which arguments it writes to) are derived once, from its name
and torch's schemas, and cached.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import FunctionType
from typing import Any

import torch


class Kind(Enum):
    """What the recorder does with a call."""

    OPERATION = "operation"  # runs and leaves a record
    READ = "read"  # reads metadata of a tensor; leaves no row
    VALUE = "value"  # returns elements of a tensor to Python
    LEAF = "leaf"  # as READ, but may set `requires_grad`
    EXPOSURE = "exposure"  # exposes a tensor's memory, which may be written later
    BOOLEAN = "boolean"  # `if tensor:`; marks the tensor it reads
    INLINE = "inline"  # a Python method that ends in operations; those are recorded
    # needs other processes; the result comes later
    COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Operation:
    """What is known of a torch callable before it is called.

    `written` are the arguments it writes to (positions and keywords) beside `out=`; `writes_if` is
    the position of an argument that must be true for that (batch norm writes its statistics in
    training only); `has_output` is False where the result of the call is what was written rather
    than what was returned (`x[0] = 1` returns nothing).
    """

    func: Callable[..., Any]
    name: str
    layer_type: str
    kind: Kind = Kind.OPERATION
    written: tuple[int, ...] = ()
    argument_names: tuple[str, ...] = ()
    writes_if: int | None = None
    has_output: bool = True

    @property
    def is_inplace(self) -> bool:
        return 0 in self.written

    def name_of(self, position: int) -> str:
        """The keyword of an argument that is written; "" where it has none."""
        return self.argument_names[position] if position < len(self.argument_names) else ""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Operation":
        return self


def layer_type(name: str) -> str:
    """The word a label starts with: `max_pool2d` → `maxpool2d`, `relu_` → `relu`, `__iadd__` →
    `iadd`.
    """
    return name.replace("_", "").lower() or "op"


def named_operation(name: str, func: Callable[..., Any]) -> Operation:
    """An operation that torch has no callable for: a scripted module, an `identity`, an input."""
    return Operation(func, name, layer_type(name))


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Placeholder function of an entry that no function made."""
    return tensor


INPUT = named_operation("input", _unchanged)
BUFFER = named_operation("buffer", _unchanged)
OUTPUT = named_operation("output", _unchanged)
IDENTITY = named_operation("identity", _unchanged)
BOUNDARIES = {operation.name: operation for operation in (INPUT, BUFFER, OUTPUT, IDENTITY)}


# Operators whose own name torch does not report: `1 + x` arrives as `Tensor.add`. The recorder
# patches these names on torch.Tensor, and only these, to tell them apart. (torch 2.13; `x + 1` is
# `add` either way.)
OPERATOR_NAMES = (
    "__radd__", "__rmul__", "__truediv__", "__mod__", "__rand__", "__ror__", "__rxor__",
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
)  # fmt: skip

# Properties of a tensor that are tensors. All others are metadata.
_TENSOR_PROPERTIES = frozenset({"T", "H", "mT", "mH", "real", "imag", "data"})

# Calls that make no tensor, or return their argument without computing.
_READS = frozenset({
    "__dir__", "__dlpack_device__", "__hash__", "__len__", "__reduce_ex__", "__setstate__",
    "_dimI", "_dimV", "_is_view", "_is_zerotensor", "_nnz",
    "broadcast_shapes", "can_cast", "data_ptr", "dense_dim", "dim", "element_size", "get_device",
    "has_names",
    "is_coalesced", "is_complex", "is_conj", "is_contiguous", "is_distributed", "is_floating_point",
    "is_inference",
    "is_neg", "is_pinned", "is_same_size", "is_set_to", "is_shared", "is_signed", "module_load",
    "ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook",
    "result_type", "retain_grad", "share_memory_", "size", "sparse_dim", "storage_offset",
    "storage_type", "stride",
})  # fmt: skip

# Calls that read values.
_VALUES = frozenset({
    "__complex__", "__contains__", "__float__", "__format__", "__index__", "__int__", "__repr__",
    "__str__", "allclose",
    "equal", "is_nonzero", "item", "tolist",
})  # fmt: skip

# Reads that hand out the memory itself.
_EXPOSURES = frozenset({
    "__array__", "__dlpack__", "_storage", "_typed_storage", "numpy", "storage", "typed_storage",
    "untyped_storage",
})  # fmt: skip

# The kind of each call that is no operation, by name.
_KINDS = {
    **dict.fromkeys(_READS, Kind.READ),
    **dict.fromkeys(_VALUES, Kind.VALUE),
    **dict.fromkeys(_EXPOSURES, Kind.EXPOSURE),
    "__bool__": Kind.BOOLEAN,
    "requires_grad_": Kind.LEAF,
}

# Python methods of torch.Tensor that are operations in their own right rather than made of others.
# (`unflatten` calls the C method of its own name, which torch reports under the same callable.)
_PYTHON_LEAVES = frozenset({
    "__array_wrap__", "__deepcopy__", "__floordiv__", "__rdiv__", "__rfloordiv__", "__rlshift__",
    "__rmatmul__", "__rmod__",
    "__rpow__", "__rrshift__", "__rsub__", "as_subclass", "refine_names", "rename", "rename_",
    "unflatten",
})  # fmt: skip

# Functions that write to arguments although their schema does not say so: {name: (positions,
# position of the flag)}.
_SILENT_WRITERS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "batch_norm": ((3, 4), 5),
    "native_batch_norm": ((3, 4), 5),
    "instance_norm": ((3, 4), 5),
}


class _KnownOperations(dict[Callable[..., Any], Operation]):
    """Maps each callable to its Operation, computed at the first call."""

    def __missing__(self, func: Callable[..., Any]) -> Operation:
        operation = self[func] = _describe(func)
        return operation


# torchlens's patches report these two; torch does not.
KNOWN_OPERATIONS = _KnownOperations({
    copy.copy: Operation(copy.copy, "copy", "copy"),
    torch.Tensor: Operation(torch.Tensor, "Tensor", "tensor"),
})  # fmt: skip


@cache
def operator_of(name: str) -> Operation:
    """The operation behind an operator name such as `__iadd__`."""
    written = (0,) if name.startswith("__i") else ()
    return Operation(getattr(torch.Tensor, name), name, layer_type(name), written=written)


def _describe(func: Callable[..., Any]) -> Operation:
    name = getattr(func, "__name__", None) or type(func).__name__
    if name in ("__get__", "__set__", "__delete__"):
        return _describe_property(func, name)
    if name in _KINDS:
        return Operation(func, name, layer_type(name), _KINDS[name])
    if _is_python_method(func) and name not in _PYTHON_LEAVES:
        return Operation(func, name, layer_type(name), Kind.INLINE)
    if name == "__setitem__":
        return Operation(func, name, layer_type(name), written=(0,), has_output=False)
    # Python's name; torch kept the old one.
    name = "__rtruediv__" if name == "__rdiv__" else name.partition(".")[0]
    if name in _SILENT_WRITERS:
        written, flag = _SILENT_WRITERS[name]
        return Operation(func, name, layer_type(name), written=written, writes_if=flag)
    schemas = _schemas_of(func, name)
    is_collective = bool(schemas) and schemas[0].name.startswith("_c10d_functional")
    return Operation(
        func,
        name,
        layer_type(name),
        Kind.COLLECTIVE if is_collective else Kind.OPERATION,
        _written_arguments(name, schemas),
        _argument_names(schemas),
    )


def _is_python_method(func: Any) -> bool:
    """True for a method of Tensor that torch wrote in Python."""
    return isinstance(func, FunctionType) and func.__module__ == "torch._tensor"


def _describe_property(func: Any, accessor: str) -> Operation:
    name = func.__self__.__name__
    if accessor == "__get__" and name in _TENSOR_PROPERTIES:
        return Operation(func, name, layer_type(name))
    if accessor == "__set__" and name in _TENSOR_PROPERTIES:
        return Operation(func, name, layer_type(name), written=(0,), has_output=False)
    makes_leaf = accessor == "__set__" and name == "requires_grad"
    return Operation(func, name, layer_type(name), Kind.LEAF if makes_leaf else Kind.READ)


def _schemas_of(func: Any, name: str) -> list[Any]:
    """The schemas of an operator, one for each overload."""
    if isinstance(func, torch._ops.OpOverload):
        return [func._schema]
    if isinstance(func, torch._ops.OpOverloadPacket):
        return [getattr(func, overload)._schema for overload in func.overloads()]
    # Operators reached through `torch.ops` name their namespace only in their docstring.
    bound = re.search(r"operator '(\w+::\w+)'", func.__doc__ or "")
    return list(
        torch._C._jit_get_schemas_for_operator(bound.group(1) if bound else f"aten::{name}")
    )


def _written_arguments(name: str, schemas: list[Any]) -> tuple[int, ...]:
    """Positions of the arguments that are written to (`Tensor(a!) self`), `out=` aside."""
    if not schemas:
        return (0,) if name.endswith("_") and not name.endswith("__") else ()
    arguments = [each for schema in schemas for each in enumerate(schema.arguments)]
    # `sort` is also the name of what TorchScript sorts a list in place with.
    may_be_list = name.endswith("_")
    written = {
        position
        for position, argument in arguments
        if _is_written(argument) and (may_be_list or not str(argument.type).startswith("List"))
    }
    return tuple(sorted(written))


def _is_written(argument: Any) -> bool:
    """Whether an operator writes to an argument that is not `out`."""
    alias = argument.alias_info
    return alias is not None and alias.is_write and not argument.is_out


def _argument_names(schemas: list[Any]) -> tuple[str, ...]:
    """The keywords of the first overload; torch's functions call `input` what its schemas call
    `self`.
    """
    names = tuple(argument.name for argument in schemas[0].arguments) if schemas else ("input",)
    return tuple("input" if name == "self" else name for name in names)
