"""Tests of what operators rely on: health, keys, ids, logs, metrics, overload, failures."""

import logging
import socket
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from firstlight.checkpoint.damage import Damage
from firstlight.engine.messages import Phase, WeightsReloaded
from firstlight.errors import EnvironmentProblem
from firstlight.server.app import create_app
from firstlight.server.listener import bind_socket

CHAT = "/v1/chat/completions"
READY = "firstlight_ready"
BODY: Any = {"model": "small", "messages": [{"role": "user", "content": "a secret word"}]}


def test_health_follows_progress_and_not_duration(start_server: Any) -> None:
    server = start_server(limits={"stall_seconds": 3.0, "loading_stall_seconds": 50.0})
    engine = server.engine
    assert server.get("/health").json()["healthy"] is True
    engine.status = msgspec.structs.replace(engine.status, busy=True)
    engine.stalled_seconds = 4.0
    answer = server.get("/health")
    assert answer.status_code == 503 and "no progress for 4.0 s" in answer.json()["problem"]
    engine.status = msgspec.structs.replace(engine.status, ready=False)  # the same while loading
    assert server.get("/health").status_code == 200
    engine.stalled_seconds = 51.0
    assert server.get("/health").status_code == 503


def test_an_engine_that_is_not_healthy_is_not_ready(start_server: Any) -> None:
    server = start_server(limits={"stall_seconds": 3.0})
    engine = server.engine
    assert server.get("/ready").status_code == 200
    engine.status = msgspec.structs.replace(engine.status, busy=True)
    engine.stalled_seconds = 4.0
    hung = server.get("/ready")
    assert hung.status_code == 503 and "no progress for 4.0 s" in hung.json()["failure"]
    assert " 0.0" in next(
        line for line in server.get("/metrics").text.splitlines() if line.startswith(READY)
    )
    engine.stalled_seconds, engine.status_age_seconds = 0.0, 6.0
    assert server.get("/ready").status_code == 503


async def test_an_engine_that_failed_is_not_ready(make_server: Any) -> None:
    """Asked without a server, which ends itself as soon as it hears of the failure."""
    context, engine = (one := make_server()).context, one.engine
    engine.status = msgspec.structs.replace(engine.status, failure="rank 0 is gone")
    transport = httpx.ASGITransport(app=create_app(context))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        answer = await client.get("/ready")
    assert answer.status_code == 503 and answer.json()["failure"] == "rank 0 is gone"


def test_damaged_weights_are_unhealthy_and_named(start_server: Any) -> None:
    server = start_server()
    why = "weights in memory are no longer those that were loaded: rank 1: layer-002, w, granule 3"
    server.engine.status = msgspec.structs.replace(server.engine.status, unhealthy=why)
    health, ready = server.get("/health"), server.get("/ready")
    assert health.status_code == 503 and health.json()["problem"] == why
    assert ready.status_code == 503 and ready.json()["failure"] == why
    refused = server.post(CHAT, BODY)
    assert refused.status_code == 503 and refused.json()["error"]["message"] == why
    server.engine.damages = [Damage(1, "layer-002", "w", None, 3)]
    found = server.post("/weights/check", None)  # may be asked, and repaired
    assert found.status_code == 200 and found.json()["intact"] is False
    assert found.json()["ranks"][1]["damages"][0]["unit"] == "layer-002"
    assert server.post("/weights/reload", {}).json()["source_digest"] == "v2"


def test_a_reload_says_what_went_wrong(start_server: Any) -> None:
    server = start_server(api_keys=("secret",))
    engine, key = server.engine, {"Authorization": "Bearer secret"}
    assert server.post("/weights/reload", {"source": "x"}).status_code == 401
    assert server.post("/weights/check", {}).status_code == 401
    assert engine.reloaded_from == []
    for refusal, problem, status in (
        ("bad_source", "x: no such file", 400),
        ("reloading", "already", 409),
        ("draining", "shutting down", 503),
        ("", "rank 0: damaged", 500),
    ):
        engine.reload_answer = WeightsReloaded("r", problem=problem, refusal=refusal)
        answer = server.post("/weights/reload", {"source": "x"}, **key)
        assert answer.status_code == status and answer.json()["error"]["message"] == problem
    open_server = start_server()
    refused = open_server.post("/weights/reload", {"source": "x"})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "key_needed"
    assert open_server.engine.reloaded_from == []


