"""Each pattern of attention through the engine: reuse, chunks and preemption change nothing; what
covers the whole context is full attention."""

from dataclasses import replace
from pathlib import Path

import pytest

from firstlight.kernels.registry import KernelSet
from local_engine import EngineShape, LocalEngine, fast_kernels, greedy, random_prompts
from tiny_models import tiny_config, write_checkpoint

K3 = Path(__file__).parents[1] / "data" / "k3" / "checkpoint"
TOKENS = 16
PROMPTS = random_prompts(5, 40, 90, 1, 61, below=250)
WINDOW, SPARSE = "window=16,sinks=6", "sparse=8x2,recent=8,sinks=8"
ROOMY = EngineShape(block_size=4, context_length=128, num_blocks=400)
SQUEEZED = replace(
    ROOMY, num_blocks=36, max_sequences=4, max_batch_tokens=16, chunk_tokens=7, num_slots=6
)


def folder_of(name: str, tmp_path: Path) -> Path:
    if name == "k3":
        return K3
    write_checkpoint(tmp_path, tiny_config(name))
    return tmp_path


@pytest.mark.parametrize("name", ["qwen3", "k3"])
@pytest.mark.parametrize("pattern", [WINDOW, SPARSE])
@pytest.mark.parametrize(
    ("kernels", "kv_dtype"),
    [(None, "auto"), (fast_kernels(), "auto"), (fast_kernels(), "int8")],
    ids=["reference", "fast", "fast int8"],
)
def test_reuse_chunks_and_preemption_change_nothing(
    tmp_path: Path, name: str, pattern: str, kernels: KernelSet | None, kv_dtype: str
) -> None:
    folder = folder_of(name, tmp_path)
    roomy = LocalEngine(folder, replace(ROOMY, attention=pattern, kv_dtype=kv_dtype), kernels)
    want = [roomy.run([prompt], greedy(TOKENS))[0].token_ids for prompt in PROMPTS]
    again = roomy.run(PROMPTS, greedy(TOKENS))
    assert [outcome.token_ids for outcome in again] == want
    assert any(outcome.num_cached for outcome in again)
    tight = replace(SQUEEZED, attention=pattern, kv_dtype=kv_dtype, window_blocks={16: 25})
    squeezed = LocalEngine(folder, tight, kernels, roomy.model)
    assert [one.token_ids for one in squeezed.run(PROMPTS, greedy(TOKENS))] == want
    full = LocalEngine(folder, replace(ROOMY, kv_dtype=kv_dtype), kernels, roomy.model)
    assert [one.token_ids for one in full.run(PROMPTS, greedy(TOKENS))] != want


@pytest.mark.parametrize("name", ["qwen3", "k3"])
@pytest.mark.parametrize("pattern", ["window=128,sinks=4", "sparse=8x1,recent=128", "sparse=4x32"])
def test_what_covers_the_context_is_full_attention(tmp_path: Path, name: str, pattern: str) -> None:
    folder = folder_of(name, tmp_path)
    full = LocalEngine(folder, ROOMY, fast_kernels())
    prompts, params = PROMPTS[:3], greedy(8, logprobs=1)
    want = full.run(prompts, params)
    engine = LocalEngine(folder, replace(ROOMY, attention=pattern), fast_kernels(), full.model)
    for one, other in zip(engine.run(prompts, params), want, strict=True):
        assert one.token_ids == other.token_ids
        found, exact = ([t.logprob for t in side.logprobs] for side in (one, other))
        assert found == pytest.approx(exact, abs=1e-4)


def test_only_the_named_layers_follow_a_pattern(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("qwen3"))
    engine = LocalEngine(tmp_path, replace(ROOMY, attention=f"0: {WINDOW}"))
    assert [getattr(state, "window", None) for state in engine.spec.states][:2] == [16, None]
    engine.run(PROMPTS, greedy(4))
    assert len(engine.cache.usage().groups) == 2
