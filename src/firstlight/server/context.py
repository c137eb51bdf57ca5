"""Owns the record a server is made from, and the limits it serves under.

Knows no HTTP; every value is fixed for the life of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from firstlight import __version__
from firstlight.engine.client import EngineClient
from firstlight.inputs.chat_format import ChatFormat
from firstlight.inputs.generation_defaults import GenerationDefaults
from firstlight.inputs.tokenizer import Tokenizer
from firstlight.metrics.events import Recorder

if TYPE_CHECKING:
    from firstlight.inputs.images.load import ImageLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what a client may ask and on how long things may take, in bytes and seconds.

    `stall_seconds` and `loading_stall_seconds` are how long a busy engine may make no progress,
    once ready and before. `drain_seconds` is how long running requests may go on after SIGTERM.
    """

    max_body_bytes: int = 64 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    header_seconds: float = 20.0
    body_seconds: float = 60.0
    idle_seconds: float = 30.0
    keepalive_seconds: float = 15.0
    drain_seconds: float = 30.0
    heartbeat_stale_seconds: float = 5.0
    first_heartbeat_seconds: float = 60.0
    stall_seconds: float = 10.0
    loading_stall_seconds: float = 120.0
    retry_after_seconds: int = 1
    max_choices: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class AppContext:
    """What a server needs. The first of `model_names` is the one answers carry.

    `chat_format` is None for a model without a chat template, `images` for one that takes none.
    `api_keys` empty lets everyone in; `open_paths` need no key. `read_series` gives the flat series
    of this process for /metrics.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    chat_format: ChatFormat | None
    images: ImageLoader | None = None
    defaults: GenerationDefaults
    model_names: tuple[str, ...]
    context_length: int
    recorder: Recorder
    read_series: Callable[[], Mapping[str, float]]
    limits: Limits = field(default_factory=Limits)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    open_paths: frozenset[str] = frozenset({"/health", "/ready", "/metrics", "/version"})
    created: int = 0
    version: str = __version__

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer of this model."""
        return tuple(dict.fromkeys((*self.defaults.eos_ids, *self.tokenizer.eos_ids)))
