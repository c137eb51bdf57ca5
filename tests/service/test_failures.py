"""What kills or stops a part of a running service: who hears of it, and that nothing is left."""

import json
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from blake3 import blake3

from firstlight.accept.convert import convert
from tiny_text_model import poison, write_text_model

LONG = {"max_tokens": 4000, "ignore_eos": True}


def read_to_end(service: Any, found: list[Any], **fields: Any) -> threading.Thread:
    """Streams a long completion in a thread; `found` gets its events, or what ended it."""

    def read() -> None:
        try:
            found.extend(service.stream([5, 6, 7], **{**LONG, **fields}))
        except httpx.HTTPError as problem:
            found.append(problem)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def give_answers(store: Path, answers: bytes) -> None:
    """Replaces a store's known answers, digests and all: only the gate can tell."""
    (store / "answers" / "known.json").write_bytes(answers)
    manifest = json.loads((store / "manifest.json").read_bytes())
    manifest["answers"]["known.json"] = blake3(answers).hexdigest()
    raw = json.dumps(manifest).encode()
    (store / "manifest.json").write_bytes(raw)
    (store / "COMPLETE").write_text(blake3(raw).hexdigest() + "\n")


def is_busy(service: Any) -> bool:
    return bool(service.metrics().get("running_requests"))


def test_a_rank_killed_while_it_computes_ends_the_service_and_is_named(
    tiny_store: Path, start_service: Any
) -> None:
    rank = 1
    service = start_service(tiny_store, "--tp", "2").wait_ready()
    events: list[Any] = []
    reader = read_to_end(service, events)
    service.wait_for(lambda: is_busy(service), 20, "busy")
    service.ranks()[rank].kill()
    assert service.wait_exit(20) == 4
    reader.join(10)
    assert "error" in events[-1], events[-1]
    assert f"rank {rank} was killed by signal 9" in events[-1]["error"]["message"]
    assert f"rank {rank} was killed by signal 9" in service.log
    assert "Traceback" not in service.log
    service.wait_for(lambda: not service.survivors(), 10, "without orphans")


@pytest.mark.slow
def test_a_rank_killed_while_idle_ends_the_service(tiny_store: Path, start_service: Any) -> None:
    service = start_service(tiny_store).wait_ready()
    service.ranks()[0].kill()
    assert service.wait_exit(20) == 4
    assert "rank 0 was killed by signal 9" in service.log
    service.wait_for(lambda: not service.survivors(), 10, "without orphans")


@pytest.mark.slow
def test_a_killed_engine_ends_the_service(tiny_store: Path, start_service: Any) -> None:
    service = start_service(tiny_store).wait_ready()
    events: list[Any] = []
    reader = read_to_end(service, events)
    service.wait_for(lambda: is_busy(service), 20, "busy")
    service.engine().kill()
    assert service.wait_exit(20) == 4
    reader.join(10)
    assert "killed by signal 9" in events[-1]["error"]["message"]
    service.wait_for(lambda: not service.survivors(), 10, "without orphans")


@pytest.mark.slow
def test_a_stopped_rank_turns_health_to_503_until_it_goes_on(shared_service: Any) -> None:
    service = shared_service
    events: list[Any] = []
    reader = read_to_end(service, events, max_tokens=900)
    service.wait_for(lambda: is_busy(service), 20, "busy")
    stopped = service.ranks()[1]
    stopped.send_signal(signal.SIGSTOP)
    try:
        service.wait_for(lambda: service.status("/health") == 503, 16, "unhealthy")
        assert "no progress" in service.get("/health").json()["problem"]
    finally:
        stopped.send_signal(signal.SIGCONT)
    service.wait_for(lambda: service.status("/health") == 200, 5, "healthy again")
    reader.join(60)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_a_request_that_meets_nan_fails_alone(tmp_path: Path, start_service: Any) -> None:
    folder = write_text_model(tmp_path / "checkpoint")
    poison(folder, 290)
    convert(folder, tmp_path / "store")
    service = start_service(tmp_path / "store").wait_ready()
    good = service.complete([5, 6, 7], max_tokens=40, ignore_eos=True).json()["choices"][0]
    answers: list[httpx.Response] = []
    prompts = [[5, 6, 7], [5, 6, 290], [5, 6, 7]]

    def ask(prompt: list[int]) -> None:
        answers.append(service.complete(prompt, max_tokens=40, ignore_eos=True))

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [answer for answer in answers if answer.status_code != 200]
    assert len(failed) == 1 and failed[0].status_code == 500
    assert "not finite" in failed[0].json()["error"]["message"]
    for answer in answers:
        if answer is not failed[0]:
            assert answer.json()["choices"][0]["token_ids"] == good["token_ids"]
    service.wait_for(lambda: service.metrics().get("nan_rows_total") == 1, 5, "counted")
    assert service.status("/ready") == 200


@pytest.mark.slow
def test_weights_that_do_not_fit_their_answers_never_get_ready(
    tmp_path: Path, tiny_store: Path, start_service: Any
) -> None:
    other = write_text_model(tmp_path / "checkpoint", seed=1)
    convert(other, tmp_path / "store")
    give_answers(tmp_path / "store", (tiny_store / "answers" / "known.json").read_bytes())
    service = start_service(tmp_path / "store")
    seen: set[Any] = set()

    def has_ended() -> bool:
        if service.find_address():
            seen.add(service.status("/ready"))
        return service.has_ended

    service.wait_for(has_ended, 60, "ended")
    assert service.wait_exit() == 1 and 200 not in seen
    assert "does not give the known answers" in service.log and "position 1" in service.log
    assert "Traceback" not in service.log


def test_a_damaged_store_names_the_granule(
    tmp_path: Path, tiny_store: Path, start_service: Any
) -> None:
    store = copy_store(tiny_store, tmp_path / "store")
    unit = store / "units" / "layer-002.bin"
    data = bytearray(unit.read_bytes())
    data[len(data) // 2] ^= 1
    unit.write_bytes(data)
    service = start_service(store, "--tp", "2")
    assert service.wait_exit(60) == 1
    assert "layer-002" in service.log and "granule" in service.log
    assert "Traceback" not in service.log


def copy_store(source: Path, target: Path) -> Path:
    for path in source.rglob("*"):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return target
