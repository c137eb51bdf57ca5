"""Blocks in a row through the engine: whatever moves, and wherever it lies, tokens stay what they
are in a cache that holds everything.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from firstlight.cache.far_pool import FarSizes
from firstlight.layers.layer_state import PagedKeysValues, PagedLatents
from firstlight.runner.page_copies import copy_pages, layers_by_group
from firstlight.schedule.step import UnitCopy
from local_engine import EngineShape, LocalEngine, greedy, random_prompts
from tiny_models import tiny_config, write_checkpoint

K3 = Path(__file__).parents[1] / "data" / "k3" / "checkpoint"
SQUEEZED = EngineShape(
    num_blocks=22,
    block_size=4,
    max_sequences=5,
    max_batch_tokens=24,
    chunk_tokens=11,
    context_length=256,
    num_slots=9,
    allocator="dynamic",
)
ROOMY = replace(SQUEEZED, num_blocks=512, num_slots=64, allocator="paged")
SHARED, *TAILS = random_prompts(17, 5, 21, 2, 30, below=250)
# Conversations that begin alike, then the same again with more: misses, hits and copies.
PROMPTS = [SHARED + tail for tail in TAILS] + [SHARED + tail + [7, 8, 9] * 3 for tail in TAILS]


class Made(NamedTuple):
    """A model's folder, the model, and what a cache that holds everything gives."""

    folder: Path
    model: Any
    want: list[list[int]]
    num_groups: int


@pytest.fixture(scope="module", params=["smollm2", "k3"])
def made(request: Any, tmp_path_factory: Any) -> Made:
    folder: Path = K3
    if request.param != "k3":
        folder = tmp_path_factory.mktemp(request.param)
        write_checkpoint(folder, tiny_config(request.param))
    roomy = LocalEngine(folder, ROOMY)
    num_groups = len({state.group for state in roomy.states})
    return Made(folder, roomy.model, answers(roomy), num_groups)


def answers(engine: LocalEngine) -> list[list[int]]:
    return [outcome.token_ids for outcome in engine.run(PROMPTS, greedy(7))]


def disturb(engine: LocalEngine, chance: random.Random) -> list[tuple[str, int]]:
    """Serves all prompts, some of them at once, and cancels one in six; (request, prompt)."""
    served = []
    for index in range(len(PROMPTS)):
        served.append((engine.submit(PROMPTS[index], greedy(7)), index))
        for _ in range(chance.randrange(6)):
            engine.step()
        if chance.random() < 1 / 6:
            engine.scheduler.cancel([chance.choice(served)[0]])
        engine.scheduler.check_integrity()
    steps = 0
    while engine.step():
        steps += 1
        assert steps < 500, "the requests do not come to an end"
    engine.scheduler.check_integrity()
    return served


@pytest.mark.parametrize("has_tiers", [False, True], ids=["device", "tiers"])
def test_rows_of_blocks_give_the_same_tokens(made: Made, has_tiers: bool, tmp_path: Path) -> None:
    far = (FarSizes(9, 40),) * made.num_groups if has_tiers else ()
    shape = replace(SQUEEZED, far=far, tier_folder=str(tmp_path))
    check(LocalEngine(made.folder, shape, model=made.model), made.want)


def test_int8_pages_move_with_their_scales(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("smollm2"))
    roomy = LocalEngine(tmp_path, replace(ROOMY, kv_dtype="int8"))
    shape = replace(SQUEEZED, kv_dtype="int8")
    check(LocalEngine(tmp_path, shape, model=roomy.model), answers(roomy))


def check(engine: LocalEngine, want: list[list[int]]) -> None:
    """Serves the prompts under pressure; compares, and sees that blocks moved and were shared."""
    for request, index in disturb(engine, random.Random(4)):
        got = engine.outcomes[request]
        assert got.error is None
        length = 7 if got.finish == "length" else len(got.token_ids)
        assert got.token_ids == want[index][:length]
    paged = [group for group in engine.cache.usage().groups if group.kind != "recurrent"]
    assert all(group.copied > 10 and group.hits > 10 for group in paged)
    assert engine.scheduler.counts.preemptions > 0
    assert all(group.used == 0 for group in engine.cache.usage().groups)
    if engine.tiers is not None:
        engine.tiers.close()


@pytest.mark.parametrize("seed", range(4))
def test_copies_are_made_as_if_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firstlight.runner.page_copies.BYTES_AT_ONCE", 3 * 96)
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    keys, values = (torch.rand(12, 2, 4, 3, generator=generator) for _ in range(2))
    summaries = torch.rand(20, 2, 3, generator=generator).half()
    rows = torch.rand(9, 4, 5, generator=generator)
    states = [PagedKeysValues(keys, values, 0, summaries=summaries), PagedLatents(rows, 1)]
    copies = [
        UnitCopy(group, chance.randrange(1, size), chance.randrange(1, size))
        for group, size in ((0, 12), (1, 9), (0, 12))
        for _ in range(25)
    ]
    want = [tensor.clone() for tensor in (keys, values, summaries, rows)]
    for copy in copies:
        for tensor in want[3:] if copy.group else want[:3]:
            tensor[copy.target] = tensor[copy.source].clone()
    copy_pages(layers_by_group(states), copies)
    for tensor, expected in zip((keys, values, summaries, rows), want, strict=True):
        assert torch.equal(tensor, expected)
