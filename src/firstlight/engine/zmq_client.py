"""Owns the API process's sockets to the engine process; knows neither HTTP nor what is
generated.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import msgspec
import zmq
import zmq.asyncio

from firstlight.engine.messages import (
    Cancel,
    CheckWeights,
    Drain,
    FromEngine,
    Output,
    Outputs,
    ReloadWeights,
    Status,
    Stopped,
    Submit,
    ToEngine,
    WeightsReloaded,
    WeightsReport,
)
from firstlight.errors import EnvironmentProblem, RequestError
from firstlight.schedule.request import SubmittedRequest

GONE = "the engine has ended; restart the service"


class ZmqEngineClient:
    """Talks to one engine process. Create it in the event loop that will use it, then `start`."""

    def __init__(self, *, api_endpoint: str, engine_endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(api_endpoint)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.connect(engine_endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._streams: dict[str, asyncio.Queue[Output | None]] = {}
        self._answers: dict[str, asyncio.Future[WeightsReport | WeightsReloaded]] = {}
        self._status: Status | None = None
        self._status_at = time.monotonic()
        self._progress_at = time.monotonic()
        self._stopped = asyncio.Event()
        self._failure: str | None = None
        self._receiver: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to receive; needs a running event loop."""
        self._receiver = asyncio.create_task(self._receive(), name="engine receiver")

    @property
    def status(self) -> Status | None:
        """The newest heartbeat; None before the first."""
        return self._status

    @property
    def status_age_seconds(self) -> float:
        """Seconds since the newest heartbeat arrived."""
        return time.monotonic() - self._status_at

    @property
    def stalled_seconds(self) -> float:
        """Seconds for which a busy engine has made no progress; 0 when idle."""
        if self._status is None or not self._status.busy:
            return 0.0
        return time.monotonic() - self._progress_at

    @property
    def failure(self) -> str | None:
        """Why the engine ended, None while it runs or after an orderly end."""
        return self._failure

    @property
    def has_stopped(self) -> bool:
        """Says whether the engine has ended."""
        return self._stopped.is_set()

    async def submit(self, requests: Sequence[SubmittedRequest]) -> AsyncIterator[Output]:
        """Yields outputs of all these requests until each has finished.

        Closing the iterator early cancels what is unfinished. Raises RequestError when the engine
        refuses a request and EnvironmentProblem when the engine is gone.
        """
        if self._stopped.is_set():
            raise EnvironmentProblem(self._failure or GONE)
        queue: asyncio.Queue[Output | None] = asyncio.Queue()
        open_ids = {request.request_id for request in requests}
        self._streams.update(dict.fromkeys(open_ids, queue))
        try:
            await self._send(Submit(list(requests)))
            while open_ids:
                output = await queue.get()
                if output is None:
                    raise EnvironmentProblem(self._failure or GONE)
                if output.finish is not None or output.refusal is not None:
                    open_ids.discard(output.request_id)
                    self._streams.pop(output.request_id, None)
                if output.refusal is not None:
                    raise RequestError(output.error or "", output.parameter, output.refusal)
                yield output
        finally:
            for request_id in open_ids:
                self._streams.pop(request_id, None)
            if open_ids and not self._stopped.is_set():
                # Shielded: a handler that is being cancelled must still free what it took.
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(self._send(Cancel(sorted(open_ids))))

    async def check_weights(self) -> WeightsReport:
        """Has every rank read all its weights and compare them with what it loaded.

        Raises EnvironmentProblem when the engine is gone.
        """
        check_id = uuid.uuid4().hex
        report = await self._ask(CheckWeights(check_id), check_id)
        assert isinstance(report, WeightsReport)
        return report

    async def reload_weights(self, source: str | None) -> WeightsReloaded:
        """Has weights read again in place once running requests have finished, from the source they
        came from when none is given.

        Raises EnvironmentProblem when the engine is gone.
        """
        reload_id = uuid.uuid4().hex
        reloaded = await self._ask(ReloadWeights(reload_id, source), reload_id)
        assert isinstance(reloaded, WeightsReloaded)
        return reloaded

    async def drain(self) -> None:
        """Lets running requests finish, refuses new ones, returns when the engine has ended."""
        if not self._stopped.is_set():
            await self._send(Drain())
            await self._stopped.wait()

    async def close(self) -> None:
        """Releases sockets; the engine goes on."""
        if self._receiver is not None:
            self._receiver.cancel()
            with suppress(asyncio.CancelledError):
                await self._receiver
        self._context.destroy(linger=200)

    def engine_ended(self, reason: str, *, exit_code: int) -> None:
        """Records that the engine process is gone: every open stream ends with an error."""
        if not self._stopped.is_set():
            self._end(reason, exit_code)

    async def _ask(self, order: ToEngine, order_id: str) -> WeightsReport | WeightsReloaded:
        """Sends an order about weights and waits for its answer, as long as the engine lives."""
        if self._stopped.is_set():
            raise EnvironmentProblem(self._failure or GONE)
        answer = self._answers[order_id] = asyncio.get_running_loop().create_future()
        try:
            await self._send(order)
            reply: WeightsReport | WeightsReloaded = await answer
            return reply
        finally:
            self._answers.pop(order_id, None)

    def _answer(self, order_id: str, message: WeightsReport | WeightsReloaded) -> None:
        answer = self._answers.get(order_id)
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def _send(self, message: ToEngine) -> None:
        await self._outbox.send(self._encoder.encode(message))

    async def _receive(self) -> None:
        while True:
            message = self._decoder.decode(await self._inbox.recv())
            if isinstance(message, Outputs):
                for output in message.outputs:
                    queue = self._streams.get(output.request_id)
                    if queue is not None:
                        queue.put_nowait(output)
            elif isinstance(message, Status):
                self._take_status(message)
            elif isinstance(message, WeightsReport):
                self._answer(message.check_id, message)
            elif isinstance(message, WeightsReloaded):
                if self._status is not None and not message.problem:
                    # Whoever hears of it may send requests now: the next heartbeat says it too.
                    healthy = msgspec.structs.replace(self._status, unhealthy=None, ready=True)
                    self._status = healthy
                self._answer(message.reload_id, message)
            elif isinstance(message, Stopped):
                self._end(message.failure, message.exit_code)

    def _take_status(self, status: Status) -> None:
        now, before = time.monotonic(), self._status
        moved = before is None or not before.busy or status.progress != before.progress
        if moved or not status.busy:
            self._progress_at = now
        self._status, self._status_at = status, now

    def _end(self, failure: str | None, exit_code: int) -> None:
        """Every open stream ends; a failure becomes part of the status, with its exit code."""
        self._failure = failure
        if failure is not None:
            last = self._status or Status(
                sequence=0, progress=0, busy=False, ready=False, phases=[]
            )
            self._status = msgspec.structs.replace(
                last, busy=False, ready=False, failure=failure, exit_code=exit_code
            )
        self._stopped.set()
        for queue in set(self._streams.values()):
            queue.put_nowait(None)
        self._streams.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EnvironmentProblem(failure or GONE))
