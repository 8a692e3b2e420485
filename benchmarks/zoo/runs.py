"""Running a model of the zoo, and comparing what runs returned."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import torch

import torchlens as tl
from benchmarks.zoo.specimen import Case

__all__ = [
    "Run", "all_equal", "arguments_of", "call", "compare_runs", "equal", "log", "run_seeded",
    "seed", "tensors_in",
]  # fmt: skip

SEED = 1234


@dataclass(slots=True)
class Run:
    """What a run answered, the tensors that the model returned, and the generators after it."""

    value: Any
    tensors: list[torch.Tensor]
    generators: tuple[Any, ...]


def run_seeded(run: Callable[[], tuple[Any, Any]]) -> Run:
    """`run` answers (value, what the model returned)."""
    seed()
    value, returned = run()
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    return Run(value, list(tensors_in(returned)), generators)


def seed() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def arguments_of(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments anew, as a model may write into them or, like a cache, be changed by them."""
    return _copied(case.args), _copied(case.kwargs)


def _copied(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if type(tree) in (list, tuple):
        return type(tree)(map(_copied, tree))
    if type(tree) is dict:
        return {key: _copied(item) for key, item in tree.items()}
    return tree


def call(case: Case) -> tuple[Any, Any]:
    args, kwargs = arguments_of(case)
    returned = case.model(*args, **kwargs)
    return returned, returned


def log(case: Case, **options: Any) -> tuple[tl.ModelHistory, Any]:
    """Logs the model; a hook of its own tells what the model returned meanwhile."""
    returned = []
    handle = case.model.register_forward_hook(lambda module, args, output: returned.append(output))
    try:
        args, kwargs = arguments_of(case)
        history = tl.log_forward_pass(case.model, list(args), kwargs, **options)
    finally:
        handle.remove()
    return history, returned[-1]


def compare_runs(plain: Run, logged: Run, reasons: list[str]) -> None:
    if not all_equal(plain.tensors, logged.tensors):
        reasons.append("the model returned something else while it was logged")
    for kind, before, after in zip(
        ("python", "numpy", "torch"), plain.generators, logged.generators, strict=True
    ):
        if not _same_state(before, after):
            reasons.append(f"the state of the {kind} generator differs from a plain run's")


def _same_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return all(map(np.array_equal, a, b))


# -- tensors
# --------------------------------------------------------------------------------------------------


def tensors_in(tree: Any, seen: frozenset[int] = frozenset()) -> Iterator[torch.Tensor]:
    """The tensors in what a model returned: in lists, dicts, dataclasses and plain objects."""
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    if id(tree) in seen or isinstance(tree, str | bytes | torch.nn.Module | type):
        return
    seen = seen | {id(tree)}
    if isinstance(tree, Mapping):
        items = list(tree.values())
    elif isinstance(tree, list | tuple | set):
        items = list(tree)
    elif is_dataclass(tree) or hasattr(tree, "__dict__"):
        items = list(vars(tree).values())
    else:
        return
    for item in items:
        yield from tensors_in(item, seen)


def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """The same, NaN for NaN."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.is_nested or a.is_quantized or a.layout != torch.strided:
        return str(a) == str(b)
    if a.shape != b.shape:
        return False
    if a.is_floating_point() or a.is_complex():
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return torch.equal(a, b)


def all_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(equal, a, b))
