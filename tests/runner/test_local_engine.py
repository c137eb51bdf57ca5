"""Slow equals fast: cached, chunked, batched and preempted runs against the plain model."""

import pytest
import torch

from firstlight.layers.packed_batch import pack_whole
from firstlight.schedule.request import SamplingParams
from local_engine import EngineShape, LocalEngine, greedy, plain_greedy, random_prompts
from tiny_models import CONFIGS, tiny_config, write_checkpoint

TOKENS = 20
PROMPTS = random_prompts(5, 33, 64, 1, 90, 17)
# Room for little more than the longest sequence, in small blocks: requests are preempted.
SQUEEZED = EngineShape(
    num_blocks=34, block_size=4, max_batch_tokens=16, chunk_tokens=7, window_blocks={16: 13}
)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(path, tiny_config(request.param))
    return path


def tokens(outcomes):
    return [outcome.token_ids for outcome in outcomes]


def test_cached_chunked_and_preempted_runs_equal_the_plain_one(folder):
    whole = LocalEngine(folder)
    want = [plain_greedy(whole.model, prompt, TOKENS) for prompt in PROMPTS]
    assert tokens(whole.run(PROMPTS, greedy(TOKENS))) == want
    assert tokens(whole.run(PROMPTS, greedy(TOKENS))) == want  # prefix hits
    squeezed = LocalEngine(folder, SQUEEZED)
    assert tokens(squeezed.run(PROMPTS, greedy(TOKENS))) == want
    # Layers with a window are admitted at its size and never run out.
    bounded = all(getattr(state, "window", None) for state in squeezed.spec.states)
    assert squeezed.scheduler.counts.preemptions > 0 or bounded


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("one")
    write_checkpoint(path, tiny_config("qwen3"))
    return path


def test_a_seeded_draw_survives_batching_and_preemption(tiny):
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=11, top_p=0.95)
    engine = LocalEngine(tiny)
    alone = [tokens(engine.run([prompt], params))[0] for prompt in PROMPTS]
    squeezed = LocalEngine(tiny, SQUEEZED)
    assert tokens(squeezed.run(PROMPTS, params)) == alone


def test_prompt_logprobs_are_those_of_the_plain_model(tiny):
    engine = LocalEngine(tiny, EngineShape(chunk_tokens=13, max_batch_tokens=32))
    prompt = PROMPTS[4]
    outcome = engine.run([prompt], greedy(1, prompt_logprobs=2))[0]
    with torch.inference_mode():
        carry = engine.model(torch.tensor(prompt), pack_whole([len(prompt)]))
        plain = torch.log_softmax(engine.model.head(carry), -1)
    assert [t.token_id for t in outcome.prompt_logprobs] == prompt[1:]
    for position, entry in enumerate(outcome.prompt_logprobs):
        want = plain[position, prompt[position + 1]].item()
        assert entry.logprob == pytest.approx(want, abs=1e-4)
        assert len(entry.top) == 2


def test_a_row_that_is_not_finite_fails_alone_and_is_not_reused(tiny):
    engine = LocalEngine(tiny)
    good, bad = PROMPTS[2], PROMPTS[4]
    want = tokens(engine.run([good], greedy(TOKENS)))[0]
    poisoned = min(set(range(3, 300)) - {*good, *bad, *want})
    engine.model.embed.weight[poisoned] = float("nan")
    mixed = engine.run([good, [*bad, poisoned, 5]], greedy(TOKENS))
    assert mixed[0].token_ids == want and mixed[0].error is None
    assert mixed[1].finish == "error" and "not finite" in mixed[1].error
    engine.model.embed.weight[poisoned] = 0.1
    assert engine.run([[*bad, poisoned, 5]], greedy(1))[0].num_cached == 0


def test_slots_never_written_are_never_read(tiny):
    """Fresh caches hold whatever memory held; even NaN there must not reach a result."""
    engine = LocalEngine(tiny)
    want = tokens(engine.run(PROMPTS, greedy(TOKENS)))
    dirty = LocalEngine(tiny)
    for state in dirty.states:
        state.keys_PKSH.fill_(float("nan"))
        state.values_PKSH.fill_(float("nan"))
    assert tokens(dirty.run(PROMPTS, greedy(TOKENS))) == want
