"""Owns the start-up timeline: phases that began and ended, in seconds since process start."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from firstlight.engine.messages import Phase


class Timeline:
    """Phases in order of their beginning; safe to read from another thread."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._phases: dict[tuple[str, str], Phase] = {}
        self._lock = Lock()

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        """Records a phase of the engine itself around a block."""
        self.begin(name, time.time(), detail=detail)
        yield
        self.end(name, time.time())

    def begin(self, name: str, at: float, *, parent: str = "", detail: str = "") -> None:
        """Records that a phase began at a moment given in seconds since the epoch."""
        with self._lock:
            began = max(0.0, at - self._started)
            self._phases[(parent, name)] = Phase(name, began, None, detail, parent)

    def detail(self, name: str, text: str, *, parent: str = "") -> None:
        """Replaces what is said about a running phase: its progress."""
        with self._lock:
            phase = self._phases.get((parent, name))
            if phase is not None:
                fields = (phase.name, phase.began, phase.ended, text, phase.parent)
                self._phases[(parent, name)] = Phase(*fields)

    def end(self, name: str, at: float, *, parent: str = "") -> None:
        """Records that a phase ended."""
        with self._lock:
            phase = self._phases.get((parent, name))
            if phase is not None:
                ended = max(phase.began, at - self._started)
                self._phases[(parent, name)] = Phase(
                    phase.name, phase.began, ended, phase.detail, phase.parent
                )

    def phases(self) -> list[Phase]:
        """Returns all phases so far."""
        with self._lock:
            return list(self._phases.values())
