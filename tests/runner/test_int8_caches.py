"""INT8 and FP8 caches through the engine: reuse, chunks and preemption change nothing; sizes are
exact.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from firstlight.layers.layer_state import QuantisedKeysValues, QuantisedLatents
from firstlight.runner.cache_tensors import CacheShape, planned_cache_bytes, state_bytes
from local_engine import EngineShape, LocalEngine, fast_kernels, greedy, random_prompts
from tiny_models import tiny_config, write_checkpoint

K3 = Path(__file__).parents[1] / "data" / "k3" / "checkpoint"
TOKENS = 20
PROMPTS = random_prompts(5, 33, 64, 1, 50, 17, below=250)
# Found: 0.013 and 0.076 at most in INT8, 0.048 and 0.23 in FP8.
MOST = {"int8": (0.03, 0.3), "fp8": (0.1, 0.6)}
ROOMY = EngineShape(context_length=128, kv_dtype="int8")
SQUEEZED = EngineShape(
    num_blocks=23,
    block_size=4,
    max_sequences=4,
    max_batch_tokens=16,
    chunk_tokens=7,
    context_length=128,
    num_slots=6,
    kv_dtype="int8",
)


def folder_of(name: str, tmp_path: Path) -> Path:
    if name == "k3":
        return K3
    write_checkpoint(tmp_path, tiny_config(name))
    return tmp_path


CASES = [
    *(("reference", name, "int8") for name in ("qwen3", "qwen2-window", "k3")),
    *(("fast", name, "int8") for name in ("qwen3", "qwen2-window", "k3")),
    ("fast", "qwen3", "fp8"),
]


@pytest.mark.parametrize(("kernels", "name", "kv_dtype"), CASES)
def test_reuse_chunks_and_preemption_change_nothing(
    tmp_path: Path, kernels: str, name: str, kv_dtype: str
) -> None:
    folder, chosen = folder_of(name, tmp_path), fast_kernels() if kernels == "fast" else None
    roomy = LocalEngine(folder, replace(ROOMY, kv_dtype=kv_dtype), chosen)
    want = [roomy.run([prompt], greedy(TOKENS))[0].token_ids for prompt in PROMPTS]
    again = roomy.run(PROMPTS, greedy(TOKENS))
    assert [outcome.token_ids for outcome in again] == want
    assert any(outcome.num_cached for outcome in again)
    tight = replace(SQUEEZED, kv_dtype=kv_dtype)
    squeezed = LocalEngine(folder, tight, chosen, roomy.model)
    assert [one.token_ids for one in squeezed.run(PROMPTS, greedy(TOKENS))] == want
    assert squeezed.scheduler.counts.preemptions > 0


def test_log_probabilities_stay_close_to_those_of_float_caches(tmp_path: Path) -> None:
    """Random weights spread an error more than trained ones do."""
    folder = folder_of("qwen3", tmp_path)
    engine = LocalEngine(folder, replace(ROOMY, kv_dtype="auto"))
    exact = engine.run(PROMPTS, greedy(1, prompt_logprobs=0))
    for kv_dtype, (mean, most) in MOST.items():
        shape = replace(ROOMY, kv_dtype=kv_dtype)
        rough = LocalEngine(folder, shape, model=engine.model).run(
            PROMPTS, greedy(1, prompt_logprobs=0)
        )
        pairs = [
            (one.logprob, other.logprob)
            for before, after in zip(exact, rough, strict=True)
            for one, other in zip(before.prompt_logprobs, after.prompt_logprobs, strict=True)
        ]
        errors = torch.tensor([abs(one - other) for one, other in pairs])
        assert 0 < errors.mean() < mean and errors.max() < most


def test_a_row_that_is_not_finite_fails_alone(tmp_path: Path) -> None:
    engine = LocalEngine(folder_of("qwen3", tmp_path), ROOMY)
    good, bad = PROMPTS[2], PROMPTS[4]
    want = engine.run([good], greedy(TOKENS))[0].token_ids
    poisoned = min(set(range(3, 300)) - {*good, *bad, *want})
    engine.model.embed.weight[poisoned] = float("nan")
    mixed = engine.run([good, [*bad, poisoned, 5]], greedy(TOKENS))
    assert mixed[0].token_ids == want and mixed[1].finish == "error"
    engine.model.embed.weight[poisoned] = 0.1
    assert engine.run([[*bad, poisoned, 5]], greedy(1))[0].num_cached == 0


@pytest.mark.parametrize(("name", "kv_dtype"), [("qwen3", "int8"), ("k3", "int8"), ("k3", "fp8")])
def test_planned_bytes_are_those_allocated(tmp_path: Path, name: str, kv_dtype: str) -> None:
    engine = LocalEngine(folder_of(name, tmp_path), replace(ROOMY, kv_dtype=kv_dtype))
    shape = CacheShape(
        256, 16, 1, torch.float32, torch.device("cpu"), num_slots=33, kv_dtype=kv_dtype
    )
    assert state_bytes(engine.states) == planned_cache_bytes(engine.spec.states, shape)
    kinds = {type(state) for state in engine.states}
    assert kinds & {QuantisedKeysValues, QuantisedLatents}
