"""The layout of the package: which way imports go, which names are public, what importing does."""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import torchlens as tl

PACKAGE = Path(tl.__file__).parent
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

# Every public name, once. A new one is added here, on purpose.
PUBLIC_NAMES = [
    "CannotCompareError",
    "Diff",
    "DifferentGraphError",
    "DrawingError",
    "EditError",
    "FeaturesError",
    "Finding",
    "LayerEntry",
    "ModelHistory",
    "NestedLogError",
    "NonFiniteError",
    "NotReplayableError",
    "Profile",
    "Run",
    "RunReader",
    "TorchLensError",
    "TraceError",
    "ValidationReport",
    "ValueChangedError",
    "assert_same_structure",
    "compare",
    "current_run",
    "diff",
    "edit",
    "explore_together",
    "extract",
    "get_model_metadata",
    "load",
    "log_calls",
    "log_forward_pass",
    "magnify",
    "monitor",
    "open_features",
    "open_run",
    "profile",
    "read_trace",
    "show_model_graph",
    "tail",
    "validate_forward_pass",
    "validate_saved_activations",
]

# From the bottom up: a file imports from its own package and from the packages before it.
ORDER = [
    *(
        "errors",
        "_compat",
        "_recording",
        "_text",
        "_capture",
        "_jax",
        "_graph",
        "_portable",
        "_history",
    ),
    *("_replay", "_health", "_attention", "_receptive", "_features"),
    *("api", "sinks", "callbacks", "edits", "features", "__init__", "_cli"),
    "__main__",
]
# Features read histories. One imports another only if it is named here.
FEATURES = [
    "_draw",
    "_page",
    "_export",
    "_validate",
    "_diff",
    "_edit",
    "_extract",
    "_profile",
    "_structure",
    "_monitor",
    "_trace",
]
USES = {
    *(("_monitor", "_page"), ("_diff", "_page"), ("_structure", "_page")),
}
# Files whose functions import from packages above their own when they are called.
CALLS_UP = {
    "torchlens._history.entry_questions",
    "torchlens._history.model_history",
    "torchlens._recording.frameworks",
    "torchlens._trace.tail",
    "torchlens.api",
}

# Slow to import or not always there: imported where they are needed.
OPTIONAL = {
    *(
        "pandas",
        "graphviz",
        "pygraphviz",
        "networkx",
        "IPython",
        "jax",
        "matplotlib",
        "pyarrow",
        "safetensors",
        "sympy",
        "transformers",
    ),
    *("PIL", "av", "lightning", "mlflow", "sklearn", "tensorboard", "trackio", "wandb"),
    *("datasets", "h5py", "ray", "rsatoolbox", "scipy"),
    *("torchvision", "tqdm", "xarray", "zarr"),
}


def place(module: str) -> str:
    """`_capture` for `torchlens._capture.session`, `__init__` for `torchlens`."""
    return [*module.split("."), "__init__"][1]


def may_import(mine: str, theirs: str) -> bool:
    if theirs == mine or (mine, theirs) in USES:
        return True
    if mine in FEATURES and theirs in FEATURES:
        return False
    ranks = [ORDER.index("_features" if name in FEATURES else name) for name in (mine, theirs)]
    return ranks[1] < ranks[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [node.module or ""]
    return []


@cache
def trees() -> dict[Path, ast.Module]:
    """Every file of the package, parsed once."""
    return {
        path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))
    }


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """The statements inside a node, however deep; imports are statements, so expressions need not
    be looked into.
    """
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        children = getattr(node, field, [])
        for child in children if isinstance(children, list) else []:
            yield child
            yield from statements_in(child)


def own_imports(node: ast.AST) -> set[str]:
    """The modules of the package that the statements inside a node import."""
    names = (name for inner in statements_in(node) for name in imports_of(inner))
    return {name for name in names if name.partition(".")[0] == "torchlens"}


def test_imports_go_one_way() -> None:
    wrong = []
    for path, tree in trees().items():
        name = module_name(path)
        late = set()
        if name in CALLS_UP:
            functions = [node for node in statements_in(tree) if isinstance(node, FUNCTION)]
            types = [node for node in tree.body if is_for_types(node)]
            late = {other for node in (*functions, *types) for other in own_imports(node)}
        for other in own_imports(tree) - late:
            if not may_import(place(name), place(other)):
                wrong.append(f"{name} imports {other}")
    assert wrong == []


def test_imports_stand_at_the_top_unless_a_package_is_optional_or_a_feature() -> None:
    wrong = []
    for path, tree in trees().items():
        mine = place(module_name(path))
        for function in statements_in(tree):
            if isinstance(function, FUNCTION):
                names = {name for node in statements_in(function) for name in imports_of(node)}
                late = {name for name in names if place(name) in FEATURES and place(name) != mine}
                if module_name(path) in CALLS_UP:
                    late |= own_imports(function)
                if not {name.partition(".")[0] for name in names - late} <= OPTIONAL:
                    wrong.append(f"{module_name(path)}.{function.name} imports {sorted(names)}")
    assert wrong == []


