"""Private names of torch that the package uses: they may move in any release."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch

import torchlens as tl

PACKAGE = Path(tl.__file__).parent


def private_names(tree: ast.AST) -> Iterator[str]:
    """`torch._C._get_tracing_state` and the like, also as they are imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            is_private = any(part.startswith("_") and part[:2] != "__" for part in parts)
            if parts[0] == "torch" and is_private and all(map(str.isidentifier, parts)):
                yield name


def exists(name: str) -> bool:
    module, _, last = name.rpartition(".")
    try:
        import_module(name)
    except ImportError:
        return bool(module) and exists(module) and hasattr(value_of(module), last)
    return True


def value_of(name: str) -> object:
    module, _, last = name.rpartition(".")
    try:
        return import_module(name)
    except ImportError:
        return getattr(value_of(module), last)


def test_this_release_of_torch_has_every_private_name_that_the_package_uses() -> None:
    missing = {
        f"torch {torch.__version__} has no {name}, which {path.relative_to(PACKAGE)} uses"
        for path in PACKAGE.rglob("*.py")
        for name in private_names(ast.parse(path.read_text()))
        if not exists(name)
    }
    assert not missing, "\n".join(sorted(missing))


def test_a_name_that_moved_is_noticed() -> None:
    tree = ast.parse("from torch._C import _moved\ntorch._C._gone(torch.relu)")
    assert {"torch._C._moved", "torch._C._gone"} <= {*private_names(tree)}
    assert "torch.relu" not in {*private_names(tree)}
    assert not exists("torch._C._moved")
    assert not exists("torch._gone._moved")
    assert exists("torch._C._get_tracing_state")
