"""A sequence several times longer than the device: tokens, recurrent state and cached rows are
those of a device that holds everything, whether all of it is read or chosen blocks.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firstlight.cache.far_pool import FarSizes
from local_engine import EngineShape, LocalEngine, fast_kernels, greedy, random_prompts
from state_digests import state_digests

K3 = Path(__file__).parents[1] / "data" / "k3" / "checkpoint"
[PROMPT] = random_prompts(1300, below=250)
WHOLE = EngineShape(
    num_blocks=30,
    block_size=64,
    max_sequences=2,
    max_batch_tokens=256,
    chunk_tokens=256,
    context_length=2048,
    num_slots=5,
)


def run(engine: LocalEngine) -> tuple[list[int], list[Any], dict[str, str]]:
    """Tokens, log-probabilities, and the digests of the state behind the prompt."""
    name = engine.submit(PROMPT, greedy(5, logprobs=20))
    while not engine.outcomes[name].token_ids:
        engine.step()
    digests = state_digests(engine, name)
    while engine.step():
        engine.scheduler.check_integrity()
    outcome = engine.outcomes[name]
    assert outcome.error is None
    return outcome.token_ids, outcome.logprobs, digests


@pytest.mark.parametrize("attention", ["full", "sparse=64x4,recent=64"])
def test_states_are_those_of_a_device_that_holds_everything(attention: str, tmp_path: Path) -> None:
    shape = replace(WHOLE, attention=attention)
    resident = LocalEngine(K3, shape, fast_kernels())
    far = (FarSizes(3, 30),) * len({state.group for state in resident.states})
    small = replace(shape, num_blocks=10, far=far, tier_folder=str(tmp_path))
    tiered = LocalEngine(K3, small, fast_kernels(), resident.model)
    assert run(tiered) == run(resident)
    assert tiered.scheduler.counts.lost_units == 0
    tiered.tiers.close()
