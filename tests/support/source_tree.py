"""Reads the source tree and the tables of docs/architecture.md that the architecture tests hold.

Knows Markdown tables and Python syntax; the rules themselves stand in the document.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "firstlight"
DOCUMENT = ROOT / "docs" / "architecture.md"
FREE_FOR_ALL = frozenset({"errors", "units"})
PREFIX = "firstlight."


@dataclass(frozen=True)
class Import:
    """One import of ours by ours; `importer` and `imported` are names below `firstlight`."""

    importer: str
    imported: str
    line: int
    lazy: bool

    @property
    def package(self) -> str:
        """The top-level package or module imported."""
        return self.imported.split(".")[0]

    def __str__(self) -> str:
        how = "lazily imports" if self.lazy else "imports"
        return f"{self.importer}:{self.line} {how} {self.imported}"


@cache
def modules() -> dict[str, Path]:
    """Every module below `firstlight` by its dotted name, packages under their own name."""
    found: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a source file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(name: str, path: Path) -> Iterator[Import]:
    """Every import of our own modules in one file, those inside functions marked lazy."""
    pending: list[tuple[ast.AST, bool]] = [(parsed(path), False)]
    while pending:
        node, lazy = pending.pop()
        for imported in _own_names(node, name, path):
            yield Import(name, imported, getattr(node, "lineno", 0), lazy)
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        pending.extend((child, inside) for child in ast.iter_child_nodes(node))


def _own_names(node: ast.AST, name: str, path: Path) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.removeprefix(PREFIX) for alias in node.names if _is_ours(alias.name)}
    if not isinstance(node, ast.ImportFrom):
        return set()
    base = node.module or ""
    if node.level:
        own = ["firstlight", *name.split(".")]
        keep = len(own) - node.level + (path.name == "__init__.py")
        base = ".".join([*own[:keep], *([base] if base else [])])
    if not _is_ours(base):
        return set()
    known = modules()
    names = {f"{base}.{alias.name}".removeprefix(PREFIX) for alias in node.names}
    of_module = base.removeprefix("firstlight").lstrip(".")
    return {full if full in known else of_module for full in names} - {""}


def _is_ours(name: str) -> bool:
    return name == "firstlight" or name.startswith(PREFIX)


def table(title: str) -> list[list[str]]:
    """The rows of the Markdown table under a heading of docs/architecture.md, without its header.

    Backquotes are dropped. An empty or missing table is an error: a check that reads nothing
    would hold whatever the code did.
    """
    text = DOCUMENT.read_text(encoding="utf-8")
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"docs/architecture.md has no heading {title!r}"
    lines = [line for line in match.group(1).splitlines() if line.startswith("|")]
    rows = [
        [cell.strip() for cell in line.replace("`", "").strip("|").split("|")] for line in lines
    ]
    assert len(rows) > 2, f"docs/architecture.md has no table under {title!r}"
    return rows[2:]


def names_in(cell: str) -> frozenset[str]:
    """The names in a table cell, separated by commas or spaces; `-` is none."""
    return frozenset(re.split(r"[,\s]+", cell.strip())) - {"", "-"}


def covers(pattern: str, name: str) -> bool:
    """Whether a pattern (`cache`, `cache.device_store`, `models.*.config`) covers a module."""
    expression = re.escape(pattern).replace(r"\*", r"[^.]+")
    return re.match(rf"{expression}(\.|$)", name) is not None


def best_match(patterns: list[str], name: str) -> str | None:
    """The most exact pattern that covers a module name."""
    fitting = [pattern for pattern in patterns if covers(pattern, name)]
    return max(fitting, key=lambda pattern: pattern.count("."), default=None)
