"""Recurrent state through the engine: resumed, chunked and preempted runs against the plain model.

The miniature Kimi K3 keeps delta-rule matrices, convolution inputs and latent pages.
"""

from pathlib import Path

import pytest
import torch

from firstlight.layers.layer_state import RecurrentSlots
from local_engine import EngineShape, LocalEngine, greedy, plain_greedy, random_prompts

CHECKPOINT = Path(__file__).parents[1] / "data" / "k3" / "checkpoint"
TOKENS = 8
PROMPTS = random_prompts(5, 49, 22, 21, 20, 1, below=250)
SQUEEZED = EngineShape(
    num_blocks=18,
    block_size=4,
    max_sequences=4,
    max_batch_tokens=16,
    chunk_tokens=7,
    context_length=128,
    num_slots=5,
)


def tokens(outcomes):
    return [outcome.token_ids for outcome in outcomes]


@pytest.fixture(scope="module")
def engine():
    return LocalEngine(CHECKPOINT, EngineShape(context_length=128))


@pytest.fixture(scope="module")
def want(engine):
    """Greedy decoding by running the whole sequence anew for each token, without a cache."""
    return [plain_greedy(engine.model, prompt, TOKENS) for prompt in PROMPTS]


def test_a_hit_equals_a_miss(engine, want):
    assert tokens(engine.run(PROMPTS, greedy(TOKENS))) == want
    again = engine.run(PROMPTS, greedy(TOKENS))
    assert tokens(again) == want
    assert [outcome.num_cached for outcome in again] == [0, 48, 16, 16, 16, 0]
    assert engine.cache.usage().slots.hits == 4


def test_a_conversation_resumes_where_its_prompt_ended(engine, want):
    first = PROMPTS[1]
    engine.run([first], greedy(1))
    longer = [*first, *want[1], 7, 8, 9]
    resumed = engine.run([longer], greedy(4))[0]
    assert resumed.token_ids[:1] == plain_greedy(engine.model, longer, 1)
    assert resumed.num_cached == 48


def test_chunked_and_preempted_runs_equal_undisturbed_ones(engine, want):
    squeezed = LocalEngine(CHECKPOINT, SQUEEZED)
    assert tokens(squeezed.run(PROMPTS, greedy(TOKENS))) == want
    pair = PROMPTS[2:4]
    undisturbed = [tokens(engine.run([prompt], greedy(20)))[0] for prompt in pair]
    assert tokens(squeezed.run(pair, greedy(20))) == undisturbed
    usage = squeezed.cache.usage().slots
    assert squeezed.scheduler.counts.preemptions > 0 and usage.hits > 0 and usage.evictions > 0


def test_what_slots_held_before_is_never_read(want):
    dirty = LocalEngine(CHECKPOINT, EngineShape(context_length=128))
    for state in dirty.states:
        for tensor in vars(state).values():
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(float("nan"))
    assert any(isinstance(state, RecurrentSlots) for state in dirty.states)
    assert tokens(dirty.run(PROMPTS, greedy(TOKENS))) == want
