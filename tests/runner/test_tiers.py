"""State outside the device through the engine: tiered, swapped and long runs against undisturbed
ones, and what happens when a tier fails.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firstlight.cache.far_pool import FarSizes
from firstlight.runner import disk_tier, far_reader, tier_store, unit_places, write_behind
from firstlight.runner.host_tier import HostTier
from firstlight.schedule.scheduler import LOST_AGAIN
from local_engine import EngineShape, LocalEngine, greedy, random_prompts
from tiny_models import tiny_config, write_checkpoint

K3 = Path(__file__).parents[1] / "data" / "k3" / "checkpoint"
PROMPTS = random_prompts(40, 49, 33, 41, below=250)
LONG = random_prompts(150, 30, 101, below=250)
# Two of the prompts fit beside each other, but not with their answers.
SQUEEZED = EngineShape(
    num_blocks=24,
    block_size=4,
    max_sequences=4,
    max_batch_tokens=16,
    chunk_tokens=7,
    context_length=256,
    num_slots=5,
)
ROOMY = replace(SQUEEZED, num_blocks=256, num_slots=33)


def tokens(outcomes: Any) -> list[list[int]]:
    return [outcome.token_ids for outcome in outcomes]


class Model:
    """A model's folder, and an engine of it whose device holds everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.resident = LocalEngine(folder, ROOMY)
        self._known: dict[tuple[int, int], list[list[int]]] = {}

    def want(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        key = (len(prompts[0]), count)
        if key not in self._known:
            self._known[key] = tokens(self.resident.run(prompts, greedy(count)))
        return self._known[key]

    def tiered(self, folder: Path, *far: FarSizes, **changes: Any) -> LocalEngine:
        groups = len({state.group for state in self.resident.states})
        far = far * groups if len(far) == 1 else far
        shape = replace(SQUEEZED, far=far, tier_folder=str(folder), **changes)
        return LocalEngine(self.folder, shape, model=self.resident.model)


@pytest.fixture(scope="module", params=["smollm2", "mistral-window", "k3"])
def model(request: Any, tmp_path_factory: Any) -> Model:
    if request.param == "k3":
        return Model(K3)
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder, tiny_config(request.param))
    return Model(folder)


@pytest.mark.parametrize("far", [FarSizes(60, 0), FarSizes(0, 60), FarSizes(9, 40)], ids=str)
def test_tiered_and_swapped_equal_resident(model: Model, far: FarSizes, tmp_path: Path) -> None:
    engine = model.tiered(tmp_path, far)
    for _ in range(2):
        assert tokens(engine.run(PROMPTS, greedy(20))) == model.want(PROMPTS, 20)
    counts = engine.scheduler.counts
    assert counts.fetches > 0 and counts.lost_units == 0
    assert counts.preemptions == counts.swaps
    engine.tiers.close()
    assert not list(tmp_path.iterdir()), "the file is removed"


def test_a_sequence_longer_than_the_device(model: Model, tmp_path: Path) -> None:
    engine = model.tiered(tmp_path, FarSizes(10, 90), num_blocks=20)
    for _ in range(2):  # the second time most of it is found where it lies
        assert tokens(engine.run(LONG, greedy(9))) == model.want(LONG, 9)
    engine.tiers.close()


@pytest.mark.parametrize(
    "changes",
    [{"kv_dtype": "int8"}, {"kv_dtype": "fp8"}, {"attention": "sparse=4x8"}],
    ids=["int8", "fp8", "sparse"],
)
def test_a_long_sequence_in_other_forms(
    small: Model, changes: dict[str, str], tmp_path: Path
) -> None:
    resident = LocalEngine(small.folder, replace(ROOMY, **changes))
    want = tokens(resident.run(LONG, greedy(9)))
    shape = replace(SQUEEZED, num_blocks=20, far=(FarSizes(10, 90),), tier_folder=str(tmp_path))
    engine = LocalEngine(small.folder, replace(shape, **changes), model=resident.model)
    for _ in range(2):
        assert tokens(engine.run(LONG, greedy(9))) == want
    assert engine.scheduler.counts.lost_units == 0
    engine.tiers.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: Any) -> Model:
    folder: Path = tmp_path_factory.mktemp("small")
    write_checkpoint(folder, tiny_config("smollm2"))
    return Model(folder)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        for offset in range(5000, path.stat().st_size, 4096):
            file.seek(offset)
            value = file.read(1)
            file.seek(offset)
            file.write(bytes([value[0] ^ 4]))


def cut(path: Path) -> None:
    os.truncate(path, 4096)


