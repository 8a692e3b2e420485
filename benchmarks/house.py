"""The size of the package, folder by folder: files, lines, code tokens, and functions with many
branches.

    python benchmarks/house.py            # torchlens/
    python benchmarks/house.py some/dir   # another package, for comparison
    python benchmarks/house.py --names    # file and class names that exist more than once
    python benchmarks/house.py --complex  # the functions with many branches, worst first

Code tokens leave out comments, docstrings and layout (line breaks, indentation). A branch is an
`if`, a loop, an `except`, a `case`, a conditional expression, a comprehension's `for` and `if`, an
`and`, an `or`; the straight way through a function counts as one (McCabe's number).
"""

import argparse
import ast
import collections
import io
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

MANY_BRANCHES = 11
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.match_case,
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Size:
    """What one folder holds."""

    files: int = 0
    lines: int = 0
    tokens: int = 0
    complex: int = 0

    def __iadd__(self, other: "Size") -> "Size":
        self.files += other.files
        self.lines += other.lines
        self.tokens += other.tokens
        self.complex += other.complex
        return self


@dataclass
class Package:
    """All files of a package, read once."""

    root: Path
    folders: dict[str, Size] = field(default_factory=lambda: collections.defaultdict(Size))
    functions: list[tuple[int, str]] = field(default_factory=list)
    file_names: collections.Counter[str] = field(default_factory=collections.Counter)
    class_names: collections.Counter[str] = field(default_factory=collections.Counter)

    def __post_init__(self) -> None:
        for path in sorted(self.root.rglob("*.py")):
            self._read(path)

    def _read(self, path: Path) -> None:
        text = path.read_text()
        tree = ast.parse(text)
        inside = path.relative_to(self.root)
        folder = inside.parts[0] if len(inside.parts) > 1 else "(top)"
        functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
        counts = [(branches(node), f"{inside}:{node.lineno} {node.name}") for node in functions]
        many = [count for count in counts if count[0] >= MANY_BRANCHES]
        self.functions += many
        self.folders[folder] += Size(1, text.count("\n"), code_tokens(text, tree), len(many))
        if path.name not in ("__init__.py", "__main__.py"):
            self.file_names[path.name] += 1
        self.class_names.update(n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef))


def code_tokens(text: str, tree: ast.Module) -> int:
    """The tokens of a file without comments, docstrings and layout."""
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | _Function):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add((first.value.lineno, first.value.col_offset))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type not in _LAYOUT and t.start not in docstrings for t in tokens)


def branches(function: _Function) -> int:
    """How many branches a function has (1 if it never chooses), without those of inner
    functions.
    """
    count, inner = 1, list(ast.iter_child_nodes(function))
    while inner:
        node = inner.pop()
        if isinstance(node, _Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, _BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        inner += ast.iter_child_nodes(node)
    return count


def print_sizes(package: Package) -> None:
    total = Size()
    row = "{:<14}{:>7}{:>9}{:>14}{:>22}"
    print(row.format("", "files", "lines", "code tokens", f"{MANY_BRANCHES}+ branches"))
    for folder, size in sorted(package.folders.items()):
        total += size
        print(row.format(folder, size.files, size.lines, size.tokens, size.complex))
    print(row.format("all", total.files, total.lines, total.tokens, total.complex))


def print_repeated(title: str, names: collections.Counter[str]) -> None:
    repeated = {name: count for name, count in names.most_common() if count > 1}
    print(f"{len(repeated)} {title} exist more than once")
    print("  " + ", ".join(f"{name} ({count})" for name, count in repeated.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("package", nargs="?", default=str(Path(__file__).parents[1] / "torchlens"))
    parser.add_argument("--names", action="store_true", help="names that exist more than once")
    parser.add_argument("--complex", action="store_true", help="functions with many branches")
    options = parser.parse_args()
    package = Package(Path(options.package))
    print_sizes(package)
    if options.names:
        print_repeated("file names", package.file_names)
        print_repeated("class names", package.class_names)
    if options.complex:
        for count, where in sorted(package.functions, reverse=True):
            print(f"{count:4} {where}")


if __name__ == "__main__":
    main()
