"""A pool of gloo rank processes that tests send functions to, started once per test run.

Knows processes, timeouts and process groups; refuses to know what the functions do.
"""

import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

MAX_RANKS = 4
START_SECONDS = 120.0
RUN_SECONDS = 120.0
# After one rank has failed, the others may sit in a collective that will never complete.
GRACE_SECONDS = 3.0


class RankFailure(RuntimeError):
    """A function failed, or did not return in time, on a rank.

    `rank` is the first rank that failed, `exception` what it raised (None when it could not be
    pickled or the rank hung or died), `traceback` its traceback or the tail of its output.
    """

    def __init__(self, rank: int, exception: BaseException | None, traceback: str) -> None:
        super().__init__(f"rank {rank} failed\n{traceback}")
        self.rank = rank
        self.exception = exception
        self.traceback = traceback


class RankPool:
    """Up to four rank processes; `group(n)` puts the first n of them in a group of `backend`.

    `variables` are further ones of their environment; a PYTHONPATH among them comes first.
    """

    def __init__(
        self,
        num_ranks: int = MAX_RANKS,
        *,
        backend: str = "gloo",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self._backend = backend
        self._variables = dict(variables or {})
        self._directory = tempfile.TemporaryDirectory(prefix="firstlight-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._groups = 0

    def group(self, num_ranks: int, timeout_seconds: float = RUN_SECONDS) -> "RankGroup":
        """Starts the processes when needed and makes a fresh gloo world of `num_ranks`."""
        assert 1 <= num_ranks <= self.num_ranks, f"the pool has {self.num_ranks} ranks"
        if not self._processes:
            self._start()
        self._groups += 1
        store = Path(self._directory.name) / f"group-{self._groups}"
        everyone = range(self.num_ranks)
        self._call([("group", num_ranks, str(store), timeout_seconds) for _ in everyone], 60.0)
        return RankGroup(self, num_ranks)

    def close(self) -> None:
        """Ends every process and removes their output."""
        self.kill()
        self._directory.cleanup()

    def kill(self) -> None:
        """Ends every process now; the next group starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def call(self, num_ranks: int, command: tuple[Any, ...], timeout_seconds: float) -> list[Any]:
        """Sends one command to the first ranks and returns their values in rank order."""
        assert self._processes, "the rank processes were ended; ask the fixture for a new group"
        return self._call([command] * num_ranks, timeout_seconds)

    def _start(self) -> None:
        key = secrets.token_bytes(16)
        address = str(Path(self._directory.name) / f"socket-{self._groups}")
        threads = max(1, (os.cpu_count() or 1) // self.num_ranks)
        environment = os.environ | {
            "OMP_WAIT_POLICY": "passive",
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
            "RANK_POOL_KEY": key.hex(),
            "RANK_POOL_BACKEND": self._backend,
        }
        own = self._variables.get("PYTHONPATH", "")
        environment |= self._variables
        environment["PYTHONPATH"] = os.pathsep.join(path for path in [own, *sys.path] if path)
        worker = str(Path(__file__).with_name("rank_worker.py"))
        with Listener(address, "AF_UNIX", backlog=self.num_ranks, authkey=key) as listener:
            for rank in range(self.num_ranks):
                with self._output_path(rank).open("wb") as output:
                    self._processes.append(
                        subprocess.Popen(
                            [sys.executable, worker, address, str(rank)],
                            env=environment,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                        )
                    )
            self._accept_all(listener)

    def _accept_all(self, listener: Listener) -> None:
        by_rank: dict[int, Connection] = {}
        deadline = time.monotonic() + START_SECONDS
        # Listener.accept has no timeout of its own: wait on its socket, and notice the dead.
        socket = listener._listener._socket  # type: ignore[attr-defined]
        while len(by_rank) < self.num_ranks:
            dead = [rank for rank, process in enumerate(self._processes) if process.poll()]
            if dead or time.monotonic() > deadline:
                rank = (dead or sorted(set(range(self.num_ranks)) - set(by_rank)))[0]
                self.kill()
                raise RankFailure(rank, None, "it did not start\n" + self._output_tail(rank))
            if wait([socket], timeout=0.2):
                connection = listener.accept()
                by_rank[connection.recv()] = connection
        self._connections = [by_rank[rank] for rank in range(self.num_ranks)]

    def _call(self, commands: Sequence[tuple[Any, ...]], timeout_seconds: float) -> list[Any]:
        for connection, command in zip(self._connections, commands, strict=False):
            connection.send(command)
        answers, failure = self._collect(len(commands), timeout_seconds)
        if failure is not None:
            if len(answers) < len(commands):
                self.kill()
            raise failure from failure.exception
        return [answers[rank] for rank in range(len(commands))]

    def _collect(
        self, num_ranks: int, timeout_seconds: float
    ) -> tuple[dict[int, Any], RankFailure | None]:
        waiting = {self._connections[rank]: rank for rank in range(num_ranks)}
        answers: dict[int, Any] = {}
        failure: RankFailure | None = None
        deadline = time.monotonic() + timeout_seconds
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=remaining):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                answers[rank], problem = self._receive(ready, rank)
                if problem is not None and failure is None:
                    failure = problem
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if waiting and failure is None:
            failure = self._hung(sorted(waiting.values()), timeout_seconds)
        return answers, failure

    def _receive(self, connection: Connection, rank: int) -> tuple[Any, RankFailure | None]:
        try:
            answer = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            status = self._processes[rank].wait(timeout=10)
            text = f"the process ended with status {status}\n" + self._output_tail(rank)
            self.kill()
            return None, RankFailure(rank, None, text)
        if answer[0] == "ok":
            return answer[1], None
        exception = pickle.loads(answer[1]) if answer[1] is not None else None
        return None, RankFailure(rank, exception, answer[2])

    def _hung(self, ranks: list[int], timeout_seconds: float) -> RankFailure:
        for rank in ranks:
            self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        tails = "\n".join(f"rank {rank}:\n{self._output_tail(rank)}" for rank in ranks)
        text = f"no answer from ranks {ranks} within {timeout_seconds:g} s; their stacks:\n{tails}"
        return RankFailure(ranks[0], None, text)

    def _output_path(self, rank: int) -> Path:
        return Path(self._directory.name) / f"rank-{rank}.txt"

    def _output_tail(self, rank: int) -> str:
        return self._output_path(rank).read_text(errors="replace")[-4000:]


class RankGroup:
    """The first ranks of the pool, joined in one gloo world made for this group alone."""

    def __init__(self, pool: RankPool, num_ranks: int) -> None:
        self._pool = pool
        self.num_ranks = num_ranks

    def run(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        timeout_seconds: float = RUN_SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls a module-level function on every rank and returns the results in rank order.

        The function finds its rank in torch.distributed; arguments and results are pickled.
        Raises RankFailure (whose cause is the rank's own exception) when one rank raises, dies or
        does not answer in time.
        """
        name = function.__qualname__
        assert "<" not in name, f"{name} is no module-level function; ranks could not find it"
        path = getattr(sys.modules[function.__module__], "__file__", None)
        command = ("run", path, function.__module__, name, pickle.dumps((args, kwargs)))
        return self._pool.call(self.num_ranks, command, timeout_seconds)
