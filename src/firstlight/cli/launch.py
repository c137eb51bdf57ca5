"""Owns the start of a service on this machine: port, engine process, then the API in this process.

The engine process begins first, because its ranks have most to do; it is a black box here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from firstlight.checkpoint.store_names import MODEL_FOLDER, is_store
from firstlight.cli.device_facts import DeviceFacts, device_facts
from firstlight.engine.process import EngineProcess
from firstlight.engine.settings import EngineSettings
from firstlight.engine.sizing import cache_needs, left_for_caches, plan_caches
from firstlight.engine.socket_folder import make_socket_folder
from firstlight.engine.zmq_client import ZmqEngineClient
from firstlight.errors import ConfigError, UsageError
from firstlight.models.spec import ModelSpec, with_attention
from firstlight.planning.plan_file import read_plan
from firstlight.planning.start import check_plan, check_start, start_load
from firstlight.runner.model_path import read_spec
from firstlight.runner.tier_files import require_room
from firstlight.settings.serve import ServeSettings
from firstlight.settings.tiers import parse_tiers
from firstlight.sharding.layout import Layout
from firstlight.sharding.slices import check_layout

if TYPE_CHECKING:
    from firstlight.inputs.images.load import ImageLoader
    from firstlight.server.context import AppContext

WATCH_SECONDS = 0.5
# A drained engine ends within this time; one that is still loading is not waited for longer.
ENGINE_SECONDS = 5.0


def launch(settings: ServeSettings) -> int:
    """Serves until a signal or a failure ends it; returns the exit code.

    Raises what is wrong with port, path, config, layout, context or cache budget before any weight
    is read.
    """
    from firstlight.server.listener import bind_socket

    started = process_started()
    spec = read_spec(settings.model)
    plan = read_plan(settings.plan) if settings.plan else None
    if plan is not None:
        check_plan(plan, spec, settings)
    check_layout(spec.facts, Layout(tp=settings.tp, ep=settings.ep))
    check_reader(settings)
    listener = bind_socket(settings.host, settings.port)
    configure_logging(settings.log_level)
    folder = make_socket_folder()
    try:
        device = device_facts(settings.device, settings.tp, settings.dtype, settings.kv_dtype)
        engine_settings = make_engine_settings(settings, folder, started, device.name)
        free, owned = device.available_bytes, device.owned
        check_start(spec, start_load(settings, spec, free_bytes=free, owned=owned, plan=plan))
        tiers = parse_tiers(settings.tiers)
        if tiers.folder is not None:
            require_room(tiers.folder, tiers.disk_bytes, ranks=settings.tp)
        check_cache_fits(engine_settings, spec, device)
        return _run(settings, spec, listener, engine_settings)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(
    settings: ServeSettings,
    spec: ModelSpec,
    listener: socket.socket,
    engine_settings: EngineSettings,
) -> int:
    signal.signal(signal.SIGTERM, _end)  # until the server takes signals over, which drains
    process = EngineProcess(engine_settings)
    try:
        return asyncio.run(_serve(settings, spec, (engine_settings, process), listener))
    except (SystemExit, KeyboardInterrupt):
        process.stop(patience_seconds=0.0)
        raise
    finally:
        process.stop(patience_seconds=ENGINE_SECONDS)


def _end(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def check_cache_fits(settings: EngineSettings, spec: ModelSpec, device: DeviceFacts) -> None:
    """Refuses a cache that cannot hold one sequence, from the memory that is free before loading.

    Raises UsageError for a context the model lacks, OutOfBudget with ways out in numbers. Ranks
    that have loaded are asked again, and have less.
    """
    patterned = with_attention(spec, settings.attention, settings.block_size)
    needs, tiers = cache_needs(settings, patterned), parse_tiers(settings.tiers)
    free = left_for_caches(device.available_bytes, needs, tiers, owned=device.owned)
    plan_caches(needs, available=free, budget=settings.kv_budget_bytes, owned=device.owned)


def check_reader(settings: ServeSettings) -> None:
    """Raises UsageError where one rank cannot read for all."""
    if settings.load_from != "own" and not is_store(settings.model):
        raise UsageError(
            f"load_from {settings.load_from}: one rank can read for all from a store only; make "
            f"one with `firstlight shard {settings.model} STORE`, or leave load_from out"
        )


def make_engine_settings(
    settings: ServeSettings, directory: Path, started: float, device: str
) -> EngineSettings:
    """Returns what the engine process is told; `directory` holds the sockets between processes,
    `device` is the platform's name.
    """
    cores, limits = len(os.sched_getaffinity(0)), settings.step_limits
    return EngineSettings(
        model=str(settings.model),
        started=started,
        api_endpoint=f"ipc://{directory}/api",
        engine_endpoint=f"ipc://{directory}/engine",
        tp=settings.tp,
        ep=settings.ep,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        tiers=settings.tiers,
        attention=settings.attention,
        device=device,
        threads=settings.threads_per_rank(cores),
        context_length=settings.context,
        kv_budget_bytes=settings.kv_budget_bytes,
        block_size=settings.block_size,
        allocator=settings.allocator,
        max_sequences=settings.max_sequences,
        max_batch_tokens=limits.max_batch_tokens,
        chunk_tokens=limits.chunk_tokens,
        prompt_share=limits.prompt_share,
        max_waiting=settings.max_waiting,
        encoder_cache_bytes=settings.encoder_cache_bytes,
        weights_budget_bytes=settings.weights_budget_bytes,
        weights_host_bytes=settings.weights_host_bytes,
        check_digests=settings.check_digests,
        skip_gate=settings.skip_gate,
        memory_bytes=settings.memory_bytes,
        plan=str(settings.plan) if settings.plan else "",
        load_from=settings.load_from,
        weights_check_seconds=settings.weights_check_seconds,
    )


async def _serve(
    settings: ServeSettings,
    spec: ModelSpec,
    engine: tuple[EngineSettings, EngineProcess],
    listener: socket.socket,
) -> int:
    # Imported while the engine is loading: FastAPI takes longer than everything above.
    from firstlight.server.serving import serve_app

    engine_settings, process = engine
    client = ZmqEngineClient(
        api_endpoint=engine_settings.api_endpoint, engine_endpoint=engine_settings.engine_endpoint
    )
    client.start()
    watch = asyncio.create_task(_watch(process, client), name="engine watch")
    try:
        context = make_context(settings, spec, client)
        host, port = listener.getsockname()[:2]
        logging.getLogger("firstlight").info("listening on http://%s:%d", host, port)
        return await serve_app(context, listener)
    finally:
        watch.cancel()


def make_context(settings: ServeSettings, spec: ModelSpec, client: ZmqEngineClient) -> AppContext:
    """Returns the record the server is made from: tokenizer, templates, defaults and limits."""
    from firstlight.inputs.chat_format import load_chat_format
    from firstlight.inputs.generation_defaults import read_generation_defaults
    from firstlight.inputs.tokenizer import load_tokenizer
    from firstlight.metrics.series import Series
    from firstlight.server.context import AppContext, Limits

    folder = settings.model / MODEL_FOLDER if is_store(settings.model) else settings.model
    tokenizer = load_tokenizer(folder)
    chat_format = load_chat_format(folder, tokenizer)
    defaults = read_generation_defaults(folder if folder.is_dir() else folder.parent)
    ends = tuple(dict.fromkeys((*defaults.eos_ids, *tokenizer.eos_ids)))
    series = Series()
    return AppContext(
        engine=client,
        tokenizer=tokenizer,
        chat_format=chat_format if chat_format.has_template else None,
        defaults=dataclasses.replace(defaults, eos_ids=ends),
        model_names=(settings.model_name(),),
        context_length=settings.context or spec.context_length,
        recorder=series,
        read_series=series.flatten,
        limits=Limits(max_body_bytes=settings.max_body_bytes, drain_seconds=settings.drain_seconds),
        api_keys=(settings.api_key,) if settings.api_key else (),
        created=int(time.time()),
        images=make_image_loader(settings, spec, folder) if spec.reads_images else None,
    )


def make_image_loader(settings: ServeSettings, spec: ModelSpec, folder: Path) -> ImageLoader:
    """Returns what loads the images of requests; `folder` holds the model's small files.

    Raises ConfigError when the model does not say how pictures are preprocessed.
    """
    from firstlight.inputs.images.load import ImageLoader
    from firstlight.inputs.images.policy import ImagePolicy, parse_hosts
    from firstlight.inputs.images.preprocess_settings import FILE_NAME, read_preprocess_settings

    preprocessing = read_preprocess_settings(folder)
    if preprocessing is None:
        raise ConfigError(f"{folder} has no {FILE_NAME}; copy it from where the model comes from")
    policy = ImagePolicy(
        allowed_hosts=parse_hosts(settings.image_fetch_hosts),
        max_bytes=settings.image_max_bytes,
        max_pixels=settings.image_max_pixels,
        max_images=settings.images_per_request,
        max_tokens=settings.context or spec.context_length,
        fetch_seconds=settings.image_fetch_seconds,
    )
    return ImageLoader(preprocessing, policy)


async def _watch(process: EngineProcess, client: ZmqEngineClient) -> None:
    """An engine that was killed can say nothing; its parent sees the exit code."""
    while (code := process.poll()) is None:
        await asyncio.sleep(WATCH_SECONDS)
    await asyncio.sleep(WATCH_SECONDS)  # its last words may still be on the way
    if not client.has_stopped:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        client.engine_ended(f"the engine process {how}", exit_code=code if code > 0 else 4)


def process_started() -> float:
    """Returns when this process began, in seconds since the epoch."""
    import psutil

    return float(psutil.Process().create_time())


def configure_logging(level: str) -> None:
    """Sends log lines to standard error, one line each, time first."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
