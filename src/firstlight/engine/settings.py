"""Owns what the engine process is told at start; a record, decided elsewhere."""

import msgspec


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine needs, passed as one JSON argument.

    `model` is a store, a checkpoint folder or a GGUF file. `context_length` None is the model's
    own, `kv_budget_bytes` None is computed from the memory that is left; a model that reads images
    keeps `encoder_cache_bytes` of it for their features. `started` is the moment, in seconds since
    the epoch, from which the start-up timeline counts. A rank takes at most `memory_bytes` (None:
    what is free); `plan` is the path of the plan file it started from, "" without. `parent_id` is
    the process without which the engine ends; EngineProcess fills it in.
    """

    model: str
    started: float
    api_endpoint: str
    engine_endpoint: str
    tp: int = 1
    ep: int = 1
    dtype: str = "float32"
    kv_dtype: str = "auto"
    attention: str = "full"
    tiers: str = ""
    device: str = "cpu"
    threads: int = 1
    context_length: int | None = None
    kv_budget_bytes: int | None = None
    block_size: int = 16
    allocator: str = "paged"
    max_sequences: int = 64
    max_batch_tokens: int = 2048
    chunk_tokens: int = 512
    prompt_share: float = 1.0
    max_waiting: int = 1024
    encoder_cache_bytes: int = 0
    weights_budget_bytes: int | None = None
    weights_host_bytes: int = 0
    check_digests: bool = True
    skip_gate: bool = False
    memory_bytes: int | None = None
    plan: str = ""
    stall_seconds: float = 300.0
    parent_id: int = 0
    load_from: str = "own"
    weights_check_seconds: float = 0.0
