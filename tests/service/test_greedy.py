"""Greedy ids of SmolLM2 equal transformers' on 50 prompts, whichever way the service computes them.

The golden file is made by scripts/make_greedy_golden.py. Where the best two tokens lie nearer than
NEAR_TIE the runner-up would be right too, and all after it another text; no token is such a case.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from smollm2_store import smollm2_store

import fetch_smollm2
from firstlight.kernels.builtin import reference_kernels
from live_service import LiveService
from local_engine import EngineShape, LocalEngine, fast_kernels, greedy

GOLDEN = Path(__file__).parents[1] / "data" / "greedy" / "smollm2.json"
# How far transformers' own margins in fp32 lay from those in float64, over all 1200 tokens.
MARGIN_SPREAD = 2.5e-5
NEAR_TIE = 4 * MARGIN_SPREAD
NUM_TOKENS = 24


def num_tight_blocks(cases: Sequence["Case"]) -> int:
    """Blocks of 4 tokens in which all prompts fit at once, with a block more for each.

    Their answers do not: some requests are preempted.
    """
    return 2 + sum(len(case.prompt_ids) // 4 + 2 for case in cases)


class Case(NamedTuple):
    name: str
    prompt_ids: list[int]
    token_ids: list[int]
    margins: list[float]
    runners_up: list[int]


def read_golden() -> tuple[dict[str, Any], list[Case]]:
    data = json.loads(GOLDEN.read_text())
    return data, [Case(**case) for case in data.pop("cases")]


CASES = read_golden()[1]
SOME = CASES[4::7]
SHORT = [case for case in CASES if 30 < len(case.prompt_ids) < 130]
MOST = [*(case for case in CASES if len(case.prompt_ids) > 300), *SHORT]
FEW = SHORT[::4]


def differences(cases: Sequence[Case], answers: Sequence[Sequence[int]]) -> list[str]:
    """Names the first wrong token of each answer."""
    wrong = []
    for case, ids in zip(cases, answers, strict=True):
        assert len(ids) == NUM_TOKENS, case.name
        found = next((i for i in range(NUM_TOKENS) if ids[i] != case.token_ids[i]), None)
        if found is not None and not is_near_tie(case, found, ids[found]):
            wrong.append(f"{case.name}: token {found} is {ids[found]}, not {case.token_ids[found]}")
    return wrong


def is_near_tie(case: Case, index: int, token: int) -> bool:
    return case.margins[index] < NEAR_TIE and token == case.runners_up[index]


def test_the_golden_file_is_of_this_model_and_covers_what_it_should() -> None:
    head, cases = read_golden()
    assert head["weights_sha256"] == fetch_smollm2.GGUF_SHA256
    assert head["num_tokens"] == NUM_TOKENS and head["margin_spread"] <= MARGIN_SPREAD
    lengths = [len(case.prompt_ids) for case in cases]
    assert len(cases) == 50 and min(lengths) == 5 and max(lengths) > 350
    assert len(set(lengths)) > 30 and sum("chat" in case.name for case in cases) == 14
    assert all(len(case.token_ids) == NUM_TOKENS for case in cases)
    # None of 1200 tokens is a near tie: every comparison below is exact.
    assert min(min(case.margins) for case in cases) > NEAR_TIE


@pytest.mark.slow
def test_transformers_still_says_what_the_golden_file_holds(smollm2_gguf: Path) -> None:
    pytest.importorskip("transformers")
    from make_greedy_golden import continue_greedily, load_oracle, prompts

    made = dict(prompts(smollm2_gguf))
    assert [(case.name, case.prompt_ids) for case in CASES] == list(made.items())
    oracle = load_oracle(smollm2_gguf)
    for case in (CASES[3], CASES[-1]):
        answer = continue_greedily(oracle, case.prompt_ids)
        assert answer.token_ids == case.token_ids
        assert answer.margins == pytest.approx(case.margins, abs=NEAR_TIE)


@pytest.fixture(scope="module")
def store(smollm2_gguf: Path) -> Path:
    return smollm2_store(smollm2_gguf)


def serve(store: Path, log: Path, *flags: str) -> Iterator[LiveService]:
    flags = ("--served-model-name", "tiny", "--context", "512", *flags)
    service = LiveService(store, log, *flags)
    try:
        yield service.wait_ready()
        service.terminate()
        assert service.wait_exit() == 0
    finally:
        service.close()


@pytest.fixture(scope="module")
def one_rank(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    yield from serve(store, tmp_path_factory.mktemp("one") / "log")


@pytest.fixture(scope="module")
def three_ranks(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    # A rank holds one of three KV heads: 64 keys and 64 values in fp32, in 30 layers.
    budget = num_tight_blocks(MOST) * 4 * 2 * 64 * 4 * 30
    flags = ("--tp", "3", "--block-size", "4", "--chunk-tokens", "100")
    log = tmp_path_factory.mktemp("three") / "log"
    yield from serve(store, log, *flags, "--kv-budget-bytes", str(budget))


class Answer(NamedTuple):
    token_ids: list[int]
    num_cached: int


def ask_together(service: LiveService, cases: Sequence[Case], *, stream: bool) -> list[Answer]:
    """Asks everything at once and returns the answers in order."""

    async def ask_all() -> list[Answer]:
        async with httpx.AsyncClient(
            base_url=service.url, trust_env=False, timeout=300, limits=httpx.Limits()
        ) as http:
            return await asyncio.gather(*(ask(http, service, c, stream=stream) for c in cases))

    return asyncio.run(ask_all())


async def ask(http: httpx.AsyncClient, service: LiveService, case: Case, *, stream: bool) -> Answer:
    body = service.body(case.prompt_ids, max_tokens=NUM_TOKENS, ignore_eos=True, stream=stream)
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        events = [answer.json()]
    else:
        lines = answer.text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids") or []]
    usage = events[-1]["usage"]
    return Answer(ids, usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.slow
class TestOneRank:
    """One rank with this machine's fastest kernels; the second test finds what the first cached."""

    def test_together_and_streamed_from_an_empty_cache(self, one_rank: LiveService) -> None:
        answers = ask_together(one_rank, CASES, stream=True)
        assert differences(CASES, [a.token_ids for a in answers]) == []
        assert one_rank.metrics()["batch_requests_sum"] > one_rank.metrics()["steps_total"] * 4

    def test_together_and_whole_from_a_full_cache(self, one_rank: LiveService) -> None:
        answers = ask_together(one_rank, CASES, stream=False)
        assert differences(CASES, [a.token_ids for a in answers]) == []
        for case, answer in zip(CASES, answers, strict=True):
            assert answer.num_cached == (len(case.prompt_ids) - 1) // 16 * 16

    @pytest.mark.parametrize("stream", [False, True])
    def test_one_after_another(self, one_rank: LiveService, stream: bool) -> None:
        answers = [ask_together(one_rank, [case], stream=stream)[0] for case in SOME]
        assert differences(SOME, [a.token_ids for a in answers]) == []

    def test_the_kernels_are_the_fast_ones_where_they_are_built(
        self, one_rank: LiveService
    ) -> None:
        kernels = one_rank.get("/startup").json()["facts"]["kernels"]
        assert kernels.splitlines() == list(fast_kernels().describe())


@pytest.mark.slow
def test_three_ranks_in_chunks_and_preempted(three_ranks: LiveService) -> None:
    answers = ask_together(three_ranks, MOST, stream=True)
    assert differences(MOST, [a.token_ids for a in answers]) == []
    assert three_ranks.metrics().get("preemptions_total", 0) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["reference", "fast"])
def test_plain_and_fast_kernels_in_this_process(store: Path, kernels: str) -> None:
    chosen = reference_kernels() if kernels == "reference" else fast_kernels()
    tight = EngineShape(num_tight_blocks(FEW), 4, max_batch_tokens=128, chunk_tokens=48)
    whole, chunked = LocalEngine(store, kernels=chosen), LocalEngine(store, tight, chosen)
    for engine, cases in ((whole, SOME), (chunked, FEW)):
        outcomes = engine.run([case.prompt_ids for case in cases], greedy(NUM_TOKENS))
        assert differences(cases, [outcome.token_ids for outcome in outcomes]) == []
    assert chunked.scheduler.counts.preemptions > 0 == whole.scheduler.counts.preemptions
