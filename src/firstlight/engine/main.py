"""Owns the engine process: its sockets, its heartbeat, its start and its end."""

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from firstlight.engine.constraints import Constraints, open_factory
from firstlight.engine.loop import EngineLoop
from firstlight.engine.messages import FromEngine, Status, Stopped, ToEngine
from firstlight.engine.settings import EngineSettings
from firstlight.engine.startup import Running, Startup
from firstlight.engine.timeline import Timeline
from firstlight.errors import FirstlightError
from firstlight.metrics.series import Series
from firstlight.runner.parent import watch_parent
from firstlight.settings.settings import debug_wanted

HEARTBEAT_SECONDS = 0.5
ENDED = "the engine process was told to end by a signal"


class Heartbeat:
    """Sends Status twice a second from a thread of its own, so that a hung loop is seen as hung."""

    def __init__(self, settings: EngineSettings, timeline: Timeline, series: Series) -> None:
        self._timeline = timeline
        self._series = series
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.connect(settings.api_endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._sequence = 0
        self._progress = 0
        self._stop = threading.Event()
        self._now = threading.Event()
        self._loop: EngineLoop | None = None
        self._facts: dict[str, str | int | float] = {}
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def advanced(self) -> None:
        """Notes that something moved."""
        self._progress += 1

    def ready(self, loop: EngineLoop, running: Running) -> None:
        """From now on the service is ready; told at once."""
        self._facts = running.facts
        self._loop = loop
        self._now.set()

    def stop(self) -> None:
        """Sends nothing more."""
        self._stop.set()
        self._now.set()
        self._thread.join(2)
        self._context.destroy(linger=500)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._socket.send(self._encoder.encode(self._status()))
            self._now.wait(HEARTBEAT_SECONDS)
            self._now.clear()

    def _status(self) -> Status:
        self._sequence += 1
        loop = self._loop
        return Status(
            sequence=self._sequence,
            progress=self._progress,
            busy=loop is None or loop.busy,
            ready=loop is not None and not loop.is_reloading,
            unhealthy=loop.unhealthy if loop is not None else None,
            phases=self._timeline.phases(),
            facts=self._facts,
            metrics=self._series.flatten(),
        )


class EngineSockets:
    """The engine's side of the sockets between API and engine."""

    def __init__(self, settings: EngineSettings) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(settings.engine_endpoint)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.connect(settings.api_endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        """Sends one message to the API process."""
        self._outbox.send(self._encoder.encode(message))

    def receive(self, wait_seconds: float) -> ToEngine | None:
        """Returns the next message, None if none comes in time."""
        if not self._inbox.poll(int(wait_seconds * 1000)):
            return None
        return self._decoder.decode(self._inbox.recv())

    def close(self) -> None:
        """Flushes what was sent and closes."""
        self._context.destroy(linger=2000)


def run(settings: EngineSettings) -> int:
    """Runs an engine until it is drained or fails; returns the exit code."""
    timeline, series = Timeline(settings.started), Series()
    timeline.begin("start engine process", settings.started)
    timeline.end("start engine process", time.time())
    sockets = EngineSockets(settings)
    heartbeat = Heartbeat(settings, timeline, series)
    startup = Startup(settings, timeline, series, heartbeat.advanced)
    failure: str | None = ENDED
    exit_code = 4
    try:
        running = startup.run()
        vocab_size = running.spec.vocab_size
        loop = EngineLoop(
            running,
            series,
            constraints=Constraints(
                lambda: open_factory(Path(settings.model), vocab_size),
                max_pending=settings.max_waiting,
            ),
            receive=sockets.receive,
            send=sockets.send,
            advanced=heartbeat.advanced,
            reload=lambda source: startup.reload(running, source),
        )
        heartbeat.ready(loop, running)
        loop.serve()
        failure, exit_code = None, 0
    except FirstlightError as error:
        failure, exit_code = str(error), error.exit_code
    except Exception as error:  # a process edge: the API must hear why the engine ended
        failure, exit_code = f"{type(error).__name__}: {error}", 1
        if debug_wanted():
            raise
    finally:
        heartbeat.stop()
        sockets.send(Stopped(failure, exit_code))
        if startup.ranks is not None:
            # After a failure ranks may wait for each other for ever.
            startup.ranks.stop(patience_seconds=1.0 if failure else 5.0)
            shutil.rmtree(startup.directory, ignore_errors=True)
        sockets.close()
    return exit_code


def main() -> int:
    """Runs an engine from its one JSON argument; SIGTERM, or its parent's end, ends it at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent drains
    signal.signal(signal.SIGTERM, _end)
    settings = msgspec.json.decode(sys.argv[1], type=EngineSettings)
    watch_parent(settings.parent_id, lambda: os.kill(os.getpid(), signal.SIGTERM))
    return run(settings)


def _end(signal_number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: cleaning up has begun
    raise SystemExit(4)


if __name__ == "__main__":
    sys.exit(main())
