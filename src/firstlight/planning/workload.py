"""Owns what is asked of a plan: lengths, concurrency, images, limits; knows no model, no hardware.

Lengths are tokens, times seconds, sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.errors import UsageError
from firstlight.settings.serve import ServeSettings
from firstlight.settings.tiers import TierSettings, parse_tiers

# What `serve` keeps where nobody says otherwise.
ENCODER_CACHE_BYTES = ServeSettings.encoder_cache_bytes


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a service must hold and do.

    Memory is planned for `concurrency` sequences of `context` tokens each. Times are predicted for
    requests of `input_tokens` and `output_tokens`, `images` of `image_tokens` features in each.
    """

    context: int
    concurrency: int
    images: int = 0
    image_tokens: int = 1024
    input_tokens: int = 8192
    output_tokens: int = 1024

    def __post_init__(self) -> None:
        least = {"context": 1, "concurrency": 1, "input_tokens": 1, "output_tokens": 1}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise UsageError(f"{name} must be at least {minimum}, got {getattr(self, name)}")
        if self.images < 0 or self.image_tokens < 1:
            raise UsageError("images must be at least 0, and of at least one token each")
        asked = self.input_tokens + self.output_tokens
        if asked > self.context:
            raise UsageError(
                f"input_tokens {self.input_tokens} and output_tokens {self.output_tokens} exceed "
                f"the context of {self.context}"
            )


def request_lengths(
    context: int, *, input_tokens: int | None = None, output_tokens: int | None = None
) -> tuple[int, int]:
    """Returns prompt and answer tokens that times are predicted for: 8192 and 1024 where nobody
    said, less where the context is short.
    """
    output = output_tokens or min(1024, max(1, context // 4))
    return input_tokens or max(1, min(8192, context - output)), output


@dataclass(frozen=True, kw_only=True)
class PlanRules:
    """How the engine is set up, as far as memory and time depend on it.

    `reserve_share` of each device is kept for framework and driver. `cache_element_bytes` is the
    width of cached values (fp32 recurrent matrices stay fp32); `kv_dtype` `int8` keeps keys, values
    and latents in a byte with scales beside them. `encoder_cache_bytes` are kept on each rank for
    features of images, where a model reads any. `storage_rate` is what one machine reads from
    storage, bytes a second. `context_parallel`: ranks of a TP group may share out the latent cache.
    With `weights_budget_bytes` the weights of a rank that do not fit are streamed. `attention` says
    what layers read of the past and `tiers` where each rank keeps cache beside its device, both as
    `serve` has them.
    """

    dtype: str = "bfloat16"
    block_size: int = 16
    chunk_tokens: int = 2048
    max_batch_tokens: int = 4096
    cache_element_bytes: int | None = None
    kv_dtype: str = "auto"
    encoder_cache_bytes: int = ENCODER_CACHE_BYTES
    reserve_share: float = 0.2
    storage_rate: float = 5e9
    context_parallel: bool = False
    weights_budget_bytes: int | None = None
    attention: str = "full"
    tiers: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.reserve_share < 1:
            raise UsageError(f"reserve_share {self.reserve_share} must be in [0, 1)")
        if self.storage_rate <= 0:
            raise UsageError("storage_rate must be above 0 bytes a second")
        if parse_tiers(self.tiers) != TierSettings() and self.context_parallel:
            raise UsageError(
                "tiers and context_parallel exclude each other: pages of ranks that share a cache "
                "do not go out of a device"
            )
        if not 1 <= self.chunk_tokens <= self.max_batch_tokens:
            raise UsageError(
                f"chunk_tokens {self.chunk_tokens} must be in 1 .. max_batch_tokens "
                f"{self.max_batch_tokens}"
            )


@dataclass(frozen=True)
class Targets:
    """Times a plan must keep, seconds; None: not asked."""

    ttft: float | None = None
    tpot: float | None = None
