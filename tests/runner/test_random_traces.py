"""The same answers however they are computed: hit and miss, preempted and undisturbed, chunked and
whole, tiered and resident, over random traces, for a Llama and Kimi K3, on one rank and on two.

Greedy and seeded answers are compared token by token, log-probabilities within what products of
other numbers of rows round to: 4e-6 was measured with float caches, 2e-4 with INT8 ones, where a
value may round the other way.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import save_file

from firstlight.models.spec import read_model_spec
from k3_layouts import layout_tensors
from local_engine import Outcome
from random_traces import KV_DTYPES, Played, make_trace, play_seed
from rank_pool import RankPool
from tiny_kimi import wide_config
from tiny_models import tiny_config, write_checkpoint

# Seeds that are played in every run; the thorough ones are others.
USUAL, THOROUGH = (7,), (1, 2, 3, 6, 8)
SPREADS = {"auto": 1e-5, "int8": 1e-3}
# How far INT8 caches move a log-probability, on average and at worst: three times what was measured
# (0.0065 and 0.033, 0.001 and 0.0041). Random weights spread an error more than trained ones do.
INT8_BOUNDS = {"llama": (0.02, 0.1), "k3": (0.003, 0.0125)}


class Case(NamedTuple):
    """What was played: `found` by type of cache, and the scores of the same answers by type."""

    family: str
    seed: int
    found: dict[str, dict[str, Played]]
    scores: dict[str, list[list[Any]]]


def write_model(folder: Path, family: str) -> Path:
    if family == "llama":
        write_checkpoint(folder, tiny_config("llama3", num_hidden_layers=2))
        return folder
    config = wide_config(num_hidden_layers=2)
    config["text_config"]["linear_attn_config"].update(kda_layers=[1], full_attn_layers=[2])
    save_file(layout_tensors(read_model_spec(config)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def play_on_ranks(pool: RankPool, folder: Path, tp: int, seed: int, tiers: str) -> Any:
    """What all ranks found, which is the same."""
    if tp == 1:
        return play_seed(folder, 1, seed, tiers)
    first, *others = pool.group(tp).run(play_seed, folder, tp, seed, tiers, timeout_seconds=300.0)
    for other in others:
        for kind in KV_DTYPES:
            for name, played in first[kind].items():
                assert other[kind][name].outcomes == played.outcomes, (kind, name)
    return first


def usual_and_thorough() -> Iterator[Any]:
    for family in ("llama", "k3"):
        for tp in (1, 2):
            for seed in (*USUAL, *THOROUGH):
                marks = [pytest.mark.thorough] if seed in THOROUGH else []
                name = f"{family}-tp{tp}-seed{seed}"
                yield pytest.param((family, tp, seed), id=name, marks=marks)


@pytest.fixture(scope="module", params=usual_and_thorough())
def case(request: Any, rank_processes: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, tp, seed = request.param
    folder = tmp_path_factory.mktemp(f"{family}-{tp}")
    write_model(folder, family)
    tiers = folder / "tiers"
    found = play_on_ranks(rank_processes, folder, tp, seed, str(tiers))
    assert not list(tiers.iterdir()), "a file of a tier is left"
    scores = found.pop("scores")
    return Case(family, seed, found, scores)


@pytest.fixture(params=KV_DTYPES)
def kind(request: Any) -> str:
    """The type of caches."""
    found: str = request.param
    return found


@pytest.fixture
def played(case: Case, kind: str) -> dict[str, Played]:
    return case.found[kind]


def check_same(outcomes: list[Outcome], wanted: list[Outcome], kind: str) -> None:
    """Whole answers are equal; of those whose client left, what had come is."""
    for number, (one, want) in enumerate(zip(outcomes, wanted, strict=True)):
        count = len(one.token_ids)
        assert one.error is None and one.token_ids == want.token_ids[:count], number
        assert one.finish == "cancelled" or (one.finish, count) == (
            want.finish,
            len(want.token_ids),
        )
        for token, other in zip(one.logprobs, want.logprobs, strict=False):
            assert token.logprob == pytest.approx(other.logprob, abs=SPREADS[kind]), number


def test_a_hit_equals_a_miss(case: Case, kind: str, played: dict[str, Played]) -> None:
    hit, miss = played["hit"], played["undisturbed"]
    assert miss.num_cached == 0 and hit.num_cached > 40
    assert case.family != "k3" or hit.snapshot_hits > 0
    check_same(hit.outcomes, miss.outcomes, kind)


def test_chunked_equals_whole(kind: str, played: dict[str, Played]) -> None:
    chunked, whole = played["chunked"], played["undisturbed"]
    assert chunked.num_steps > whole.num_steps
    check_same(chunked.outcomes, whole.outcomes, kind)


def test_preempted_equals_undisturbed(kind: str, played: dict[str, Played]) -> None:
    preempted = played["preempted"]
    assert preempted.counts.preemptions > 0 and preempted.counts.swaps == 0
    check_same(preempted.outcomes, played["undisturbed"].outcomes, kind)


def test_tiered_equals_resident(kind: str, played: dict[str, Played]) -> None:
    tiered = played["tiered"]
    assert tiered.counts.swaps > 0 and tiered.counts.fetches > 0 and tiered.counts.lost_units == 0
    assert tiered.read["host"] > 0 and tiered.read["disk"] > 0 and tiered.num_cached > 0
    once = played["undisturbed"].outcomes
    check_same(tiered.outcomes, [*once, *once, *played["long"].outcomes], kind)


def test_clients_leave_and_others_never_notice(played: dict[str, Played]) -> None:
    left = [one for one in played["tiered"].outcomes if one.finish == "cancelled"]
    assert left and all(one.finish for one in played["tiered"].outcomes)


def test_int8_is_within_its_bound(case: Case) -> None:
    """The log-probability of each token that float caches answered, and of the likeliest there."""
    pairs = [
        (exact.logprob, rough.logprob)
        for one, other in zip(case.scores["auto"], case.scores["int8"], strict=True)
        for exact, rough in zip(one, other, strict=True)
    ]
    apart = [abs(exact - rough) for exact, rough in pairs]
    assert len(apart) > 40
    mean, worst = INT8_BOUNDS[case.family]
    assert 0 < sum(apart) / len(apart) <= mean and max(apart) <= worst


def test_what_is_decoded_is_what_is_read_at_once(case: Case) -> None:
    arrivals, answered = make_trace(case.seed).arrivals, case.found["auto"]["undisturbed"].outcomes
    for one, outcome, scores in zip(arrivals, answered, case.scores["auto"], strict=True):
        for token, score in zip(outcome.logprobs, scores, strict=True):
            assert token.token_id == score.token_id
            assert token.logprob == pytest.approx(score.logprob, abs=SPREADS["auto"])
            # Of two that are as likely as each other either may be taken.
            assert one.params.temperature > 0 or score.top[0][1] - score.logprob <= SPREADS["auto"]
