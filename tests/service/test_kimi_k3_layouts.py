"""One store of Kimi K3 in every layout: the prompt's log-probabilities and the answer agree with
those without a cache.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from firstlight.adapt.shard import shard
from firstlight.layers.packed_batch import pack_whole
from firstlight.parallel.mesh import Mesh
from firstlight.sharding.layout import Layout
from k3_layouts import write_layout_miniature
from k3_oracle import load_model
from live_service import LiveService
from local_engine import EngineShape, LocalEngine, fast_kernels, greedy, plain_greedy

LAYOUTS = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
ANSWER_TOKENS = 8
# Twice what float32 and float64 differ by on one rank, for log-probabilities (test_kimi_layouts).
LIMIT = 2.4e-4


@pytest.fixture(scope="module")
def store(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    write_layout_miniature(folder / "published")
    shard(folder / "published", folder / "store")
    return folder / "store"


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    generator = torch.Generator().manual_seed(11)
    ids: list[int] = torch.randint(0, 380, (90,), generator=generator).tolist()
    return ids


@pytest.fixture(scope="module")
def expected(store: Path, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """The greedy answer and the log-probability of every token after the first, without a cache."""
    module = load_model(store)
    answer = plain_greedy(module, prompt, ANSWER_TOKENS)
    ids = [*prompt, *answer]
    with torch.inference_mode():
        logits_TV = module.head(module(torch.tensor(ids), pack_whole([len(ids)])))
    table_TV = logits_TV.log_softmax(-1)[:-1]
    return answer, table_TV.gather(1, torch.tensor(ids)[1:, None]).squeeze(1)


Served = tuple[list[int], torch.Tensor]


def served_on_rank(store: Path, prompt: list[int], layout: Layout) -> Served:
    """What one rank's engine answers and gives for the prompt's tokens after the first."""
    mesh = Mesh(layout.place(dist.get_rank()), dist.group.WORLD)
    engine = LocalEngine(store, EngineShape(chunk_tokens=64), fast_kernels(), mesh=mesh)
    params = greedy(ANSWER_TOKENS, logprobs=0, prompt_logprobs=0)
    outcome = engine.run([prompt], params)[0]
    scores = [one.logprob for one in [*outcome.prompt_logprobs, *outcome.logprobs]]
    return outcome.token_ids, torch.tensor(scores)


@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
def test_the_engine_of_every_layout_answers_the_same(
    store: Path, prompt: list[int], expected: Served, ranks: Any, tp: int, ep: int
) -> None:
    answer, logprobs = expected
    for ids, found in ranks(tp).run(served_on_rank, store, prompt, Layout(tp=tp, ep=ep)):
        assert ids == answer
        assert (found - logprobs).abs().max() <= LIMIT


@pytest.mark.slow
def test_a_service_whose_experts_are_split_answers_the_same(
    store: Path, prompt: list[int], expected: Served, tmp_path: Path
) -> None:
    flags = ("--tp", "2", "--ep", "2", "--threads", "1", "--chunk-tokens", "64")
    service = LiveService(
        store, tmp_path / "log", "--served-model-name", "tiny", "--kv-budget-bytes", "64MiB", *flags
    )
    try:
        service.wait_ready()
        answer = service.complete(
            prompt,
            max_tokens=ANSWER_TOKENS,
            echo=True,
            logprobs=1,
            return_token_ids=True,
            ignore_eos=True,
        ).json()
    finally:
        service.close()
    assert "choices" in answer, answer
    choice = answer["choices"][0]
    ids, logprobs = expected
    assert choice["token_ids"] == ids
    found = torch.tensor(choice["logprobs"]["token_logprobs"][1:])
    assert (found - logprobs).abs().max() <= LIMIT
