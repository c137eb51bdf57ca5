"""A platform from another package: found by entry point, asked like ours, harmless if broken."""

import re
import sys
from pathlib import Path

import pytest

from firstlight.errors import EnvironmentProblem, UsageError
from firstlight.platforms import cuda, find, musa
from firstlight.platforms.find import broken_plug_ins, find_platform, named, platforms

EXAMPLE = Path(__file__).parents[2] / "examples" / "firstlight-npu"


def install(folder, monkeypatch, *, name, entry):
    """Writes what an installer would write for one entry point, and puts it on the path."""
    about = folder / f"{name}_plug_in-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plug-in\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[firstlight.platforms]\n{name} = {entry}\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def npu(tmp_path, monkeypatch):
    text = (EXAMPLE / "pyproject.toml").read_text()
    match = re.search(r'\[project\.entry-points\."firstlight\.platforms"\]\nnpu = "(.+)"', text)
    install(tmp_path, monkeypatch, name="npu", entry=match.group(1))
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    yield
    for module in [name for name in sys.modules if name.startswith("firstlight_npu")]:
        del sys.modules[module]


def test_the_example_is_found_before_the_processors(npu):
    assert [one.name for one in platforms()] == ["musa", "cuda", "npu", "cpu"]
    assert named("npu").runtime.collective_backend == "hccl"
    assert broken_plug_ins() == {}


def test_the_example_says_what_is_missing(npu):
    with pytest.raises(EnvironmentProblem, match=r"torch(_npu)? is not installed"):
        find_platform("npu")
    assert find_platform("auto").name == "cpu"


def test_a_broken_plug_in_harms_nobody_until_it_is_asked_for(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, name="brittle", entry="nowhere_at_all:PLATFORM")
    assert "brittle" not in [one.name for one in platforms()]
    with pytest.raises(EnvironmentProblem, match=r"brittle does not load: ModuleNotFoundError"):
        named("brittle")


def test_an_object_that_is_no_platform_is_named_as_such(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, name="odd", entry="os:sep")
    assert broken_plug_ins() == {"odd": "os:sep is no Platform named odd"}
    with pytest.raises(UsageError, match="there is no platform 'abacus'"):
        named("abacus")


def test_the_guide_names_every_capability_and_stays_short():
    guide = (EXAMPLE.parents[1] / "docs" / "guides" / "platform-plugins.md").read_text()
    code = "".join(Path(module.__file__).read_text() for module in (cuda, musa, find))
    code += (EXAMPLE / "src" / "firstlight_npu" / "platform.py").read_text()
    words = {word for part in re.findall(r"(?:has \|?= |undecided|add\()[^)\n]*", code)
             for word in re.findall(r'"([a-z0-9_]+)"', part)}  # fmt: skip
    assert len(words) > 12
    assert {word for word in words if f"`{word}`" not in guide} == set()
    assert len(guide.splitlines()) < 150
