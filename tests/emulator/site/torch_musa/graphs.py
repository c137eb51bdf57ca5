"""Owns graphs under the vendor's names; what a graph keeps is the compiled module's matter."""

from typing import Any

import torch
from musa_emulator import native_file

_native = native_file.load(torch.__version__)


class MUSAGraph:
    """One executable graph: capture once, replay on the same memory."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph = _native.Graph()
        self._capturing = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """From here on, operators are kept."""
        self._graph.capture_begin()
        self._capturing = True

    def capture_end(self) -> None:
        """Makes the executable; RuntimeError when the driver holds as many as it can."""
        self._capturing = False
        self._graph.capture_end()

    def replay(self) -> None:
        """Calls the kept operators again."""
        self._graph.replay()

    def reset(self) -> None:
        """Forgets the graph and frees its executable."""
        self._graph.reset()

    def pool(self) -> tuple[int, int]:
        """There is one pool of memory."""
        return graph_pool_handle()


class graph:
    """A context that captures into a graph. The first parameter has another name than elsewhere."""

    def __init__(self, musa_graph: MUSAGraph, pool: Any = None, stream: Any = None) -> None:
        self._graph = musa_graph

    def __enter__(self) -> None:
        self._graph.capture_begin()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._graph.capture_end()
        else:
            self._graph.reset()


def graph_pool_handle() -> tuple[int, int]:
    """Returns the one pool there is."""
    return (0, 1)


def is_current_stream_capturing() -> bool:
    """Whether a graph is being captured."""
    return bool(_native.is_capturing())