def test_private_files_have_no_list_of_public_names() -> None:
    for path, tree in trees().items():
        if place(module_name(path)).startswith("_") and path.parent != PACKAGE:
            assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
            assert "__all__" not in [ast.unparse(node.targets[0]) for node in assigned], path


def test_the_tests_mirror_the_packages() -> None:
    tests = Path(__file__).parent
    packages = {path.parent.name for path in PACKAGE.glob("_*/__init__.py")}
    assert packages <= {*ORDER, *FEATURES}
    for package in packages:
        folder = tests / package.removeprefix("_")
        assert list(folder.glob("test_*.py")), f"{folder.name}/ has no tests"


def test_no_two_files_of_tests_have_one_name() -> None:
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_no_imports_go_round_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path, tree in trees().items():
        named = [name for node in tree.body if not is_for_types(node) for name in imports_of(node)]
        graph[module_name(path)] = {name for name in named if name.startswith("torchlens.")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {error.args[1]}")


def test_optional_packages_are_never_imported_at_the_top() -> None:
    for path, tree in trees().items():
        # Only those who use a framework import the package for it.
        optional = OPTIONAL - {place(module_name(path)).removeprefix("_")}
        for node in tree.body:
            if not is_for_types(node):
                assert not optional & {name.partition(".")[0] for name in imports_of(node)}, (
                    module_name(path)
                )


def test_the_public_names_are_these() -> None:
    assert tl.__all__ == sorted(tl.__all__)
    assert tl.__all__ == PUBLIC_NAMES
    for name in tl.__all__:
        assert getattr(tl, name).__module__.startswith("torchlens")
        assert getattr(tl, name).__doc__


def test_dir_shows_the_public_names_alone() -> None:
    assert sorted(dir(tl)) == sorted(
        [*PUBLIC_NAMES, "__version__", "callbacks", "edits", "features", "sinks"]
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+", tl.__version__)
    star: dict[str, object] = {}
    exec("from torchlens import *", star)
    assert set(star) - {"__builtins__"} == set(PUBLIC_NAMES)


def test_the_exceptions_are_one_tree() -> None:
    for name in ("DifferentGraphError", "NestedLogError", "ValueChangedError"):
        assert issubclass(getattr(tl, name), tl.TorchLensError)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_importing_changes_nothing_in_torch_and_loads_no_optional_package() -> None:
    out = run(f"""
        import random, sys
        import numpy, torch
        spaces = [torch, torch.Tensor, torch.nn.functional, torch._tensor, torch.functional, torch.overrides,
                  torch.nn.Module, torch.nn.init, torch.linalg, torch._C.ScriptFunction,
                  torch.autograd.function._SingleLevelFunction]
        before = [dict(vars(space)) for space in spaces]
        loaded = set(sys.modules)
        states = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
        modes = torch.get_num_threads(), torch.is_grad_enabled()
        import torchlens
        for space, old in zip(spaces, before):
            new = dict(vars(space))
            # A submodule of torch that torchlens imports becomes an attribute of its package: that
            # is Python's doing.
            added = [key for key in new if key not in old and getattr(new[key], "__name__", "") not in sys.modules]
            changed = [key for key in old if new.get(key) is not old[key]]
            if added or changed:
                print(space, added, changed)
        if not torch.equal(states[0], torch.get_rng_state()) or states[1] != random.getstate():
            print("generators")
        if torch._C._len_torch_function_stack() or modes != (torch.get_num_threads(), torch.is_grad_enabled()):
            print("modes")
        optional = {sorted(OPTIONAL)!r}
        print(*[name for name in optional if name in sys.modules and name not in loaded], end="")
    """)
    assert out == ""


@pytest.mark.slow
@pytest.mark.parametrize("is_on", [True, False])
def test_importing_looks_for_no_garbage_and_leaves_the_collector_as_it_was(is_on: bool) -> None:
    out = run(f"""
        import gc, torch
        if not {is_on}:
            gc.disable()
        before = gc.get_stats()[2]["collections"]
        import torchlens
        print(gc.get_stats()[2]["collections"] - before, gc.isenabled())
    """)
    assert out == f"0 {is_on}\n"


@pytest.mark.slow
def test_importing_leaves_what_only_a_look_into_the_history_needs_for_later() -> None:
    out = run("""
        import sys, torch, torchlens
        print(*[name for name in sys.modules if name.startswith(("torchlens._graph", "torchlens._health.nonfinite"))])
        torchlens.log_forward_pass(torch.nn.ReLU(), torch.rand(3)).layer_labels
        print("torchlens._graph.build" in sys.modules)
    """)
    assert out == "\nTrue\n"


@pytest.mark.slow
def test_torcheer_is_another_name() -> None:
    out = run("""
        import torcheer as tl, torchlens
        assert tl.log_forward_pass is torchlens.log_forward_pass
        assert all(getattr(tl, name) is getattr(torchlens, name) for name in torchlens.__all__)
        assert tl.__all__ == torchlens.__all__
        import torch
        print(len(tl.log_forward_pass(torch.nn.ReLU(), torch.rand(3))))
    """)
    assert out == "3\n"
