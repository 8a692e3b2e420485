"""What is used of JAX that JAX does not promise, in one place, and the check that it is there."""

from typing import Any

import jax
from jax._src import core, source_info_util
from jax._src.array import ArrayImpl

from torchlens.errors import TorchLensError

__all__ = [
    "ArrayImpl",
    "EvalTrace",
    "Primitive",
    "check_internals",
    "concrete",
    "current_context",
    "is_traced",
    "name_scope",
    "scopes_of",
]

EvalTrace: Any = getattr(core, "EvalTrace", None)
Primitive: Any = core.Primitive
_CONTEXT: Any = getattr(source_info_util, "_source_info_context", None)
name_scope: Any = getattr(source_info_util, "extend_name_stack", None)


def check_internals() -> None:
    """Raises where this version of JAX is built so differently that a log would be empty or wrong."""
    missing = [
        name
        for name, is_there in (
            ("EvalTrace.process_primitive", hasattr(EvalTrace, "process_primitive")),
            ("EvalTrace.process_custom_jvp_call", hasattr(EvalTrace, "process_custom_jvp_call")),
            ("source_info_util._source_info_context", hasattr(_CONTEXT, "context")),
            ("source_info_util.extend_name_stack", name_scope is not None),
            ("ArrayImpl.__bool__", hasattr(ArrayImpl, "__bool__")),
            ("disable_jit", hasattr(jax, "disable_jit")),
        )
        if not is_there
    ]
    if missing:
        raise TorchLensError(
            f"JAX {jax.__version__} is built differently from the versions that torchlens knows (0.10): it has no "
            f"{' and no '.join(missing)}. Install a version that is known: pip install 'jax>=0.10,<0.11'."
        )


def current_context() -> Any:
    """Where the operation that is about to run was written, as far as JAX says: `traceback` (or None) and `name_stack`."""
    return _CONTEXT.context


def scopes_of(context: Any) -> tuple[Any, ...]:
    """The named scopes and transformations around an operation, outermost first; each has a `name`."""
    scopes: tuple[Any, ...] = context.name_stack.stack
    return scopes


def is_traced(tree: Any) -> bool:
    """Whether a program is being traced, so that some of these arrays have no values."""
    return any(isinstance(leaf, core.Tracer) for leaf in jax.tree_util.tree_leaves(tree))


def concrete(value: Any) -> Any:
    """The array behind the tracers that jvp, grad and vmap wrap it in; None where a program is being traced."""
    while isinstance(value, core.Tracer):
        for name in ("primal", "val"):
            if hasattr(value, name):
                value = getattr(value, name)
                break
        else:
            return None
    return value
