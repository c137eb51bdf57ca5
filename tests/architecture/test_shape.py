"""Holds the sizes, names and literals of docs/architecture.md: what keeps the tree readable."""

import ast
import re

import pytest

from source_tree import PACKAGE, ROOT, modules, names_in, parsed, table

FILE_LINES = 400
FUNCTION_LINES = 60
FORBIDDEN_NAMES = frozenset({"utils", "util", "helpers", "common", "core", "misc"})
TEXT_SUFFIXES = frozenset({".py", ".cpp", ".h", ".hpp", ".json", ".toml", ".md", ".txt", ".jinja"})
PLATFORM_LINES = 150
# Each vendor's words, and the only modules that may say them.
VENDORS = {
    "cuda": ("cu" + "da", "nc" + "cl", "nvi" + "dia"),
    "musa": ("mu" + "sa", "mc" + "cl", "mthr" + "eads"),
    "npu": ("ascend", "hc" + "cl"),
}
# Fleets and launch files are about other machines than this one, by the names users write.
NAMES_FLEETS = ("planning.",)

SIZE_EXCEPTIONS = {row[0]: row[1] for row in table("Exceptions to the size limits")}


def docstrings(tree: ast.Module) -> set[int]:
    bodies = [node for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    return {
        id(node.body[0].value)
        for node in bodies
        if node.body and isinstance(node.body[0], ast.Expr)
    }


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def test_files_are_short():
    lengths = {
        name: len(path.read_text(encoding="utf-8").splitlines())
        for name, path in modules().items()
        if name not in SIZE_EXCEPTIONS
    }
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES} == {}


def test_functions_are_short():
    too_long = [
        f"{name}.{function.name}: {lines} lines"
        for name, path in modules().items()
        if name not in SIZE_EXCEPTIONS
        for function in functions(parsed(path))
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES
    ]
    assert too_long == []


def test_size_exceptions_name_modules_that_exist_and_need_them():
    for name in SIZE_EXCEPTIONS:
        if name == "none":
            continue
        tree = parsed(modules()[name])
        longest = max((f.end_lineno or 0) - f.lineno + 1 for f in functions(tree))
        lines = len(modules()[name].read_text(encoding="utf-8").splitlines())
        assert lines > FILE_LINES or longest > FUNCTION_LINES, f"{name} needs no exception"


def test_modules_are_named_for_what_they_own():
    assert [n for n in modules() if FORBIDDEN_NAMES & set(n.split("."))] == []


def test_every_module_says_what_it_owns():
    undocumented = [
        name
        for name, path in modules().items()
        if path.name != "__init__.py" and not ast.get_docstring(parsed(path))
    ]
    assert undocumented == []


def vendor_words(tree: ast.Module, words: tuple[str, ...]) -> list[int]:
    """Lines where code, not prose, says one of the words."""
    prose = docstrings(tree)
    lines = []
    for node in ast.walk(tree):
        said = getattr(node, "attr", "") or getattr(node, "id", "")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            said = "" if id(node) in prose else node.value
        if isinstance(said, str) and re.search(rf"(?<![a-z])({'|'.join(words)})", said.lower()):
            lines.append(getattr(node, "lineno", 0))
    return lines


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_vendor_is_named_only_at_home(vendor):
    homes = (f"platforms.{vendor}.", "platforms.find.", "kernels.", *NAMES_FLEETS)
    breaches = {
        name: found
        for name, path in modules().items()
        if not f"{name}.".startswith(homes)
        and (found := vendor_words(parsed(path), VENDORS[vendor]))
    }
    assert breaches == {}


def test_the_rule_about_vendors_notices_a_breach():
    word = "cu" + "da"
    assert vendor_words(ast.parse(f"import torch\nx = torch.{word}.device(0)"), (word,)) == [2]
    assert vendor_words(ast.parse(f"'prose on {word}'\nkind = '{word}:0'"), (word,)) == [2]


def test_a_platform_is_one_short_file():
    files = [PACKAGE / "platforms" / f"{name}.py" for name in ("cpu", "cuda", "musa")]
    files += sorted((ROOT / "examples").glob("*/src/*/platform.py"))
    lengths = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in files}
    assert {name: n for name, n in lengths.items() if n >= PLATFORM_LINES} == {}
    assert len(lengths) >= 4


def test_source_text_is_ascii():
    texts = [path for path in PACKAGE.rglob("*") if path.suffix in TEXT_SUFFIXES]
    assert len(texts) > 20
    assert [str(p.relative_to(ROOT)) for p in texts if not p.read_bytes().isascii()] == []


@pytest.mark.parametrize("row", table("Packages"), ids=lambda row: row[0])
def test_the_map_names_modules_that_exist(row):
    package, listed = row[0], names_in(row[2])
    assert (PACKAGE / package / "__init__.py").is_file()
    missing = [name for name in listed if not list((PACKAGE / package).glob(f"{name}*"))]
    assert missing == []


def test_the_map_names_every_package():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {row[0] for row in table("Packages")} == folders


def test_package_files_are_empty():
    inits = [path for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    assert [str(p.relative_to(PACKAGE)) for p in inits if p.read_text().strip()] == []