def test_health_needs_a_fresh_heartbeat(start_server: Any) -> None:
    server = start_server()
    server.engine.status_age_seconds = 5.5
    answer = server.get("/health")
    assert answer.status_code == 503 and "heartbeat is 5.5 s old" in answer.json()["problem"]
    server.engine.status = None  # not yet reported: given a minute
    assert server.get("/health").status_code == 200
    server.engine.status_age_seconds = 61.0
    assert server.get("/health").status_code == 503


def test_not_ready_says_which_phase_runs(start_server: Any) -> None:
    server = start_server()
    phases = [
        Phase("start", 0.0, None),
        Phase("load weights", 1.0, None, "40 of 90 units", "start"),
    ]
    status = msgspec.structs.replace(server.engine.status, ready=False, phases=phases)
    server.engine.status = status
    ready = server.get("/ready")
    assert ready.status_code == 503
    assert (ready.json()["phase"], ready.json()["detail"]) == ("load weights", "40 of 90 units")
    answer = server.post(CHAT, BODY)
    assert answer.status_code == 503 and "load weights" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"
    assert server.get("/startup").json()["phases"][1]["ended"] is None
    assert server.post("/tokenize", {"text": "x"}).status_code == 200  # needs no engine


def test_ready_and_startup_once_it_serves(server: Any) -> None:
    assert server.get("/ready").json() == {
        "ready": True,
        "draining": False,
        "phase": None,
        "detail": None,
        "progress": 7,
        "failure": None,
    }
    found = server.get("/startup").json()
    assert found["facts"] == {"device": "cpu"} and found["phases"][0]["name"] == "load weights"


def test_a_full_queue_is_429_with_a_time(start_server: Any) -> None:
    server = start_server(engine={"max_live": 2}, limits={"retry_after_seconds": 7})
    for stream in (False, True):
        answer = server.post(CHAT, {**BODY, "n": 3, "stream": stream})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
        assert answer.json()["error"]["code"] == "queue_full"
    server.engine.wait_until_idle()
    assert server.post(CHAT, {**BODY, "n": 2}).status_code == 200


def test_an_engine_that_is_gone_is_503(start_server: Any) -> None:
    server = start_server()
    server.engine.gone = True
    answer = server.post(CHAT, {**BODY, "stream": True})
    assert answer.status_code == 503 and "restart the service" in answer.json()["error"]["message"]


def test_numbers_that_are_not_finite_fail_the_request_visibly(start_server: Any) -> None:
    server = start_server()
    server.engine.failed_ids = {70}
    for stream in (False, True):
        body = {"model": "small", "prompt": [[60], [70]], "stream": stream}
        answer = server.post("/v1/completions", body)
        message = "not finite logits"
        assert message in answer.text
        assert answer.status_code == 500 or '"error"' in answer.text
    server.engine.wait_until_idle()


def test_keys_are_needed_where_they_should_be(start_server: Any) -> None:
    server = start_server(api_keys=("right", "also"), open_paths=frozenset({"/health"}))
    assert server.get("/health").status_code == 200
    assert server.get("/metrics").status_code == 401
    for header in ("", "Bearer wrong", "right", "Basic right", "Bearer right x"):
        answer = server.post(CHAT, BODY, authorization=header)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for header in ("Bearer right", "bearer also"):
        assert server.post(CHAT, BODY, authorization=header).status_code == 200
    assert server.engine.num_finished == 2


