"""What ranks measure beside what was planned, over steps that really ran."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firstlight.cache.cache_group import CacheUsage
from firstlight.cache.far_pool import FarSizes
from firstlight.engine.audit import Audit
from firstlight.engine.settings import EngineSettings
from firstlight.engine.sizing import cache_needs, plan_caches
from firstlight.metrics.series import Series
from firstlight.models.spec import ModelSpec, read_model_spec
from firstlight.planning.constants import HOST_FRAMEWORK_BYTES
from firstlight.runner.protocol import CachesAllocated, RankLoaded, StepDone
from firstlight.schedule.request import MediaItem
from local_engine import EngineShape, LocalEngine, greedy
from tiny_kimi import K3_DATA, MINIATURE
from tiny_models import tiny_config

MIB = 2**20
UNIT = 10_000  # bytes of a block or a slot


def settings_of(**given: Any) -> EngineSettings:
    return EngineSettings(
        model=str(MINIATURE),
        started=0.0,
        api_endpoint="",
        engine_endpoint="",
        encoder_cache_bytes=MIB,
        **given,
    )


def audit_of(spec: ModelSpec, **given: Any) -> Audit:
    return Audit(settings_of(**given), spec, Series())


def images_of(case: str) -> tuple[list[int], list[MediaItem]]:
    """The prompt of a case with its images; pixels are grey, which sizes do not depend on."""
    fields = json.loads((K3_DATA / "cases" / f"{case}.json").read_text())
    config = json.loads((MINIATURE / "config.json").read_text())
    pads = [
        i for i, t in enumerate(fields["input_ids"]) if t == config["media_placeholder_token_id"]
    ]
    media: list[MediaItem] = []
    for index, image in enumerate(fields["images"]):
        grid = tuple(image["grid_thw"])
        media.append(
            MediaItem(
                first=pads[sum(one.count for one in media)],
                count=image["tokens"],
                digest=f"{case} {index}",
                grid=grid,
                patches=bytes(grid[0] * grid[1] * grid[2] * 3 * 14 * 14),
            )
        )
    return fields["input_ids"], media


def serve(engine: LocalEngine, audit: Audit) -> None:
    """Runs all steps and tells the audit of them as a rank would."""
    while (plan := engine.scheduler.schedule()) is not None:
        result = engine.runner.run(plan)
        done = StepDone(
            0,
            result,
            0,
            0,
            activation_bytes=1,
            encoder_bytes=engine.runner.encoder_bytes,
            tier_host_bytes=0 if engine.tiers is None else engine.tiers.host_bytes,
        )
        audit.step(plan, [done], engine.cache.usage)
        engine.scheduler.update(result)


@pytest.mark.parametrize("chunk", [16, 512])
def test_features_of_images_take_what_is_planned(chunk: int) -> None:
    """Both images of the first prompt, one that comes again, and no more than the budget."""
    engine = LocalEngine(MINIATURE, EngineShape(chunk_tokens=chunk, num_slots=24))
    audit = audit_of(engine.spec)
    for case in ("image_two", "image_fit", "image_two"):
        ids, media = images_of(case)
        engine.submit(ids, greedy(2), media)
    serve(engine, audit)
    found = {one.component: one for one in audit.compared}
    assert found["encoder/0"].planned == found["encoder/0"].measured > 0
    assert engine.images is not None and found["encoder/0"].measured == engine.images.used_bytes


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", ["qwen2-window", "llama3"])
def test_caches_take_what_is_planned(kv_dtype: str, name: str) -> None:
    spec = read_model_spec(tiny_config(name))
    given = {"kv_dtype": kv_dtype, "chunk_tokens": 8, "max_sequences": 3}
    audit = audit_of(spec, **given)
    plan = plan_caches(cache_needs(settings_of(**given), spec), available=64 * MIB, budget=4 * MIB)
    held = plan.num_bytes
    audit.caches([CachesAllocated(0, held, held, plan.slot_bytes)], plan)
    (compared,) = (one for one in audit.compared if one.component == "kv/0")
    assert compared.planned == compared.measured == plan.paged_bytes


def test_resident_memory_is_what_is_held_and_written_and_what_a_step_takes() -> None:
    engine = LocalEngine(MINIATURE, EngineShape(num_slots=24))
    audit = audit_of(engine.spec)
    weights = sum(p.nbytes for p in engine.model.parameters())
    audit.loaded([loaded(weights)])
    engine.submit([5] * 40, greedy(1))
    plan = engine.scheduler.schedule()
    assert plan is not None
    result = engine.runner.run(plan)
    rest = HOST_FRAMEWORK_BYTES + weights
    done = StepDone(0, result, rest, 0, activation_bytes=MIB, step_peak_bytes=rest + MIB)
    audit.step(plan, [done], lambda: sized(engine.cache.usage()))
    found = {one.component: one for one in audit.compared}
    groups = engine.cache.usage().groups
    written = UNIT * sum(group.used + group.cached for group in groups)
    assert written == UNIT * (3 + 1), "40 tokens take three blocks and a slot"
    activations = found["activations/0"].planned
    assert activations and found["activations/0"].measured == MIB
    assert found["resident/0"].planned == rest + written + activations
    assert found["framework/0"].measured == HOST_FRAMEWORK_BYTES - written


def test_the_host_tier_takes_what_is_planned(tmp_path: Path) -> None:
    sizes = (FarSizes(4, 0), FarSizes(40, 20))
    shape = EngineShape(num_blocks=12, num_slots=4, far=sizes, tier_folder=str(tmp_path))
    engine = LocalEngine(MINIATURE, shape)
    audit = audit_of(engine.spec)
    for token in range(5, 9):
        engine.submit([token] * 100, greedy(1))
    serve(engine, audit)
    (compared,) = (one for one in audit.compared if one.component == "tier_host/0")
    assert compared.planned == compared.measured == engine.tiers.host_bytes > 0
    engine.tiers.close()


def sized(usage: CacheUsage) -> CacheUsage:
    return replace(usage, groups=tuple(g._replace(unit_bytes=UNIT) for g in usage.groups))


def loaded(weights: int) -> RankLoaded:
    return RankLoaded(
        rank=0,
        source_digest="",
        rank_digest="",
        weights_allocated=weights,
        bytes_read=weights,
        available_bytes=1 << 40,
        resident_bytes=0,
        kernels=["linear: reference"],
        threads=1,
    )
