"""Platforms: one interface, found by name, with reasons when one cannot be used."""

import inspect
import os

import psutil
import pytest

from firstlight.errors import EnvironmentProblem, UsageError
from firstlight.platforms import torch_check
from firstlight.platforms.find import BUILT_IN, find_platform
from firstlight.platforms.interface import DeviceRuntime
from firstlight.platforms.versions import at_least


def members(cls):
    return {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")}


def test_the_interface_has_ten_members_and_every_platform_has_them():
    assert len(members(DeviceRuntime)) == 10
    for platform in BUILT_IN:
        assert members(type(platform.runtime)) == members(DeviceRuntime)


def test_the_cpu_is_always_found():
    spec = find_platform("cpu").spec()
    assert spec.kind == "cpu" and spec.can("host_memory") and spec.can("float32")
    assert 1 <= spec.cores <= (os.cpu_count() or 1)
    assert 0 < spec.memory.available_bytes <= spec.memory.total_bytes
    assert spec.memory.total_bytes <= psutil.virtual_memory().total


def test_peak_memory_is_at_least_what_is_resident():
    assert find_platform("cpu").peak_bytes() >= psutil.Process().memory_info().rss * 0.5


def test_an_unknown_platform_lists_those_there_are():
    with pytest.raises(UsageError, match=r"no platform 'abacus'; there are auto, .*cpu"):
        find_platform("abacus")


def test_auto_takes_a_platform_that_can_be_used():
    assert find_platform().unavailable() is None


def test_a_missing_torch_is_one_clear_sentence(monkeypatch):
    monkeypatch.setattr(torch_check.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="torch is not installed; install your vendor's"):
        torch_check.require_torch()


def test_an_old_torch_is_refused_with_the_version_needed(monkeypatch):
    monkeypatch.setattr(torch_check, "torch_version", lambda: "2.1.0+vendor")
    with pytest.raises(EnvironmentProblem, match=r"torch 2\.1\.0\+vendor is too old, 2\.7 is"):
        torch_check.require_torch()


@pytest.mark.parametrize(
    ("version", "minimum", "holds"),
    [
        ("2.13.0+cpu", "2.7", True),
        ("2.7", "2.7.0", True),
        ("2.6.9", "2.7", False),
        ("3", "2.7", True),
        ("nightly", "2.7", False),
    ],
)
def test_versions_compare_by_number(version, minimum, holds):
    assert at_least(version, minimum) is holds
