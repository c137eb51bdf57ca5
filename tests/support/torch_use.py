"""Says which test files need torch, by their imports and those of the modules they name.

Ours are the modules of firstlight and of tests/support. Reads source only; runs none of it.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOMES = (ROOT / "src", ROOT / "tests" / "support")
HEAVY = frozenset({"torch", "transformers", "accelerate"})
# Fixtures of tests/conftest.py that start processes with torch in them.
HEAVY_FIXTURES = frozenset({"ranks", "rank_processes"})


def needs_torch(path: Path) -> bool:
    """Whether the test file, or a module of ours it imports at any depth, imports torch."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if _uses_heavy_fixture(tree):
        return True
    names = imported_names(tree) | _skipped_imports(tree)
    return any(_is_heavy(name) or _module_needs_torch(name) for name in names)


def imported_names(tree: ast.AST, *, lazy: bool = True) -> set[str]:
    """Dotted names a module imports; with `lazy` false, only those outside functions."""
    names: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        if lazy or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending.extend(ast.iter_child_nodes(node))
    return names


def module_path(name: str) -> Path | None:
    """The source file of a dotted name of ours, or None when the name is no module of ours."""
    for base in (home.joinpath(*name.split(".")) for home in HOMES):
        for path in (base.parent / f"{base.name}.py", base / "__init__.py"):
            if path.is_file():
                return path
    return None


@cache
def _direct(name: str) -> frozenset[str]:
    path = module_path(name)
    if path is None:
        return frozenset()
    return frozenset(imported_names(ast.parse(path.read_text(encoding="utf-8")), lazy=False))


def _module_needs_torch(name: str) -> bool:
    seen: set[str] = set()
    pending = [name]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        for imported in _direct(current):
            if _is_heavy(imported):
                return True
            pending.append(imported)
    return False


def _is_heavy(name: str) -> bool:
    return name.split(".")[0] in HEAVY


def _uses_heavy_fixture(tree: ast.AST) -> bool:
    return any(isinstance(node, ast.arg) and node.arg in HEAVY_FIXTURES for node in ast.walk(tree))


def _skipped_imports(tree: ast.AST) -> set[str]:
    return {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("importorskip")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
