"""Owns the engine process as its parent sees it: started, watched, ended."""

import os
import subprocess
import sys

import msgspec

from firstlight.engine.settings import EngineSettings


class EngineProcess:
    """A running engine process and its ranks, which end with it."""

    def __init__(self, settings: EngineSettings) -> None:
        settings = msgspec.structs.replace(settings, parent_id=os.getpid())
        command = [sys.executable, "-m", "firstlight.engine.main"]
        self._process = subprocess.Popen(
            [*command, msgspec.json.encode(settings).decode()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C goes to the parent, which drains first
        )

    @property
    def process_id(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def poll(self) -> int | None:
        """Returns the exit code if the engine has ended."""
        return self._process.poll()

    def stop(self, *, patience_seconds: float = 10.0) -> int:
        """Waits for the engine to end, then ends it. Returns its exit code."""
        try:
            return self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self._process.terminate()
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
