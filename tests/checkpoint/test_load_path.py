"""A rank reads its share and no more, past the page cache or through it, with the same values."""

import pytest
import torch

from firstlight.adapt.shard import shard
from firstlight.checkpoint.loader import load_into
from firstlight.checkpoint.read_plan import kept_types, parameter_shapes
from firstlight.checkpoint.store import open_store
from firstlight.checkpoint.torch_types import TORCH_TYPES
from firstlight.errors import DigestMismatch
from firstlight.models.spec import read_model_spec
from firstlight.sharding.layout import Layout
from firstlight.sharding.rules import REPLICATED
from k3_layouts import write_layout_miniature
from tiny_checkpoints import tiny_config, write_checkpoint

WIDE = {
    "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 4096,
}  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    tensors = write_checkpoint(folder / "hf", dtype=torch.bfloat16, **WIDE)
    shard(folder / "hf", folder / "store")
    return open_store(folder / "store"), read_model_spec(tiny_config(**WIDE)), tensors


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi")
    spec = write_layout_miniature(folder / "hf")
    shard(folder / "hf", folder / "store")
    return open_store(folder / "store"), spec


def load(store, spec, place, **options):
    kept = kept_types(spec)
    parameters = {
        name: torch.full(shape, 7, dtype=TORCH_TYPES[kept.get(name, "F32")])
        for name, shape in parameter_shapes(spec, place).items()
    }
    return parameters, load_into(parameters, store, spec, place, **options)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_a_rank_of_degree_t_reads_one_tth_and_what_is_replicated(wide, degree):
    store, spec, tensors = wide
    shared = sum(tensors[r.source].nbytes for r in spec.tensors if r.axis == REPLICATED)
    total = sum(tensors[r.source].nbytes for r in spec.tensors)
    for rank in range(degree):
        _, report = load(store, spec, Layout(tp=degree).place(rank))
        wanted = (total - shared) / degree + shared
        assert abs(report.bytes_read - wanted) <= 0.01 * wanted


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4, ep=2), Layout(pp=2, tp=3)], ids=str)
def test_direct_reads_fill_the_same_values(kimi, layout):
    store, spec = kimi
    for rank in range(layout.world_size):
        place = layout.place(rank)
        cached, plain = load(store, spec, place, direct=False)
        passed, report = load(store, spec, place, direct=True)
        assert not plain.direct and report.digest == plain.digest
        assert all(
            torch.equal(passed[name].view(torch.uint8), cached[name].view(torch.uint8))
            for name in cached
        )


def test_large_granules_are_read_direct_too(wide):
    store, spec, _ = wide
    place = Layout().place(0)
    kept, _ = load(store, spec, place, direct=False)
    passed, report = load(store, spec, place, direct=True)
    assert all(torch.equal(passed[name], kept[name]) for name in kept)
    assert report.threads >= 1


def test_damage_is_found_by_direct_reads(kimi, tmp_path):
    store, spec = kimi
    path = store.bin_path("layer-001")
    raw = path.read_bytes()
    try:
        changed = bytearray(raw)
        changed[len(raw) // 2] ^= 1
        path.write_bytes(changed)
        with pytest.raises(DigestMismatch, match="unit layer-001"):
            load(store, spec, Layout().place(0), direct=True)
    finally:
        path.write_bytes(raw)