def test_request_ids_are_kept_when_plain_and_made_otherwise(server: Any) -> None:
    kept = server.get("/version", **{"x-request-id": "abc-1"})
    assert kept.headers["x-request-id"] == "abc-1"
    made = server.get("/version", **{"x-request-id": "a b\tc"})
    assert made.headers["x-request-id"].startswith("req-")
    twice = [server.post(CHAT, BODY, **{"x-request-id": "same"}).json()["id"] for _ in range(2)]
    assert twice[0] != twice[1]


def test_log_lines_have_the_id_and_no_prompt(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server.post(CHAT, BODY, **{"x-request-id": "traced-7"})
    server.post(CHAT, {**BODY, "temperature": "a secret word"})
    own = [r.getMessage() for r in caplog.records if not r.name.startswith("http")]
    line = next(text for text in own if text.startswith("traced-7"))
    assert "POST /v1/chat/completions 200" in line and "tokens" in line
    assert "secret" not in "".join(own)


def test_metrics_count_what_happened_in_both_processes(start_server: Any) -> None:
    server = start_server()
    server.post(CHAT, {**BODY, "n": 2})
    server.post(CHAT, {**BODY, "max_tokens": 1, "stream": True})
    server.post(CHAT, {**BODY, "model": "other"})
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    seen = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert seen["firstlight_requests_total", "stop"] == 2
    assert seen["firstlight_requests_total", "length"] == 1
    assert seen["firstlight_requests_received_total",] == 3
    assert seen["firstlight_requests_in_flight",] == 0
    assert seen["firstlight_ttft_seconds_count",] == 3
    assert seen["firstlight_http_answers_total", CHAT, "404"] == 1
    generated = 2 * (len(server.engine.reply_ids) + 1) + 1
    assert seen["firstlight_generated_tokens_total",] == generated
    assert seen["firstlight_steps_total",] == 3  # from the engine's heartbeat
    assert seen["firstlight_cache_used_bytes", "kv"] == 10
    assert seen["firstlight_process_resident_bytes", "api"] > 1 << 20


def test_version(server: Any) -> None:
    assert server.get("/version").json()["version"] == server.context.version


def test_tokens_that_arrive_together_make_one_event(start_server: Any) -> None:
    server = start_server(engine={"tokens_per_output": 1000})
    answer = server.post(CHAT, {**BODY, "stream": True})
    events = [line for line in answer.text.split("\n\n") if line]
    assert len(events) == 4 and events[-1] == "data: [DONE]"  # role, text, finish
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"


def test_a_long_prefill_keeps_the_connection_alive(start_server: Any) -> None:
    server = start_server(engine={"prefill_seconds": 0.5}, limits={"keepalive_seconds": 0.1})
    text = server.post(CHAT, {**BODY, "stream": True}).text
    assert text.startswith(": still working\n\n") and text.endswith("data: [DONE]\n\n")


def test_a_slow_header_is_cut_off(start_server: Any) -> None:
    server = start_server(limits={"header_seconds": 0.2})
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        assert connection.recv(100) == b""


def test_a_slow_body_is_408(start_server: Any) -> None:
    server = start_server(limits={"body_seconds": 0.2})
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_a_taken_port_is_told_before_anything_starts() -> None:
    with bind_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"port {port} on 127.0.0.1 is in use"):
            bind_socket("127.0.0.1", port)
    with pytest.raises(EnvironmentProblem, match="is no address of this machine"):
        bind_socket("no.such.host.invalid", 80)


def test_an_engine_failure_ends_the_server_with_its_code(start_server: Any) -> None:
    server = start_server()
    failed = msgspec.structs.replace(server.engine.status, failure="rank 3 is gone", exit_code=4)
    server.engine.status = failed
    assert server.join() == 4 and server.engine.closed


def test_a_refusal_because_the_engine_drains_is_503(start_server: Any) -> None:
    server = start_server(engine={"refuse_with": "draining"})
    answer = server.post(CHAT, BODY)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
