"""The private names of JAX that torchlens uses, and the check that this version has them."""

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
ShardMapPrimitive: Any = getattr(shard_map, "ShardMapPrimitive", None)  # has its own `bind`
_CONTEXT: Any = getattr(source_info_util, "_source_info_context", None)
name_scope: Any = getattr(source_info_util, "extend_name_stack", None)
_convert_constants: Any = getattr(partial_eval, "convert_constvars_jaxpr", None)

# Primitives that the public list lacks: `custom_vmap`, and those that make, read and write
# references.
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
    """Raises if this version of JAX lacks a name without which a log would be empty or wrong."""
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
            f"torchlens supports JAX 0.10, got {jax.__version__}, which lacks "
            f"{', '.join(missing)}. Install a supported version: pip install 'jax>=0.10,<0.11'."
        )


def is_pmapped(function: Any) -> bool:
    """True for the result of `jax.pmap`, which has the same attributes as that of `jax.jit`."""
    return getattr(function, "__globals__", None) is getattr(unwrap(jax.pmap), "__globals__", {})


def current_context() -> Any:
    """JAX's source information for the next operation: `traceback` (or None) and `name_stack`."""
    return _CONTEXT.context


def scopes_of(context: Any) -> tuple[Any, ...]:
    """The named scopes and transformations around an operation, outermost first, each with a
    `name`.
    """
    scopes: tuple[Any, ...] = context.name_stack.stack
    return scopes


def is_traced(tree: Any) -> bool:
    """True if any leaf is a tracer."""
    return any(isinstance(leaf, core.Tracer) for leaf in jax.tree_util.tree_leaves(tree))


def concrete(value: Any) -> Any:
    """The array (or the variable of a traced program) inside the tracers of jvp, grad and vmap;
    None for other tracers.
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
    """True if any leaf is a tracer without a value, because its program will run later."""
    return any(
        isinstance(leaf, core.Tracer)
        and not isinstance(concrete(leaf), jax.Array | np.ndarray | np.generic)
        for leaf in jax.tree_util.tree_leaves(tree)
    )


def without_constants(program: Any) -> tuple[Any, list[Any]]:
    """The program with its constants as its first arguments, and the constants."""
    return _convert_constants(program.jaxpr), list(program.consts)