@pytest.mark.parametrize("damage", [flip, cut], ids=["bits flipped", "file cut off"])
def test_what_a_disk_lost_is_computed_again(
    small: Model, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    engine = small.tiered(tmp_path, FarSizes(0, 60))
    want = small.want(PROMPTS, 20)
    assert tokens(engine.run(PROMPTS, greedy(20))) == want
    [path] = tmp_path.iterdir()
    damage(path)
    assert tokens(engine.run(PROMPTS, greedy(20))) == want
    assert engine.scheduler.counts.lost_units > 0
    assert tokens(engine.run(PROMPTS, greedy(20))) == want
    engine.tiers.close()


def test_pages_lost_under_a_long_sequence_are_computed_again(small: Model, tmp_path: Path) -> None:
    engine = small.tiered(tmp_path, FarSizes(0, 60), num_blocks=20)
    request = engine.submit(LONG[0], greedy(9))
    for _ in range(20):
        engine.step()
    [path] = tmp_path.iterdir()
    flip(path)
    while engine.step():
        engine.scheduler.check_integrity()
    assert engine.outcomes[request].token_ids == small.want(LONG, 9)[0]
    assert engine.scheduler.counts.lost_units > 0
    engine.tiers.close()


def test_a_sequence_whose_pages_are_always_lost_fails_alone(
    small: Model, tmp_path: Path, monkeypatch: Any
) -> None:
    engine = small.tiered(tmp_path, FarSizes(0, 60), num_blocks=20)

    def refuse(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", refuse)
    long, short = engine.submit(LONG[0], greedy(9)), engine.submit(LONG[1], greedy(9))
    while engine.step():
        engine.scheduler.check_integrity()
    assert engine.outcomes[long].error == LOST_AGAIN
    assert engine.outcomes[short].token_ids == small.want(LONG, 9)[1]
    engine.tiers.close()


def test_a_file_that_vanishes_is_of_no_consequence(small: Model, tmp_path: Path) -> None:
    engine = small.tiered(tmp_path, FarSizes(0, 60))
    assert tokens(engine.run(PROMPTS, greedy(20))) == small.want(PROMPTS, 20)
    [path] = tmp_path.iterdir()
    path.unlink()
    assert tokens(engine.run(PROMPTS, greedy(20))) == small.want(PROMPTS, 20)
    assert engine.scheduler.counts.lost_units == 0
    engine.tiers.close()


def test_a_disk_that_takes_no_more(small: Model, tmp_path: Path, monkeypatch: Any) -> None:
    engine = small.tiered(tmp_path, FarSizes(0, 60))

    def refuse(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", refuse)
    assert tokens(engine.run(PROMPTS, greedy(20))) == small.want(PROMPTS, 20)
    assert engine.scheduler.counts.lost_units > 0 and engine.scheduler.counts.fetches == 0
    engine.tiers.close()


def test_a_disk_that_does_not_keep_up(small: Model, tmp_path: Path, monkeypatch: Any) -> None:
    write = os.pwritev

    def slow(*arguments: Any) -> int:
        tier_store.time.sleep(0.01)
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", slow)
    monkeypatch.setattr(write_behind, "WRITE_SECONDS", 0.001)
    monkeypatch.setattr(unit_places, "PIECE_BYTES", 1)
    monkeypatch.setattr(tier_store, "STAGING_BYTES", 1)
    engine = small.tiered(tmp_path, FarSizes(0, 60))
    assert tokens(engine.run(PROMPTS, greedy(20))) == small.want(PROMPTS, 20)
    assert engine.scheduler.counts.lost_units > 0
    engine.tiers.close()


def test_a_host_that_gives_no_memory(small: Model, tmp_path: Path) -> None:
    engine = small.tiered(tmp_path, FarSizes(60, 0))

    def refuse(*_: Any) -> Any:
        raise MemoryError("refused")

    for group in engine.tiers._groups:
        group.host = HostTier(60, group.units.unit_bytes, allocate=refuse)
    assert tokens(engine.run(PROMPTS, greedy(20))) == small.want(PROMPTS, 20)
    assert engine.scheduler.counts.lost_units > 0
    engine.tiers.close()


def test_a_slow_disk_holds_up_none_but_those_who_wait(
    small: Model, tmp_path: Path, monkeypatch: Any
) -> None:
    engine = small.tiered(tmp_path, FarSizes(0, 60))
    want = small.want(PROMPTS, 20)
    assert tokens(engine.run(PROMPTS, greedy(20))) == want
    read = os.preadv

    def slow(*arguments: Any) -> int:
        tier_store.time.sleep(0.02)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    assert tokens(engine.run(PROMPTS, greedy(20))) == want
    assert engine.scheduler.counts.late_fetches > 0
    engine.tiers.close()


def test_a_disk_that_hangs_ends_who_needs_it_and_no_other(
    small: Model, tmp_path: Path, monkeypatch: Any
) -> None:
    engine = small.tiered(tmp_path, FarSizes(0, 60), num_blocks=20)
    long = engine.submit(LONG[0], greedy(9))
    for _ in range(20):
        engine.step()
    read, answers = os.preadv, threading.Event()

    def hang(*arguments: Any) -> int:
        answers.wait(60)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", hang)
    monkeypatch.setattr(disk_tier, "OVERDUE_SECONDS", 0.2)
    monkeypatch.setattr(far_reader, "LOOK_SECONDS", 0.05)
    short = engine.submit(LONG[1], greedy(9))
    while engine.step():
        engine.scheduler.check_integrity()
    assert engine.outcomes[long].error == LOST_AGAIN
    assert engine.outcomes[short].token_ids == small.want(LONG, 9)[1]
    answers.set()  # what comes too late is of no consequence
    assert tokens(engine.run(LONG, greedy(9))) == small.want(LONG, 9)
    engine.tiers.close()
