"""Layers that quantising hurts most stay as they are, within a budget, and it is recorded."""

import pytest

from firstlight.adapt.shard import ShardOptions, shard
from firstlight.checkpoint.store import open_store
from firstlight.checkpoint.store_layout import payload_bytes
from firstlight.errors import StoreError, UsageError
from k3_layouts import write_layout_miniature
from tiny_checkpoints import write_checkpoint, write_weights

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 4}
SAMPLES = {"text": list(range(5, 45))}


@pytest.fixture
def source(tmp_path):
    """A model whose layer 2 has outliers, which int4 steps cannot follow."""
    tensors = write_checkpoint(tmp_path / "hf", **WIDE)
    tensors = {n: t * 0.05 if "_proj" in n else t for n, t in tensors.items()}
    for name, values in tensors.items():
        if ".layers.2." in name and "_proj" in name:
            values[:, ::32] *= 40
    write_weights(tmp_path / "hf", tensors)
    return tmp_path / "hf"


def made(source, target, **options):
    shard(source, target, ShardOptions(samples=SAMPLES, **options))
    return open_store(target).manifest


def codecs(manifest, layer):
    unit = next(u for u in manifest.units if u.name == f"layer-{layer:03d}")
    return {p.codec for b in unit.blocks for p in b.parts if len(p.shape) == 2}


def test_the_worst_layer_is_kept_and_all_are_recorded(source, tmp_path):
    manifest = made(source, tmp_path / "store", dtype="int4", budget=0.25)
    record = manifest.precision
    errors = {one.layer: one.error for one in record.layers}
    assert max(errors, key=errors.get) == 2 and min(errors.values()) > 0
    assert record.kept == {2} and record.samples == {"text": 40} and record.budget == 0.25
    assert codecs(manifest, 2) == {"keep"} and codecs(manifest, 1) == {"int4"}


@pytest.mark.parametrize(("budget", "count"), [(0.0, 0), (0.24, 0), (0.5, 2), (1.0, 4)])
def test_a_budget_is_never_overdrawn(source, tmp_path, budget, count):
    manifest = made(source, tmp_path / "store", dtype="int8", budget=budget)
    kept = manifest.precision.kept if manifest.precision else set()
    assert len(kept) == count
    plain = made(source, tmp_path / "plain")
    coded = made(source, tmp_path / "coded", dtype="int8")
    made_ones = (manifest, plain, coded)
    size = {n: sum(map(payload_bytes, m.units)) for n, m in zip("mpc", made_ones, strict=True)}
    assert size["m"] - size["c"] <= budget * (size["p"] - size["c"])


def test_fewer_bits_and_larger_scale_groups_stray_more(source, tmp_path):
    error = {
        dtype: made(source, tmp_path / dtype, dtype=dtype, budget=1.0).precision.layers[0].error
        for dtype in ("int8", "int4", "fp8")
    }
    assert error["int8"] < error["fp8"] < error["int4"] < 1


def test_the_choice_survives_an_interruption_and_another_budget_is_another_store(source, tmp_path):
    class Stop(Exception):
        pass

    def stop(phase, done, total, unit):
        if phase == "shard" and unit == "layer-001":
            raise Stop

    options = {"dtype": "int4", "budget": 0.25}
    with pytest.raises(Stop):
        one_by_one = ShardOptions(samples=SAMPLES, progress=stop, threads=1, **options)
        shard(source, tmp_path / "a", one_by_one)
    phases = set()
    resumed = ShardOptions(samples=SAMPLES, progress=lambda p, *_: phases.add(p), **options)
    assert shard(source, tmp_path / "a", resumed).resumed_units == 2 and phases == {"shard"}
    made(source, tmp_path / "b", **options)
    assert (tmp_path / "a/manifest.json").read_bytes() == (
        tmp_path / "b/manifest.json"
    ).read_bytes()
    assert shard(source, tmp_path / "a", resumed).already_complete
    with pytest.raises(StoreError, match="already holds"):
        made(source, tmp_path / "a", dtype="int4", budget=0.5)


def test_experts_are_measured_with_their_layer(tmp_path):
    spec = write_layout_miniature(tmp_path / "hf", quantised=False)
    manifest = made(tmp_path / "hf", tmp_path / "store", dtype="mxfp4", budget=0.2)
    assert len(manifest.precision.layers) == spec.facts.num_layers
    assert all(0 < one.error < 2 for one in manifest.precision.layers)


@pytest.mark.parametrize("options", [{"budget": 1.5}, {"budget": -0.1}])
def test_a_budget_that_is_no_share_is_refused(source, tmp_path, options):
    with pytest.raises(UsageError, match="between 0 and 1"):
        made(source, tmp_path / "store", dtype="int8", **options)
    with pytest.raises(UsageError, match="needs sample text"):
        shard(source, tmp_path / "store", ShardOptions(dtype="int8", budget=0.1))
