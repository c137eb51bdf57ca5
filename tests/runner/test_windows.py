"""Layers with a window through the engine: pools of a window's size give the plain answers."""

from pathlib import Path

import pytest

from firstlight.kernels.registry import KernelSet
from local_engine import (
    EngineShape,
    LocalEngine,
    fast_kernels,
    greedy,
    plain_greedy,
    random_prompts,
)
from tiny_models import tiny_config, write_checkpoint

TOKENS = 12
PROMPTS = random_prompts(5, 33, 64, 1, 90, 17)
# The window is 16: with chunks of 7 one sequence takes at most 7 blocks of 4 tokens.
SQUEEZED = EngineShape(
    num_blocks=34, block_size=4, max_batch_tokens=16, chunk_tokens=7, window_blocks={16: 13}
)


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window"])
@pytest.mark.parametrize("kernels", [None, fast_kernels()], ids=["reference", "fast"])
def test_pools_of_a_window_give_the_plain_answers(
    tmp_path: Path, name: str, kernels: KernelSet | None
) -> None:
    write_checkpoint(tmp_path, tiny_config(name))
    engine = LocalEngine(tmp_path, SQUEEZED, kernels)
    for state in engine.states:  # a page that was given back may hold anything
        state.keys_PKSH.fill_(float("nan"))
        state.values_PKSH.fill_(float("nan"))
    plain = LocalEngine(tmp_path).model  # packed weights serve only, from a cache
    want = [plain_greedy(plain, prompt, TOKENS) for prompt in PROMPTS]
    for _ in range(2):
        assert [outcome.token_ids for outcome in engine.run(PROMPTS, greedy(TOKENS))] == want
    long = [*PROMPTS[4], *want[4]]
    assert engine.run([long], greedy(1))[0].num_cached > 0
    windows = [g for g in engine.cache.usage().groups if g.usable == 12]
    assert windows and all(group.used == 0 for group in windows)
