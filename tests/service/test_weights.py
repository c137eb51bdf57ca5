"""A bit flipped in the memory of a live rank: found, named, and repaired by reading again."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors import safe_open

from firstlight.cli.main import main
from tiny_text_model import write_text_model

KEY = {"Authorization": "Bearer secret"}
TENSOR = "model.layers.2.mlp.up_proj.weight"


def flip_in_memory(process_id: int, values: bytes) -> int:
    """Flips a bit in every copy of some bytes in a process's memory; returns how many."""
    copies = 0
    with open(f"/proc/{process_id}/maps", encoding="ascii") as maps:
        lines = [line.split() for line in maps if " rw-p " in line]
    with open(f"/proc/{process_id}/mem", "r+b", buffering=0) as memory:
        for first, *_ in lines:
            start, stop = (int(edge, 16) for edge in first.split("-"))
            try:
                memory.seek(start)
                held = memory.read(stop - start)
            except OSError:
                continue
            for found in re.finditer(re.escape(values), held or b""):
                memory.seek(start + found.start())
                memory.write(bytes([values[0] ^ 1]))
                copies += 1
    return copies


def rank_bytes(checkpoint: Path) -> bytes:
    """The first bytes that rank 1 of 2 holds of the tensor: the beginning of its second half."""
    with safe_open(checkpoint / "model.safetensors", "np") as file:
        values = file.get_tensor(TENSOR)
    return bytes(values[len(values) // 2].tobytes())


def verify(service: Any, capsys: Any) -> tuple[int, Any]:
    """Runs the verb against the service."""
    code = main(["verify", "--live", service.url, "--api-key", "secret", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_flipped_bit_in_a_live_rank(
    tiny_store: Path, tmp_path: Path, start_service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    service = start_service(
        tiny_store, "--tp", "2", "--load-from", "rank0",
        "--api-key", "secret", "--weights-check-seconds", "0.5",
    ).wait_ready()  # fmt: skip
    with httpx.Client(base_url=service.url, headers=KEY, timeout=60, trust_env=False) as client:
        assert client.post("/weights/check", headers={"Authorization": "no"}).status_code == 401
        code, report = verify(service, capsys)
        assert code == 0 and report["data"]["intact"] and len(report["data"]["ranks"]) == 2
        asked = {**service.body([5, 6, 7]), "max_tokens": 8, "ignore_eos": True}
        before = client.post("/v1/completions", json=asked).json()["choices"][0]["token_ids"]

        events: list[str] = []
        begun = threading.Event()

        def read() -> None:
            body = {**asked, "max_tokens": 6000, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    events.append(line)
                    begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(30)
        values = rank_bytes(write_text_model(tmp_path / "checkpoint"))
        try:
            assert flip_in_memory(service.ranks()[1].pid, values) > 0
        except PermissionError:
            reader.join(60)
            pytest.skip("this system lets nobody write another process's memory")
        service.wait_for(lambda: service.status("/health") == 503, 20, "unhealthy")
        reader.join(10)
        named = "rank 1: layer-002, layers.2.mlp.up_proj.weight, granule"
        assert named in service.get("/health").json()["problem"]
        ready = service.get("/ready")
        assert ready.status_code == 503 and named in ready.json()["failure"]
        assert any('"error"' in line and named in line for line in events[-4:])
        refused = client.post("/v1/completions", json=asked)
        assert refused.status_code == 503 and named in refused.json()["error"]["message"]
        metrics = service.metrics()
        assert metrics["weights_damages_total"] == 1 and metrics["weights_checks_total"] >= 1
        code, report = verify(service, capsys)
        assert code == 1 and not report["data"]["intact"]
        assert any(check["name"].startswith(named) for check in report["checks"])

        body = {"source": str(tmp_path / "checkpoint")}
        other = client.post("/weights/reload", json=body)  # the same weights, not converted
        assert other.status_code == 400 and "needs a store" in other.json()["error"]["message"]
        again = client.post("/weights/reload", json={})
        assert again.status_code == 200 and again.json()["seconds"] > 0
        service.wait_for(lambda: service.status("/ready") == 200, 5, "ready again")
        assert service.status("/health") == 200
        answer = client.post("/v1/completions", json=asked).json()
        assert answer["choices"][0]["token_ids"] == before
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert verify(service, capsys)[0] == 0
