"""Any legal layout, loaded from a checkpoint or from its store, re-assembles to the source."""

import msgspec
import pytest
import torch

from firstlight.adapt.shard import ShardOptions, shard
from firstlight.checkpoint.loader import load_into
from firstlight.checkpoint.names import require_match
from firstlight.checkpoint.read_plan import parameter_shapes, plan_tensor_reads, targets_of
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.store import Store, open_store
from firstlight.errors import DigestMismatch, LayoutError, StoreError, TensorError
from firstlight.models.spec import read_model_spec
from firstlight.sharding.layout import Layout
from firstlight.sharding.slices import slice_for
from tiny_checkpoints import FAMILIES, write_checkpoint, write_weights

WIDE = {"num_attention_heads": 12, "hidden_size": 24, "intermediate_size": 384, "head_dim": 4}


def allocate(spec, place, dtype=torch.float32):
    shapes = parameter_shapes(spec, place)
    return {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in shapes.items()}


def assert_slices(parameters, tensors, spec, place):
    for rule in spec.tensors:
        part = slice_for(rule, spec.facts, place)
        if part is None:
            assert rule.name not in parameters
            continue
        loaded = parameters[rule.name]
        expected = tensors[rule.source].to(loaded.dtype)
        length = part.stop - part.start
        if part.zero:
            assert not loaded.any(), rule.name
            continue
        wanted = expected.narrow(part.dim, part.start, length)
        assert torch.equal(loaded.narrow(part.dim, 0, length), wanted), rule.name
        assert not loaded.narrow(part.dim, length, part.padded).any(), rule.name


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(family, **changes)` gives (checkpoint folder, store folder, source tensors)."""
    known = {}

    def make(family="llama", **changes):
        key = (family, tuple(sorted(changes.items())))
        if key not in known:
            folder = tmp_path_factory.mktemp("model")
            tensors = write_checkpoint(folder / "hf", family, shards=2, **changes)
            shard(folder / "hf", folder / "store")
            known[key] = (folder / "hf", folder / "store", tensors)
        return known[key]

    return make


def open_either(kind, hf, store):
    return open_checkpoint(hf) if kind == "checkpoint" else open_store(store)


@pytest.mark.parametrize("kind", ["checkpoint", "store"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_whole(made, family, kind):
    hf, store, tensors = made(family)
    spec = read_model_spec(open_checkpoint(hf).config())
    place = Layout().place(0)
    parameters = allocate(spec, place)
    report = load_into(parameters, open_either(kind, hf, store), spec, place)
    assert_slices(parameters, tensors, spec, place)
    assert report.bytes_read >= sum(t.nbytes for t in tensors.values())
    assert len(report.digest) == 64


LAYOUTS = [
    Layout(tp=2), Layout(tp=3), Layout(tp=4), Layout(tp=12), Layout(tp=2, pp=2), Layout(pp=2),
    Layout(tp=2, dp=2),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["checkpoint", "store"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 12])
@pytest.mark.parametrize("family", ["llama-bias", "llama-tied"])
def test_every_rank_of_a_layout_holds_its_slices(made, family, kv_heads, layout, kind):
    hf, store, tensors = made(family, **WIDE, num_key_value_heads=kv_heads)
    spec = read_model_spec(open_checkpoint(hf).config())
    source = open_either(kind, hf, store)
    for rank in range(layout.world_size):
        place = layout.place(rank)
        if kv_heads % layout.tp and layout.tp % kv_heads:
            with pytest.raises(LayoutError, match="kv_heads"):
                load_into({}, source, spec, place)
            return
        parameters = allocate(spec, place)
        load_into(parameters, source, spec, place)
        assert_slices(parameters, tensors, spec, place)


@pytest.mark.parametrize("kind", ["checkpoint", "store"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_element_type_changes_on_the_way(made, kind, dtype):
    hf, store, tensors = made("llama-bias", **WIDE)
    spec = read_model_spec(open_checkpoint(hf).config())
    place = Layout(tp=2).place(1)
    parameters = allocate(spec, place, dtype)
    load_into(parameters, open_either(kind, hf, store), spec, place)
    assert_slices(parameters, tensors, spec, place)


@pytest.mark.parametrize("kind", ["checkpoint", "store"])
def test_large_tensors_arrive_in_many_reads(tmp_path, kind):
    """Rows beyond one read, granules beyond one read, and a large cast copy."""
    tensors = write_checkpoint(tmp_path / "hf", vocab_size=70_001, hidden_size=64)
    shard(tmp_path / "hf", tmp_path / "store")
    spec = read_model_spec(open_checkpoint(tmp_path / "hf").config())
    source = open_either(kind, tmp_path / "hf", tmp_path / "store")
    for dtype in (torch.float32, torch.bfloat16):
        for rank in range(2):
            place = Layout(tp=2).place(rank)
            parameters = allocate(spec, place, dtype)
            load_into(parameters, source, spec, place)
            assert_slices(parameters, tensors, spec, place)


def test_a_granule_larger_than_a_read_goes_straight_into_place(tmp_path):
    tensors = write_checkpoint(
        tmp_path / "hf", hidden_size=4, head_dim=150_000, vocab_size=8,
        intermediate_size=128)  # fmt: skip
    shard(tmp_path / "hf", tmp_path / "store")
    spec = read_model_spec(open_checkpoint(tmp_path / "hf").config())
    place = Layout(tp=4).place(3)
    for dtype in (torch.float32, torch.bfloat16):
        parameters = allocate(spec, place, dtype)
        load_into(parameters, open_store(tmp_path / "store"), spec, place)
        assert_slices(parameters, tensors, spec, place)


def test_replicas_have_one_digest_and_other_ranks_another(made):
    hf, store, _ = made("llama", **WIDE)
    spec = read_model_spec(open_checkpoint(hf).config())
    for kind in ("checkpoint", "store"):
        source, digests = open_either(kind, hf, store), []
        for rank in range(4):
            place = Layout(tp=2, dp=2).place(rank)
            digests.append(load_into(allocate(spec, place), source, spec, place).digest)
        assert digests[0] == digests[2] != digests[1] == digests[3]


def test_unchecked_loads_claim_no_digest(made):
    hf, store, _ = made()
    spec = read_model_spec(open_checkpoint(hf).config())
    place = Layout().place(0)
    for kind in ("checkpoint", "store"):
        source = open_either(kind, hf, store)
        assert load_into(allocate(spec, place), source, spec, place, check=False).digest == ""


def test_a_rank_of_a_store_reads_only_its_share(made):
    hf, store, _ = made("llama", **WIDE, num_key_value_heads=12)
    spec = read_model_spec(open_checkpoint(hf).config())
    whole, place = Layout().place(0), Layout(tp=4).place(1)
    all_bytes = load_into(allocate(spec, whole), open_store(store), spec, whole).bytes_read
    own_bytes = load_into(allocate(spec, place), open_store(store), spec, place).bytes_read
    assert own_bytes < 0.27 * all_bytes


def test_phases_add_up_and_progress_reaches_the_end(made):
    hf, store, _ = made()
    spec = read_model_spec(open_checkpoint(hf).config())
    place, seen = Layout().place(0), []
    report = load_into(
        allocate(spec, place), open_store(store), spec, place,
        progress=lambda phase, done, total, unit: seen.append((phase, done, total, unit)),
    )  # fmt: skip
    assert set(report.seconds_by_phase) == {"plan", "load"}
    assert seen[-1][:3] == ("load", report.bytes_read, report.bytes_read)
    assert seen[-1][3] in ("embed", "layer-000", "layer-001", "head")


def test_parameters_that_do_not_fit_are_all_named(made):
    hf, _, _ = made()
    spec, place = read_model_spec(open_checkpoint(hf).config()), Layout().place(0)
    parameters = allocate(spec, place)
    del parameters["head.norm.weight"]
    parameters["layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    parameters["layers.0.ghost"] = torch.zeros(1)
    parameters["embed.weight"] = torch.zeros(200, 16, dtype=torch.int8)
    with pytest.raises(TensorError) as caught:
        load_into(parameters, open_checkpoint(hf), spec, place)
    for words in (
        "head.norm.weight: not allocated",
        "layers.0.mlp.up_proj.weight: allocated [3, 3], needs [48, 16]",
        "layers.0.ghost: no rule",
        "embed.weight: allocated as torch.int8",
    ):
        assert words in str(caught.value)


def test_a_tied_alias_is_welcome_only_if_it_shares_memory(made):
    hf, _, tensors = made("llama-tied")
    spec, place = read_model_spec(open_checkpoint(hf).config()), Layout().place(0)
    parameters = allocate(spec, place)
    parameters["head.lm_head.weight"] = parameters["embed.weight"]
    load_into(parameters, open_checkpoint(hf), spec, place)
    assert torch.equal(parameters["head.lm_head.weight"], tensors["model.embed_tokens.weight"])
    parameters["head.lm_head.weight"] = parameters["embed.weight"].clone()
    with pytest.raises(TensorError, match="lm_head"):
        load_into(parameters, open_checkpoint(hf), spec, place)


def test_a_tied_tensor_that_differs_stops_the_load(tmp_path):
    tensors = write_checkpoint(tmp_path, "llama-tied")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    write_weights(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path)
    spec, place = read_model_spec(checkpoint.config()), Layout().place(0)
    with pytest.raises(TensorError, match=r"differs from model\.embed_tokens\.weight"):
        load_into(allocate(spec, place), checkpoint, spec, place)


def test_a_damaged_store_is_never_loaded(tmp_path):
    write_checkpoint(tmp_path / "hf")
    shard(tmp_path / "hf", tmp_path / "store")
    spec = read_model_spec(open_checkpoint(tmp_path / "hf").config())
    path = tmp_path / "store/units/layer-001.bin"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 16
    path.write_bytes(raw)
    store, place = open_store(tmp_path / "store"), Layout().place(0)
    with pytest.raises(DigestMismatch, match=r"unit layer-001, block \w+, granule \d+ \(layers\.1"):
        load_into(allocate(spec, place), store, spec, place)


def test_a_store_of_another_rule_table_is_refused(made):
    hf, store, _ = made()
    spec, place = read_model_spec(open_checkpoint(hf).config()), Layout().place(0)
    opened = open_store(store)
    newer = Store(opened.path, msgspec.structs.replace(opened.manifest, rule_version=99))
    with pytest.raises(StoreError, match="rule table 99"):
        load_into(allocate(spec, place), newer, spec, place)


def test_a_store_of_another_model_is_refused(made):
    hf, _, _ = made()
    _, other, _ = made("llama", intermediate_size=96)
    spec, place = read_model_spec(open_checkpoint(hf).config()), Layout().place(0)
    with pytest.raises(StoreError, match="the store holds"):
        load_into(allocate(spec, place), open_store(other), spec, place)


def test_a_cast_store_holds_and_loads_the_cast_values(tmp_path):
    tensors = write_checkpoint(tmp_path / "hf", "llama-bias")
    shard(tmp_path / "hf", tmp_path / "store", ShardOptions(dtype="bf16"))
    spec = read_model_spec(open_checkpoint(tmp_path / "hf").config())
    place = Layout().place(0)
    parameters = allocate(spec, place)
    load_into(parameters, open_store(tmp_path / "store"), spec, place)
    cast = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert_slices(parameters, cast, spec, place)


def test_planned_reads_are_data_in_file_order(made):
    hf, _, _ = made("llama", **WIDE)
    checkpoint = open_checkpoint(hf)
    spec = read_model_spec(checkpoint.config())
    place = Layout(tp=2).place(1)
    reads = plan_tensor_reads(require_match(checkpoint, spec), targets_of(spec, place))
    (embed,) = [r for r in reads if r.source == "model.embed_tokens.weight"]
    info = checkpoint.tensors[embed.source]
    assert (embed.start, embed.stop, embed.at) == (128, 200, 0)
    assert embed.offset == info.offset + 128 * 24 * 4
    assert embed.num_bytes == 72 * 24 * 4
