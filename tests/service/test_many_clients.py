"""Two hundred clients at once, some of whom leave: afterwards nothing is held and all adds up."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

NUM_CLIENTS = 200
SQUEEZED = ("--max-sequences", "16", "--chunk-tokens", "64", "--max-batch-tokens", "256")


def request_of(index: int, rng: random.Random) -> dict[str, Any]:
    """A request of mixed length and form; token ids, so that every client differs."""
    length = rng.choice([3, 20, 60, 200])
    return {
        "model": "tiny",
        "prompt": [rng.randrange(3, 300) for _ in range(length)],
        "max_tokens": rng.choice([1, 10, 40]),
        "n": rng.choice([1, 1, 1, 3]),
        "temperature": rng.choice([0, 1]),
        "seed": index,
        "stream": rng.random() < 0.6,
        "ignore_eos": True,
    }


async def one_client(http: httpx.AsyncClient, index: int) -> str:
    """Asks, and either reads to the end or leaves in the queue, while waiting or while reading."""
    rng = random.Random(index)
    body = request_of(index, rng)
    leaves_after = rng.choice([None, None, 0.0, 0.05, 0.5, 2.0])
    await asyncio.sleep(rng.random() * 0.5)
    try:
        return await asyncio.wait_for(read_all(http, body), leaves_after)
    except asyncio.TimeoutError:
        return "left"


async def read_all(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        text = (await answer.aread()).decode()
    assert answer.status_code == 200, text
    if not body["stream"]:
        choices = json.loads(text)["choices"]
        assert [c["finish_reason"] for c in choices] == ["length"] * body["n"]
        return "whole"
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    ends = [e["choices"][0]["finish_reason"] for e in events]
    assert sum(end == "length" for end in ends) == body["n"] and "[DONE]" in text
    return "whole"


@pytest.mark.slow
def test_after_many_clients_nothing_is_held(tiny_store: Path, start_service: Any) -> None:
    service = start_service(tiny_store, "--tp", "2", *SQUEEZED).wait_ready()

    async def all_clients() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=service.url, trust_env=False, timeout=120, limits=limits
        ) as http:
            return await asyncio.gather(*(one_client(http, i) for i in range(NUM_CLIENTS)))

    ends = asyncio.run(all_clients())
    assert ends.count("left") > 20 and ends.count("whole") > 60
    service.wait_for(lambda: holds_nothing(service.metrics()), 10, "idle")
    metrics = service.metrics()
    outcomes = {k: v for k, v in metrics.items() if k.startswith("requests_total{")}
    assert sum(outcomes.values()) == metrics["requests_received_total"] >= NUM_CLIENTS * 0.6
    assert outcomes['requests_total{outcome="length"}'] >= ends.count("whole")
    assert outcomes['requests_total{outcome="cancelled"}'] > 0
    assert set(outcomes) <= {f'requests_total{{outcome="{o}"}}' for o in ("length", "cancelled")}
    assert metrics["queue_seconds_count"] <= metrics["requests_received_total"]
    assert 0 <= metrics["prefix_hit_ratio"] <= 1
    again = [service.complete([9, 8, 7], max_tokens=8).json() for _ in range(2)]
    assert again[0]["choices"] == again[1]["choices"]
    service.terminate()
    assert service.wait_exit() == 0


def holds_nothing(metrics: dict[str, float]) -> bool:
    gauges = ("running_requests", "waiting_requests", "requests_in_flight")
    used = metrics['cache_used_bytes{pool="kv"}']
    return not any(metrics[name] for name in gauges) and used == 0


def test_a_cancelled_last_request_leaves_the_gauges_at_zero(shared_service: Any) -> None:
    stream = shared_service.stream([5, 6, 7], max_tokens=4000, ignore_eos=True)
    next(stream)
    shared_service.wait_for(lambda: shared_service.metrics()["running_requests"] == 1, 5, "running")
    stream.close()
    shared_service.wait_for(lambda: holds_nothing(shared_service.metrics()), 5, "idle")
