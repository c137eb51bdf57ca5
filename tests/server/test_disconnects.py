"""Tests that whatever clients do, and however the server ends, nothing stays in the engine."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "hello"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "small", "messages": MESSAGES, **fields}


@pytest.mark.parametrize("fields", [{}, {"n": 5}, {"stream": True}, {"stream": True, "n": 3}])
@pytest.mark.parametrize("engine", [{"prefill_seconds": 30}, {"step_seconds": 0.02}])
def test_a_client_that_goes_away_frees_everything(
    start_server: Any, engine: Any, fields: Any
) -> None:
    server = start_server(engine=engine)
    content = json.dumps(body(ignore_eos=True, **fields)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    count = fields.get("n", 1)
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head.encode() + content)
        while len(server.engine.live) < count:
            time.sleep(0.005)
        if "stream" in fields and "step_seconds" in engine:
            assert b"200 OK" in connection.recv(1000)
    server.engine.wait_until_idle()
    assert server.engine.num_cancelled == count
    flat = server.context.read_series()
    assert flat["requests_in_flight"] == 0 and flat["requests_total/cancelled"] == count


def test_200_clients_that_come_and_go_leave_nothing(start_server: Any) -> None:
    server = start_server(engine={"step_seconds": 0.005, "prefill_seconds": 0.01})
    chance = random.Random(7)

    async def one(client: httpx.AsyncClient) -> str:
        fields: dict[str, Any] = {"stream": chance.random() < 0.7, "n": chance.choice([1, 1, 1, 3])}
        if chance.random() < 0.3:
            fields["stop"] = "France"
        patience = chance.choice([0.02, 0.3, 60.0])
        try:
            async with client.stream("POST", CHAT, json=body(**fields), timeout=60) as answer:
                assert answer.status_code == 200

                async def read() -> None:
                    async for _ in answer.aiter_bytes():
                        pass

                await asyncio.wait_for(read(), patience)
                return "whole"
        except asyncio.TimeoutError:
            return "left"

    async def everyone() -> list[str]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(
            base_url=server.url, trust_env=False, limits=limits, timeout=60
        ) as client:
            return await asyncio.gather(*(one(client) for _ in range(200)))

    found = asyncio.run(everyone())
    assert found.count("whole") > 30 and found.count("left") > 30
    server.engine.wait_until_idle()
    engine, flat = server.engine, server.context.read_series()
    assert engine.num_finished + engine.num_cancelled == len(engine.submitted)
    assert flat["requests_in_flight"] == 0
    ended = sum(count for name, count in flat.items() if name.startswith("requests_total/"))
    assert ended == flat["requests_received_total"] >= len(engine.submitted)
    assert server.post(CHAT, body()).status_code == 200


def test_a_drain_finishes_what_runs_and_refuses_what_is_new(start_server: Any) -> None:
    server = start_server(engine={"step_seconds": 0.03}, limits={"drain_seconds": 10.0})
    found: list[httpx.Response] = []
    running = threading.Thread(target=lambda: found.append(server.post(CHAT, body(stream=True))))
    running.start()
    while not server.engine.live:
        time.sleep(0.01)
    server.ask_to_end()
    refused = server.post(CHAT, body())
    while refused.status_code == 200:
        refused = server.post(CHAT, body())
    assert refused.json()["error"]["code"] == "shutting_down"
    assert server.get("/ready").json()["draining"] is True
    assert server.get("/health").status_code == 200
    running.join()
    assert found[0].text.endswith("data: [DONE]\n\n") and '"error"' not in found[0].text
    assert server.join() == 0 and server.engine.drained and server.engine.closed


@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_out_of_time_ends_requests_with_an_error(start_server: Any, stream: bool) -> None:
    server = start_server(engine={"step_seconds": 0.1}, limits={"drain_seconds": 0.3})
    found: list[httpx.Response] = []
    running = threading.Thread(target=lambda: found.append(server.post(CHAT, body(stream=stream))))
    running.start()
    while not server.engine.live:
        time.sleep(0.01)
    time.sleep(0.2)
    server.ask_to_end()
    assert server.join() == 0
    running.join()
    assert found[0].status_code == (200 if stream else 503)
    assert "shutting_down" in found[0].text
    assert server.engine.num_cancelled == 1 and not server.engine.live


def test_sigterm_drains_a_real_process(model_folder: Path) -> None:
    script = Path(__file__).with_name("serve_child.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, str(script), str(model_folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        with (
            httpx.Client(base_url=url, trust_env=False, timeout=20) as client,
            client.stream("POST", CHAT, json=body(stream=True)) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert "data: [DONE]" in rest and not any('"error"' in line for line in rest)
        _, errors = child.communicate(timeout=15)
        assert child.returncode == 0, errors
        assert "Traceback" not in errors
    finally:
        child.kill()
        child.wait()
