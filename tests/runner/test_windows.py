"""Layers with a window through the engine: pools of a window's size give the plain answers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.kernels.registry import KernelSet
from firstlight.layers.packed_batch import pack_whole
from local_engine import EngineShape, LocalEngine, fast_kernels, greedy
from tiny_models import tiny_config, write_checkpoint

TOKENS = 12
# The window is 16: with chunks of 7 one sequence takes at most 7 blocks of 4 tokens.
SQUEEZED = EngineShape(
    num_blocks=34, block_size=4, max_batch_tokens=16, chunk_tokens=7, window_blocks={16: 13}
)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = [5, 33, 64, 1, 90, 17]
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in lengths]


def plain_greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(TOKENS):
            carry = model(torch.tensor(ids), pack_whole([len(ids)]))
            ids.append(int(model.head(carry)[-1].argmax()))
    return ids[len(prompt) :]


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
    want = [plain_greedy(plain, prompt) for prompt in prompts()]
    for _ in range(2):
        assert [outcome.token_ids for outcome in engine.run(prompts(), greedy(TOKENS))] == want
    long = [*prompts()[4], *want[4]]
    assert engine.run([long], greedy(1))[0].num_cached > 0
    windows = [g for g in engine.cache.usage().groups if g.usable == 12]
    assert windows and all(group.used == 0 for group in windows)
