"""Copies that may be late are late: every wait that a program leaves out changes what it sees."""

from pathlib import Path
from typing import Any

import pytest
import torch

from local_engine import EngineShape, LocalEngine, greedy
from tiny_models import tiny_config, write_checkpoint

TOKENS = 12
WAITS = ("before the save", "before the pages are reused", "before the restore", "after it")


def to_host(wait: bool) -> list[float]:
    source, target = torch.ones(4, device="musa"), torch.zeros(4).pin_memory()
    target.copy_(source, non_blocking=True)
    if wait:
        torch.musa.synchronize()
    seen: list[float] = target.tolist()
    torch.musa.synchronize()
    return seen


def to_device(wait: bool) -> list[float]:
    """The host writes the buffer anew before the copy has read it."""
    source, target = torch.ones(4).pin_memory(), torch.zeros(4, device="musa")
    done = torch.Event("musa")
    target.copy_(source, non_blocking=True)
    done.record()
    if wait:
        done.synchronize()
    source.fill_(7.0)
    seen: list[float] = target.tolist()
    return seen


def across_streams(wait: bool) -> tuple[list[float], list[str]]:
    from musa_emulator import control

    control.take_races()
    source, target = torch.ones(4).pin_memory(), torch.zeros(4, device="musa")
    side, main = torch.musa.Stream(), torch.musa.current_stream()
    side.wait_stream(main)
    with torch.musa.stream(side):
        target.copy_(source, non_blocking=True)
    if wait:
        main.wait_stream(side)
    doubled = target * 2
    return doubled.tolist(), control.take_races()


def test_a_missing_wait_reads_what_was_there_before(emulated: Any) -> None:
    group = emulated()
    assert group.run(to_host, True)[0] == [1.0] * 4
    assert group.run(to_host, False)[0] == [0.0] * 4
    assert group.run(to_device, True)[0] == [1.0] * 4
    assert group.run(to_device, False)[0] == [7.0] * 4
    assert group.run(across_streams, True)[0] == ([2.0] * 4, [])
    stale, races = group.run(across_streams, False)[0]
    assert stale == [0.0] * 4 and len(races) == 1


def freed_early(named: bool) -> list[float]:
    """A tensor goes away while another stream still copies it."""
    target, side = torch.zeros(4).pin_memory(), torch.musa.Stream()
    source = torch.ones(4, device="musa")
    side.wait_stream(torch.musa.current_stream())
    with torch.musa.stream(side):
        target.copy_(source, non_blocking=True)
    if named:
        source.record_stream(side)
    del source
    side.synchronize()
    seen: list[float] = target.tolist()
    return seen


def test_memory_freed_too_early_is_seen(emulated: Any) -> None:
    assert emulated().run(freed_early, True)[0] == [1.0] * 4
    assert torch.tensor(emulated().run(freed_early, False)[0]).isnan().all()


def arrives_by_itself() -> tuple[bool, bool, float]:
    import time

    source, target = torch.ones(4, device="musa"), torch.zeros(4).pin_memory()
    done = torch.Event("musa")
    target.copy_(source, non_blocking=True)
    done.record()
    early = done.query()
    deadline = time.monotonic() + 10
    while not done.query() and time.monotonic() < deadline:
        time.sleep(0.005)
    return early, done.query(), target[0].item()


def test_a_copy_ends_though_nobody_waits(emulated: Any) -> None:
    assert emulated().run(arrives_by_itself)[0] == (False, True, 1.0)


def pages_moved(folder: Path, missing: str = "") -> tuple[list[int], list[str]]:
    """An answer whose cache pages are moved to the host and back in the middle, on a stream of
    their own; `missing` is the wait that is left out.
    """
    from musa_emulator import control

    engine = LocalEngine(folder, EngineShape(num_blocks=16), device=torch.device("musa:0"))
    name = engine.submit(list(range(5, 45)), greedy(TOKENS))
    for _ in range(5):
        engine.step()
    control.take_races()
    pages = [t for state in engine.states for t in (state.keys_PKSH, state.values_PKSH)]
    kept = [torch.zeros(t.shape, pin_memory=True) for t in pages]
    side, main = torch.musa.Stream(), torch.musa.current_stream()
    for page in pages:
        page.add_(0.0)  # the step's last kernel, which the host has not waited for
    waits = {
        WAITS[0]: lambda: side.wait_stream(main),
        WAITS[1]: lambda: main.wait_stream(side),
        WAITS[2]: lambda: side.wait_stream(main),
        WAITS[3]: lambda: main.wait_stream(side),
    }

    def wait(which: str) -> None:
        if which != missing:
            waits[which]()

    wait(WAITS[0])
    with torch.musa.stream(side):
        for host, page in zip(kept, pages, strict=True):
            host.copy_(page, non_blocking=True)
    wait(WAITS[1])
    for page in pages:
        page.fill_(3.0)  # somebody else's
    wait(WAITS[2])
    with torch.musa.stream(side):
        for host, page in zip(kept, pages, strict=True):
            page.copy_(host, non_blocking=True)
    wait(WAITS[3])
    while engine.step():
        pass
    return engine.outcomes[name].token_ids, control.take_races()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("llama3")
    write_checkpoint(path, tiny_config("llama3"))
    return path


def test_pages_survive_a_trip_to_the_host(emulated: Any, folder: Path) -> None:
    plain = LocalEngine(folder).run([list(range(5, 45))], greedy(TOKENS))[0].token_ids
    assert emulated().run(pages_moved, folder)[0] == (plain, [])


@pytest.mark.parametrize("missing", WAITS)
def test_each_wait_of_that_trip_is_needed(emulated: Any, folder: Path, missing: str) -> None:
    """The same run with one wait removed gives another answer: what the emulation is for."""
    whole, _ = emulated().run(pages_moved, folder)[0]
    broken, races = emulated().run(pages_moved, folder, missing)[0]
    assert broken != whole and races
