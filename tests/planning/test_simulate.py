"""Engines whose every step takes a second, and clients whose requests take time to read."""

from dataclasses import replace
from math import inf

import pytest

from firstlight.planning.arrangement import Arrangement
from firstlight.planning.constants import EXPECTED
from firstlight.planning.cost import CostModel
from firstlight.planning.rates import Rates
from firstlight.planning.simulate import simulate
from firstlight.planning.work import model_work
from firstlight.planning.workload import PlanRules, Workload
from firstlight.sharding.layout import Layout

RULES = PlanRules(chunk_tokens=40, max_batch_tokens=80, block_size=16)


def served(spec, prompt, output, sequences, **constants):
    """What clients see where nothing takes time but what is said."""
    nothing = {"kernel": 0.0, "link": 0.0, "network": 0.0, "host": 1.0}
    rates = {name: inf for name in ("memory", "matrix", "narrow", "link", "network")}
    known = replace(EXPECTED, **{**nothing, **constants})
    machine = Rates(constants=known, island=1, measured=True, **rates)
    model = CostModel(model_work(spec, "float32"), Arrangement(Layout()), machine, 4)
    load = Workload(context=4096, concurrency=sequences, input_tokens=prompt, output_tokens=output)
    return simulate(model, sequences, load, RULES)


def test_a_prompt_takes_a_step_for_each_chunk_and_an_answer_one_for_each_token(dense):
    found = served(dense, 100, 10, 1)
    assert (found.ttft, found.tpot) == (3.0, 1.0)


def test_a_prompt_whose_state_is_kept_ends_a_step_at_its_last_whole_block(mini):
    assert served(mini, 100, 10, 1).ttft == 4.0  # 40, 40, 16 and 4 tokens
    assert served(mini, 97, 10, 1).ttft == 4.0  # 40, 40, 16 and 1


def test_prompts_share_the_tokens_of_a_step(dense):
    """Three prompts of 40 tokens, 80 in a step: two answer after one step, the third after two."""
    assert served(dense, 40, 5, 3, request=0.0).ttft == pytest.approx(1.0)
    assert served(dense, 80, 400, 3, request=0.0).ttft == pytest.approx(3.0, abs=1.0)


def test_requests_are_read_one_after_the_other(dense):
    alone, both = (served(dense, 16, 5, n, request=10.0, host=0.001) for n in (1, 2))
    assert alone.ttft == pytest.approx(10, abs=0.1)
    assert 10 < both.ttft < 20.1


def test_each_sequence_of_a_step_adds_to_it(dense):
    assert served(dense, 16, 50, 4, sequence=0.5).tpot == pytest.approx(1 + 4 * 0.5, rel=0.1)
