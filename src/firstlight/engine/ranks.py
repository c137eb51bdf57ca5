"""Owns the rank processes: starts them, sends plans, collects answers, notices when one is gone.

Knows no request and no policy.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from firstlight.errors import EnvironmentProblem, FirstlightError
from firstlight.runner.protocol import (
    FromRank,
    RankFailed,
    RankProgress,
    RankSettings,
    StopRank,
    ToRank,
)

Answer = TypeVar("Answer")
POLL_MILLISECONDS = 200
# A killed process closes its connections a moment before its parent can see the signal.
KILL_SECONDS = 0.3


class RankFailure(FirstlightError):
    """A rank ended or reported that it cannot go on; carries the exit code it gave."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankGroup:
    """All ranks of one engine, one process each."""

    def __init__(
        self, common: RankSettings, directory: Path, *, stall_seconds: float = 300.0
    ) -> None:
        self._stall_seconds = stall_seconds
        self._context = zmq.Context()
        self._results = self._context.socket(zmq.PULL)
        self._results.bind(common.result_endpoint)
        self._plans: list[zmq.Socket[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        for rank in range(common.tp):
            endpoint = f"ipc://{directory}/plan-{rank}"
            plans = self._context.socket(zmq.PUSH)
            plans.bind(endpoint)
            self._plans.append(plans)
            settings = msgspec.structs.replace(common, rank=rank, plan_endpoint=endpoint)
            self._processes.append(_start_rank(settings))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._processes)

    def send(self, order: ToRank) -> None:
        """Sends the same order to every rank. RankFailure when one of them has ended."""
        data = self._encoder.encode(order)
        for plans in self._plans:
            while not plans.poll(POLL_MILLISECONDS, zmq.POLLOUT):  # a dead rank takes nothing
                self.check_alive()
            plans.send(data)

    def collect(
        self,
        kind: type[Answer],
        *,
        on_progress: Callable[[RankProgress], None] | None = None,
    ) -> list[Answer]:
        """Waits for one answer of `kind` from every rank and returns them in rank order.

        Waits as long as anything arrives; RankFailure when a rank ends, reports a failure, or
        nothing at all is heard for the group's `stall_seconds`.
        """
        answers: dict[int, Answer] = {}
        heard = time.monotonic()
        while len(answers) < self.size:
            if not self._results.poll(POLL_MILLISECONDS):
                self.check_alive()
                self._check_progress(heard, silent=set(range(self.size)) - set(answers))
                continue
            message = self._decoder.decode(self._results.recv())
            heard = time.monotonic()
            if isinstance(message, RankFailed):
                self._raise_failure(message)
            if isinstance(message, RankProgress):
                if on_progress is not None:
                    on_progress(message)
            elif isinstance(message, kind):
                answers[message.rank] = message
        return [answers[rank] for rank in range(self.size)]

    def stop(self, *, patience_seconds: float = 5.0) -> None:
        """Asks every rank to end, then ends those that do not."""
        order = self._encoder.encode(StopRank())
        for plans in self._plans:
            if plans.poll(0, zmq.POLLOUT):
                plans.send(order)
        deadline = time.monotonic() + patience_seconds
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._context.destroy(linger=0)

    @property
    def process_ids(self) -> Sequence[int]:
        """Process ids, in rank order."""
        return [process.pid for process in self._processes]

    def check_alive(self) -> None:
        """Raises RankFailure when a rank's process has ended."""
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if code is not None:
                self._raise_last_words(rank, code)

    def _check_progress(self, heard: float, *, silent: set[int]) -> None:
        if time.monotonic() - heard > self._stall_seconds:
            names = ", ".join(f"rank {rank}" for rank in sorted(silent))
            raise RankFailure(f"{names} made no progress for {self._stall_seconds:.0f} s", 4)

    def _raise_failure(self, message: RankFailed) -> None:
        """A rank whose neighbour was killed fails in a collective: the killed one is to blame."""
        deadline = time.monotonic() + KILL_SECONDS
        while time.monotonic() < deadline:
            for rank, process in enumerate(self._processes):
                if (process.poll() or 0) < 0:
                    raise RankFailure(_obituary(rank, process.returncode), 4)
            time.sleep(0.02)
        raise RankFailure(f"rank {message.rank}: {message.message}", message.exit_code)

    def _raise_last_words(self, rank: int, code: int) -> None:
        """A rank that failed in order has said why; it may still be in the socket."""
        while self._results.poll(100):
            message = self._decoder.decode(self._results.recv())
            if isinstance(message, RankFailed):
                self._raise_failure(message)
        raise RankFailure(_obituary(rank, code), 4)


def _obituary(rank: int, code: int) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    advice = "; signal 9 often means that memory ran out" if code == -9 else ""
    return f"rank {rank} {how}{advice}"


def free_rendezvous() -> str:
    """Returns a TCP rendezvous on a port of this machine that is free now."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as error:
            raise EnvironmentProblem(f"no free TCP port on 127.0.0.1: {error}") from error
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def _start_rank(settings: RankSettings) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    environment["OMP_WAIT_POLICY"] = "passive"  # spinning ranks take the cores of the others
    environment["OMP_NUM_THREADS"] = str(settings.threads)
    environment["MKL_NUM_THREADS"] = str(settings.threads)
    if "127.0.0.1" in settings.rendezvous:
        # The host's name may stand for an address that ranks of one machine cannot reach.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "firstlight.runner.worker"]
    return subprocess.Popen(
        [*command, msgspec.json.encode(settings).decode()],
        env=environment,
        stdin=subprocess.DEVNULL,
    )
