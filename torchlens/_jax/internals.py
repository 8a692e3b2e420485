"""What is used of JAX that JAX does not promise, in one place, and the check that it is there."""

from inspect import unwrap
from typing import Any

import jax
import numpy as np
from jax._src import core, custom_batching, shard_map, source_info_util
from jax._src.array import ArrayImpl
from jax._src.interpreters import partial_eval
from jax._src.state import primitives as state_primitives

from torchlens.errors import TorchLensError

EvalTrace: Any = getattr(core, "EvalTrace", None)
Primitive: Any = core.Primitive
ShardMapPrimitive: Any = getattr(shard_map, "ShardMapPrimitive", None)  # binds in a way of its own
_CONTEXT: Any = getattr(source_info_util, "_source_info_context", None)
name_scope: Any = getattr(source_info_util, "extend_name_stack", None)
_convert_constants: Any = getattr(partial_eval, "convert_constvars_jaxpr", None)

# Where JAX keeps the function behind `jax.lax.scan`, which is reached so under whatever name
# somebody imported it.
SCAN_CELL: Any = next(
    (
        cell
        for cell in getattr(jax.lax.scan, "__closure__", None) or ()
        if cell.cell_contents is getattr(jax.lax.scan, "__wrapped__", cell)
    ),
    None,
)

# Primitives that the public list of them lacks: that of `custom_vmap`, and those that make, read
# and write references.
CUSTOM_VMAP: list[Any] = [
    getattr(custom_batching, name) for name in ("custom_vmap_p",) if hasattr(custom_batching, name)
]
REFERENCES: list[Any] = [
    getattr(owner, name)
    for owner, names in (
        (core, ("ref_p", "empty_ref_p", "freeze_p")),
        (state_primitives, ("get_p", "swap_p", "addupdate_p")),
    )
    for name in names
    if hasattr(owner, name)
]


def check_internals() -> None:
    """Raises where this version of JAX is built so differently that a log would be empty or
    wrong.
    """
    missing = [
        name
        for name, is_there in (
            ("EvalTrace.process_primitive", hasattr(EvalTrace, "process_primitive")),
            ("EvalTrace.process_shard_map", hasattr(EvalTrace, "process_shard_map")),
            ("ShardMapPrimitive.bind_with_trace", hasattr(ShardMapPrimitive, "bind_with_trace")),
            ("EvalTrace.process_custom_jvp_call", hasattr(EvalTrace, "process_custom_jvp_call")),
            ("source_info_util._source_info_context", hasattr(_CONTEXT, "context")),
            ("source_info_util.extend_name_stack", name_scope is not None),
            ("partial_eval.convert_constvars_jaxpr", _convert_constants is not None),
            ("ArrayImpl.__bool__", hasattr(ArrayImpl, "__bool__")),
            ("disable_jit", hasattr(jax, "disable_jit")),
        )
        if not is_there
    ]
    if missing:
        raise TorchLensError(
            f"JAX {jax.__version__} is built differently from the versions that torchlens supports "
            f"(0.10): it has no {' and no '.join(missing)}. Install a supported version: pip "
            "install 'jax>=0.10,<0.11'."
        )


def is_pmapped(function: Any) -> bool:
    """Whether `jax.pmap` made it, which cannot be told from what `jax.jit` makes by its
    attributes.
    """
    return getattr(function, "__globals__", None) is getattr(unwrap(jax.pmap), "__globals__", {})


def current_context() -> Any:
    """Where the operation that is about to run was written, as far as JAX says: `traceback` (or
    None) and `name_stack`.
    """
    return _CONTEXT.context


def scopes_of(context: Any) -> tuple[Any, ...]:
    """The named scopes and transformations around an operation, outermost first; each has a
    `name`.
    """
    scopes: tuple[Any, ...] = context.name_stack.stack
    return scopes


def is_traced(tree: Any) -> bool:
    """Whether a program is being traced, so that some of these arrays have no values."""
    return any(isinstance(leaf, core.Tracer) for leaf in jax.tree_util.tree_leaves(tree))


def concrete(value: Any) -> Any:
    """The array behind the tracers that jvp, grad and vmap wrap it in; None where a program is
    being traced.
    """
    while isinstance(value, core.Tracer):
        for name in ("primal", "val"):
            if hasattr(value, name):
                value = getattr(value, name)
                break
        else:
            return None
    return value


def lacks_values(tree: Any) -> bool:
    """Whether an array in it has no value, because the program that it stands in is being traced
    and will run later.
    """
    return any(
        isinstance(leaf, core.Tracer)
        and not isinstance(concrete(leaf), jax.Array | np.ndarray | np.generic)
        for leaf in jax.tree_util.tree_leaves(tree)
    )


def without_constants(program: Any) -> tuple[Any, list[Any]]:
    """The program with its constants as its first arguments, and those."""
    return _convert_constants(program.jaxpr), list(program.consts)
