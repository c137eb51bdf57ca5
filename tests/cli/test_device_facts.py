"""What a start hears of a device: asked by another process, in the words of this one."""

import pytest

from firstlight.cli.device_facts import device_facts
from firstlight.errors import EnvironmentProblem, UsageError
from firstlight.platforms.find import find_platform
from firstlight.platforms.host import read_host


def test_the_processor_is_asked_here() -> None:
    facts = device_facts("cpu", 2, "float32")
    total = read_host().memory.total_bytes
    assert facts.name == "cpu" and not facts.owned and 0 < facts.available_bytes <= total // 2


def test_auto_is_resolved_by_another_process() -> None:
    assert device_facts("auto", 1, "float32").name == find_platform("auto").name


def test_refusals_keep_their_words_and_kind() -> None:
    with pytest.raises(UsageError) as here:
        find_platform("abacus")
    with pytest.raises(UsageError) as there:
        device_facts("abacus", 1, "float32")
    assert str(there.value) == str(here.value)


def test_a_process_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(EnvironmentProblem, match=r"platform musa: the device ended .* with code"):
        device_facts("musa", 1, "float32")
