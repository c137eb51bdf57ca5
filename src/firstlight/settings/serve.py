"""Owns the settings of a service, their defaults and what may not be combined.

Knows neither the command line nor the engine; each value's origin is kept by `resolve`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from firstlight.errors import UsageError
from firstlight.settings.objectives import OBJECTIVES, StepLimits, choose_limits
from firstlight.settings.settings import required, setting
from firstlight.settings.tiers import parse_tiers

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "int8", "fp8")
LOAD_FROM = ("own", "rank0")
ALLOCATORS = ("paged", "dynamic")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What a service is told at start; sizes are bytes, lengths tokens, times seconds.

    Raises UsageError when values contradict each other.
    """

    model: Path = required("a store, a checkpoint folder or a GGUF file")
    plan: Path | None = setting(
        None, "file of `firstlight plan`; its values stand where no other is given"
    )
    memory_bytes: int | None = setting(
        None,
        "memory one rank may take, like 64GiB",
        kind="bytes",
        minimum=1,
        optional_text="what is free",
    )
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one", minimum=0)
    tp: int = setting(1, "ranks that share each layer (tensor parallel)", minimum=1)
    ep: int = setting(
        1, "parts experts are dealt into by number; must divide tp (expert parallel)", minimum=1
    )
    device: str = setting("cpu", "platform to run on; auto takes the best one found")
    dtype: str = setting("float32", "type of weights in compute", choices=DTYPES)
    kv_dtype: str = setting(
        "auto", "type of keys, values and latents in the cache; auto is dtype", choices=KV_DTYPES
    )
    attention: str = setting(
        "full",
        "earlier tokens that attention reads: full, window=4096,sinks=4 or sparse=64x32; or rules "
        "for layers, as in 0-3: full; *: sparse=64x32",
    )
    context: int | None = setting(
        None,
        "longest sequence, in tokens",
        kind="count",
        minimum=1,
        optional_text="the model's own",
    )
    kv_budget_bytes: int | None = setting(
        None,
        "bytes for the key-value cache of one rank, like 2GiB",
        kind="bytes",
        minimum=1,
        optional_text="computed from free memory",
    )
    weights_budget_bytes: int | None = setting(
        None,
        "bytes of a rank's memory for weights, like 64GiB; what does not fit is streamed",
        kind="bytes",
        minimum=1,
        optional_text="all weights stay",
    )
    weights_host_bytes: int = setting(
        0,
        "bytes of host memory for weights of a rank that do not stay on its device",
        kind="bytes",
        minimum=0,
    )
    tiers: str = setting(
        "",
        "where each rank keeps cache beside the device, as in host=64GiB,disk=/path:500GiB; empty "
        "for nowhere",
    )
    block_size: int = setting(16, "tokens in a cache block", minimum=1)
    allocator: str = setting(
        "paged",
        "where blocks of a sequence lie: paged anywhere, dynamic in one growing row",
        choices=ALLOCATORS,
    )
    max_sequences: int = setting(64, "sequences computed in one step", minimum=1)
    objective: str = setting(
        "balanced",
        "what steps are sized for: early tokens or many tokens",
        choices=tuple(OBJECTIVES),
    )
    max_batch_tokens: int | None = setting(
        None,
        "tokens computed in one step",
        kind="count",
        minimum=1,
        optional_text="by the objective",
    )
    chunk_tokens: int | None = setting(
        None,
        "tokens of one prompt computed in one step",
        kind="count",
        minimum=1,
        optional_text="by the objective",
    )
    max_waiting: int = setting(1024, "requests that may wait; more are refused", minimum=0)
    api_key: str | None = setting(
        None, "key that clients must send", secret=True, optional_text="none asked"
    )
    served_model_name: str | None = setting(
        None, "model name in the API", optional_text="the model's directory name"
    )
    threads: int | None = setting(
        None, "compute threads of one rank", minimum=1, optional_text="cores / tp"
    )
    drain_seconds: float = setting(30.0, "time for running requests at shutdown", minimum=0)
    log_level: str = setting("info", "least level logged", choices=LOG_LEVELS)
    max_body_bytes: int = setting(16 * 1024**2, "largest request body", kind="bytes", minimum=1024)
    image_fetch_hosts: str = setting(
        "",
        "hosts images are fetched from, like images.example.org,*.example.net; empty for none",
    )
    image_fetch_seconds: float = setting(10.0, "time to fetch one image", minimum=0)
    image_max_bytes: int = setting(
        10 * 1024**2, "largest image file taken", kind="bytes", minimum=1
    )
    image_max_pixels: int = setting(
        64_000_000, "most pixels an image may have", kind="count", minimum=1
    )
    images_per_request: int = setting(32, "images one request may have", minimum=0)
    encoder_cache_bytes: int = setting(
        256 * 1024**2,
        "bytes for features of images seen before, on each rank",
        kind="bytes",
        minimum=0,
    )
    skip_gate: bool = setting(False, "report ready without known answers (never in production)")
    check_digests: bool = setting(True, "check the store's digests while loading")
    load_from: str = setting(
        "own",
        "who reads the store: each rank its own part, or one rank of a node for all there",
        choices=LOAD_FROM,
    )
    weights_check_seconds: float = setting(
        600.0, "time in which all weights in memory are compared once; 0 for never", minimum=0
    )

    def __post_init__(self) -> None:
        parse_tiers(self.tiers)
        problems = [text for broken, text in self._rules() if broken]
        if problems:
            raise UsageError("settings contradict each other: " + "; ".join(problems))

    def _rules(self) -> list[tuple[bool, str]]:
        chunk, batch = self.chunk_tokens, self.max_batch_tokens
        return [
            (
                self.tp % self.ep != 0,
                f"ep {self.ep} does not divide tp {self.tp}: experts are dealt to the same ranks",
            ),
            (self.port > 65535, f"port {self.port} is above 65535"),
            (
                bool(chunk and batch and chunk > batch),
                f"chunk_tokens {chunk} exceeds max_batch_tokens {batch}",
            ),
            (
                batch is not None and self.max_sequences > batch,
                f"max_sequences {self.max_sequences} exceeds max_batch_tokens {batch}, "
                "and each sequence needs one token a step",
            ),
            (
                self.weights_budget_bytes is not None and self.load_from != "own",
                f"weights_budget_bytes has each rank read its own weights again and again, "
                f"load_from {self.load_from} has one read for all; leave one of the two out",
            ),
            (
                self.weights_host_bytes > 0 and self.weights_budget_bytes is None,
                "weights_host_bytes is for what a weights_budget_bytes leaves out; give that too",
            ),
            (self.api_key == "", "api_key is empty; leave it out to ask for none"),
        ]

    @property
    def step_limits(self) -> StepLimits:
        """What a step may hold: what was given, and the rest by the objective."""
        return choose_limits(
            self.objective,
            max_sequences=self.max_sequences,
            max_batch_tokens=self.max_batch_tokens,
            chunk_tokens=self.chunk_tokens,
        )

    def threads_per_rank(self, cores: int) -> int:
        """Compute threads of each rank on a machine with that many usable cores."""
        return self.threads if self.threads is not None else max(1, cores // self.tp)

    def model_name(self) -> str:
        """The model name clients see."""
        return self.served_model_name or self.model.resolve().name
