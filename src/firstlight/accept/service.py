"""Owns a service started for its own validation: one `firstlight serve` process, watched and ended.

Speaks HTTP to it like anybody else; knows nothing of what runs inside.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from firstlight.errors import CheckFailed, EnvironmentProblem

POLL_SECONDS = 0.1
LISTENING = "listening on "


class StartedService:
    """A `firstlight serve` process. Use as a context manager: leaving it ends the process."""

    def __init__(self, model: Path, flags: Sequence[str]) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="firstlight-serve-", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-m", "firstlight.cli.main", "serve", str(model), *flags]
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        self.base_url = ""

    def __enter__(self) -> "StartedService":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()

    def wait_ready(self, on_phase: Callable[[str], None]) -> Mapping[str, Any]:
        """Waits until /ready says yes and returns /startup. `on_phase` hears of each new phase.

        There is no limit on total time: the service judges its own progress. Raises CheckFailed or
        EnvironmentProblem with the service's last words when it ends or reports itself unhealthy.
        """
        said = ""
        while True:
            self._check_running()
            self.base_url = self.base_url or self._find_address()
            answer = self._get("/ready") if self.base_url else None
            if answer is not None and answer.status_code == 200:
                return dict(self._require("/startup").json())
            if answer is not None:
                body = answer.json()
                phase = " ".join(filter(None, (body.get("phase"), body.get("detail"))))
                if phase and phase != said:
                    said = phase
                    on_phase(phase)
            health = self._get("/health") if self.base_url else None
            if health is not None and health.status_code != 200:
                raise CheckFailed(f"the service is not healthy: {health.json().get('problem')}")
            time.sleep(POLL_SECONDS)

    def metrics(self) -> str:
        """Returns what /metrics says now."""
        return self._require("/metrics").text

    def stop(self, *, patience_seconds: float = 40.0) -> int:
        """Asks the service to drain and returns its exit code; ends it when it does not."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def last_words(self, num_lines: int = 5) -> str:
        """Returns the last lines the service wrote."""
        text = Path(self._log.name).read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.strip().splitlines()[-num_lines:])

    @property
    def process_id(self) -> int:
        """Process id of the service's first process."""
        return self._process.pid

    def _find_address(self) -> str:
        text = Path(self._log.name).read_text(encoding="utf-8", errors="replace")
        _, found, rest = text.partition(LISTENING)
        return rest.split()[0] if found and "\n" in rest else ""

    def _check_running(self) -> None:
        code = self._process.poll()
        if code is not None:
            kind = EnvironmentProblem if code == 4 else CheckFailed
            raise kind(f"the service ended with exit code {code}: {self.last_words()}")

    def _get(self, path: str) -> httpx.Response | None:
        try:
            return httpx.get(self.base_url + path, timeout=10)
        except httpx.TransportError:
            return None

    def _require(self, path: str) -> httpx.Response:
        answer = self._get(path)
        if answer is None:
            raise CheckFailed(f"the service does not answer {path}: {self.last_words()}")
        return answer
