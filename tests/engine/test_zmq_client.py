"""The API process's side of the engine over real sockets: streams, refusals, ends, liveness."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from firstlight.engine.messages import (
    Cancel,
    Drain,
    FromEngine,
    Output,
    Outputs,
    Status,
    Stopped,
    Submit,
    ToEngine,
)
from firstlight.engine.zmq_client import ZmqEngineClient
from firstlight.errors import EnvironmentProblem, RequestError
from firstlight.schedule.request import FinishReason, SamplingParams, SubmittedRequest


class OtherEnd:
    """The engine's sockets, worked by the test."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(f"ipc://{folder}/engine")
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.connect(f"ipc://{folder}/api")

    async def say(self, message: FromEngine) -> None:
        await self._outbox.send(msgspec.msgpack.encode(message))

    async def hear(self) -> ToEngine:
        data = await asyncio.wait_for(self._inbox.recv(), 10)
        return msgspec.msgpack.decode(data, type=ToEngine)

    def close(self) -> None:
        self._context.destroy(linger=0)


Ends = tuple[ZmqEngineClient, OtherEnd]


@pytest_asyncio.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    client = ZmqEngineClient(
        api_endpoint=f"ipc://{tmp_path}/api", engine_endpoint=f"ipc://{tmp_path}/engine"
    )
    client.start()
    engine = OtherEnd(tmp_path)
    yield client, engine
    await client.close()
    engine.close()


def request(name: str) -> SubmittedRequest:
    return SubmittedRequest(request_id=name, prompt_ids=[1], params=SamplingParams(max_tokens=2))


def tokens(name: str, *ids: int, finish: FinishReason | None = None) -> Output:
    return Output(name, token_ids=list(ids), finish=finish)


def status(**changes: Any) -> Status:
    basis = {"sequence": 1, "progress": 1, "busy": True, "ready": True, "phases": []}
    return Status(**{**basis, **changes})


async def until(client: ZmqEngineClient, **wanted: Any) -> None:
    """Waits until the newest status has these values."""
    for _ in range(1000):
        if client.status and all(getattr(client.status, k) == v for k, v in wanted.items()):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{client.status} is never {wanted}")


async def read(client: ZmqEngineClient, *names: str) -> list[Output]:
    return [output async for output in client.submit([request(name) for name in names])]


async def test_each_stream_gets_its_own_outputs_until_all_have_finished(ends: Ends) -> None:
    client, engine = ends
    both = asyncio.create_task(read(client, "a", "b"))
    other = asyncio.create_task(read(client, "c"))
    submitted = [await engine.hear(), await engine.hear()]
    assert all(isinstance(message, Submit) for message in submitted)
    await engine.say(Outputs([tokens("a", 1), tokens("b", 2), tokens("c", 3)]))
    await engine.say(Outputs([tokens("a", 4, finish=FinishReason.STOP), tokens("nobody", 9)]))
    end = FinishReason.LENGTH
    await engine.say(Outputs([tokens("b", 5, finish=end), tokens("c", 6, finish=end)]))
    assert [(o.request_id, o.token_ids) for o in await both] == [
        ("a", [1]),
        ("b", [2]),
        ("a", [4]),
        ("b", [5]),
    ]
    assert [o.token_ids for o in await other] == [[3], [6]]


async def test_closing_a_stream_early_cancels_what_is_unfinished(ends: Ends) -> None:
    client, engine = ends
    stream = client.submit([request("a"), request("b")])
    first = asyncio.create_task(anext(stream))
    await engine.hear()
    await engine.say(Outputs([tokens("b", 1, finish=FinishReason.STOP)]))
    await first
    await stream.aclose()  # type: ignore[attr-defined]
    assert await engine.hear() == Cancel(["a"])


async def test_a_cancelled_reader_cancels_its_request(ends: Ends) -> None:
    client, engine = ends
    reader = asyncio.create_task(read(client, "a"))
    await engine.hear()
    reader.cancel()
    assert await engine.hear() == Cancel(["a"])
    with pytest.raises(asyncio.CancelledError):
        await reader


async def test_a_refusal_names_its_field_and_takes_the_others_along(ends: Ends) -> None:
    client, engine = ends
    both = asyncio.create_task(read(client, "a", "b"))
    await engine.hear()
    refusal = Output("a", error="too long", refusal="context_length", parameter="prompt")
    await engine.say(Outputs([refusal]))
    with pytest.raises(RequestError, match="too long") as refused:
        await both
    assert (refused.value.code, refused.value.parameter) == ("context_length", "prompt")
    assert await engine.hear() == Cancel(["b"])


async def test_a_failed_engine_ends_every_stream_with_its_reason(ends: Ends) -> None:
    client, engine = ends
    readers = [asyncio.create_task(read(client, name)) for name in "ab"]
    for _ in readers:
        await engine.hear()
    await engine.say(status())
    await engine.say(Stopped("rank 1 was killed", 4))
    for reader in readers:
        with pytest.raises(EnvironmentProblem, match="rank 1 was killed"):
            await reader
    assert client.has_stopped and client.failure == "rank 1 was killed"
    assert client.status is not None and not client.status.ready
    assert (client.status.failure, client.status.exit_code) == ("rank 1 was killed", 4)
    with pytest.raises(EnvironmentProblem, match="rank 1 was killed"):
        await read(client, "c")


async def test_an_engine_that_dies_before_its_first_word_still_has_a_status(ends: Ends) -> None:
    client, _ = ends
    client.engine_ended("the engine process was killed by signal 9", exit_code=4)
    assert client.status is not None and client.status.failure is not None
    assert client.status.exit_code == 4 and client.stalled_seconds == 0
    client.engine_ended("another reason", exit_code=1)
    assert client.failure == "the engine process was killed by signal 9"


async def test_an_orderly_end_is_no_failure_and_open_streams_hear_of_it(ends: Ends) -> None:
    client, engine = ends
    reader = asyncio.create_task(read(client, "a"))
    await engine.hear()
    draining = asyncio.create_task(client.drain())
    assert await engine.hear() == Drain()
    assert not draining.done()
    await engine.say(Stopped())
    await draining
    with pytest.raises(EnvironmentProblem, match="has ended"):
        await reader
    assert client.failure is None and client.has_stopped
    await client.drain()  # at once: there is nobody left to tell


async def test_a_busy_engine_without_progress_is_stalled(ends: Ends) -> None:
    client, engine = ends
    assert client.status is None and client.stalled_seconds == 0
    await engine.say(status(sequence=1, progress=5))
    await until(client, sequence=1)
    await asyncio.sleep(0.2)
    await engine.say(status(sequence=2, progress=5))
    await until(client, sequence=2)
    assert client.stalled_seconds >= 0.2 and client.status_age_seconds < client.stalled_seconds
    before = client.stalled_seconds
    await engine.say(status(sequence=3, progress=6))
    await until(client, sequence=3)
    assert client.stalled_seconds < before


async def test_an_idle_engine_is_never_stalled_and_starts_fresh(ends: Ends) -> None:
    client, engine = ends
    await engine.say(status(sequence=1, busy=False))
    await until(client, sequence=1)
    await asyncio.sleep(0.2)
    assert client.stalled_seconds == 0
    await engine.say(status(sequence=2, busy=True))
    await until(client, sequence=2)
    assert client.stalled_seconds < 0.2
