"""Holds the import table, the lazy imports and the torch-free list of docs/architecture.md."""

import json
import subprocess
import sys

import pytest

from source_tree import (
    FREE_FOR_ALL,
    PACKAGE,
    SOURCE,
    Import,
    best_match,
    covers,
    imports_of,
    modules,
    names_in,
    table,
)

ALLOWED = {row[0]: names_in(row[1]) for row in table("Who may import whom")}
LAZY = {name: names_in(row[1]) for row in table("Lazy imports") for name in names_in(row[0])}
TORCH_FREE = {row[0]: names_in(row[1]) for row in table("Torch-free")}
HEAVY = ["torch", "transformers"]

# Imports every module named in one interpreter that has imported nothing of ours, and prints what
# went wrong: a module that does not import, or a heavy one that came along.
PROBE = """
import importlib, json, sys
names, heavy = json.loads(sys.argv[1])
broken = []
for name in names:
    try:
        importlib.import_module(name)
    except BaseException as problem:
        broken.append(f"{name} does not import: {problem!r}")
broken += [word for word in heavy if word in sys.modules]
print(json.dumps(broken))
"""


def imported_with(names: list[str]) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([[f"firstlight.{n}" for n in names], HEAVY])],
        env={"PYTHONPATH": str(SOURCE), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return list(json.loads(result.stdout))


def all_imports() -> list[Import]:
    return [found for name, path in modules().items() for found in imports_of(name, path)]


def may_import(found: Import) -> bool:
    own = found.importer.split(".")[0]
    if found.package in FREE_FOR_ALL | {own} and found.imported != "cli":
        return True
    row = best_match(list(ALLOWED), found.importer)
    return row is not None and any(
        pattern == "all" or covers(pattern, found.imported) for pattern in ALLOWED[row]
    )


def test_every_package_has_a_row_and_every_row_a_package():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {row.split(".")[0] for row in ALLOWED} == folders


def test_packages_import_only_what_their_row_allows():
    assert [str(found) for found in all_imports() if not may_import(found)] == []


def test_the_table_has_no_cycle():
    edges = {row: {n.split(".")[0] for n in ALLOWED[row]} for row in ALLOWED if "." not in row}
    edges["cli"] = set(edges) - {"cli"}
    done: set[str] = set()
    while ready := {row for row in edges if row not in done and edges[row] <= done}:
        done |= ready
    assert set(edges) - done == set(), "these packages import one another in a circle"


def test_our_imports_stand_at_module_level_unless_listed():
    def listed(found: Import) -> bool:
        row = best_match(list(LAZY), found.importer)
        return row is not None and any(
            pattern == "all" or covers(pattern, found.imported) for pattern in LAZY[row]
        )

    assert [str(found) for found in all_imports() if found.lazy and not listed(found)] == []


def is_torch_free(name: str) -> bool:
    return any(
        covers(pattern, name) and not any(covers(exception, name) for exception in exceptions)
        for pattern, exceptions in TORCH_FREE.items()
    )


def test_torch_free_modules_import_neither_torch_nor_transformers():
    names = [name for name in modules() if is_torch_free(name)] + sorted(FREE_FOR_ALL)
    # One interpreter for all when they hold, as they should; one each to name those that do not.
    culprits = {name: imported_with([name]) for name in names} if imported_with(names) else {}
    assert {name: broken for name, broken in culprits.items() if broken} == {}


@pytest.mark.parametrize("pattern", list(TORCH_FREE))
def test_each_torch_free_row_names_something_that_exists(pattern):
    assert any(covers(pattern, name) for name in modules())


def test_the_rules_notice_a_breach():
    assert not may_import(Import("schedule.scheduler", "layers.norm", 1, False))
    assert not may_import(Import("layers.norm", "parallel.mesh", 1, False))
    assert may_import(Import("schedule.scheduler", "metrics.events", 1, False))
