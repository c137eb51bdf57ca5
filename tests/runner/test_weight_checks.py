"""What kernels read is what is watched: a bit flipped in that very memory is found and named."""

import ctypes
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from firstlight.adapt.shard import shard
from firstlight.assembly.build import BuildOptions, assemble
from firstlight.assembly.source import open_source
from firstlight.checkpoint.consistency import WeightWatch
from firstlight.kernels.builtin import reference_kernels
from firstlight.kernels.packed_weight import PackedWeight
from firstlight.kernels.reference.packed import pack_weight_as, unpack
from firstlight.parallel.mesh import Mesh, node_group, tensor_group
from firstlight.runner.protocol import CheckWeights
from firstlight.runner.weight_checks import RankWeights, reading_group
from firstlight.sharding.layout import Layout
from k3_layouts import write_layout_miniature
from local_engine import EngineShape, LocalEngine, fast_kernels, greedy
from tiny_models import tiny_config, write_checkpoint

KERNELS = fast_kernels()
packs = pytest.mark.skipif(not KERNELS.packs_weights, reason="no kernels for packed weights here")
ALL = 2**40


def silent(*_):
    """Hears of no progress."""


def loaded(folder, kernels, mesh=None, **options):
    mesh, source = mesh or Mesh(Layout().place(0)), open_source(folder)
    how = BuildOptions(torch.float32, torch.device("cpu"), 512, **options)
    model = assemble(source.spec, source.weights, mesh=mesh, kernels=kernels, options=how)
    return RankWeights(model, source, mesh=mesh, kernels=kernels, options=how)


def flip(tensor, byte, bit=0):
    """Flips a bit where the tensor's values lie, past torch."""
    at = ctypes.c_ubyte.from_address(tensor.data_ptr() + byte)
    at.value ^= 1 << bit


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("weights")
    for name, seed in (("one", 0), ("two", 1)):
        write_checkpoint(made / name, tiny_config("smollm2", vocab_size=320), seed=seed)
        path = made / name / "model.safetensors"
        rounded = {n: w.bfloat16().float() for n, w in load_file(path).items()}
        save_file(rounded, path)  # values that packing makes smaller
    return made


def answers(folder, model, kernels):
    """Greedy tokens, through a cache, of the model as it is."""
    return [o.token_ids for o in LocalEngine(folder, EngineShape(), kernels, model).run(
        [[5, 6, 7], list(range(9, 60))], greedy(8)
    )]  # fmt: skip


@packs
def test_every_packed_weight_is_watched_where_kernels_read_it(folders):
    weights = loaded(folders / "one", KERNELS)
    held = weights.model.weights
    packed = {n: w for n, w in held.items() if isinstance(w, PackedWeight)}
    assert weights.check(CheckWeights(1, ALL)).damages == []
    for number, (name, held_weight) in enumerate(held.items()):
        data = held_weight.data if isinstance(held_weight, PackedWeight) else held_weight
        flip(data, data.nbytes - 1)
        (damage,) = weights.check(CheckWeights(2 + number, ALL)).damages
        assert damage.tensor == name and damage.rank == 0
        flip(data, data.nbytes - 1)
    # What is watched is what is used: without it the model says something else.
    before = answers(folders / "one", weights.model.module, KERNELS)
    assert len(packed) + 2 * 4 + 1 == len(held)
    for weight in packed.values():
        ctypes.memset(weight.data.data_ptr(), 0, weight.data.nbytes)
    assert answers(folders / "one", weights.model.module, KERNELS) != before


def test_a_round_is_cut_into_turns_and_finds_the_same(folders):
    weights = loaded(folders / "one", reference_kernels())
    name = "layers.2.mlp.down_proj.weight"
    flip(weights.model.weights[name], 3)
    found, turns, through = [], 0, False
    while not through:
        checked = weights.check(CheckWeights(1, 1000))
        found, turns, through = found + checked.damages, turns + 1, checked.through
    assert turns > 10 and [d.line() for d in found] == [f"rank 0: layer-002, {name}, granule 0"]
    assert weights.check(CheckWeights(1, ALL)).num_bytes == 0  # this round is over
    assert len(weights.check(CheckWeights(2, ALL)).damages) == 1


@pytest.mark.parametrize("name", ["affine4", "scaled8", "bfloat16"])
@pytest.mark.parametrize("dim", [0, 1])
def test_packed_columns_are_named_by_their_granule(folders, name, dim):
    source = open_source(folders / "one")
    rule = "layers.0.mlp.gate_proj.weight" if dim == 0 else "layers.0.mlp.down_proj.weight"
    rows, columns = next(r.shape for r in source.spec.tensors if r.name == rule)
    values = torch.arange(rows * columns).remainder(16).sub(8).float().view(rows, columns)
    data = pack_weight_as(values.contiguous(), name)
    held = PackedWeight(name, rows, columns, data)
    watch = WeightWatch({rule: held}, source.spec, Layout().place(0))
    pieces = source.spec.facts.axes["width"].pieces
    for byte in (0, data.nbytes // 2 + 5, data.nbytes - 1):
        before = unpack(held)
        flip(data, byte)
        changed = (unpack(held) != before).nonzero()[:, dim] // ((rows, columns)[dim] // pieces)
        (damage,) = watch.check()
        assert set(changed.tolist()) <= set(range(damage.granule, damage.granule + damage.granules))
        flip(data, byte)


@pytest.mark.parametrize("kernels", [reference_kernels(), pytest.param(KERNELS, marks=packs)])
def test_other_weights_take_their_place(folders, kernels):
    weights = loaded(folders / "one", kernels)
    module = weights.model.module
    memory = {n: w.data.data_ptr() for n, w in weights.model.weights.items()}
    told = []
    agreed = weights.reload(folders / "two", progress=silent, on_replaced=lambda: told.append(1))
    assert (agreed.problem, told) == ("", [1])
    assert agreed.source_digest == open_source(folders / "two").digest
    fresh = loaded(folders / "two", kernels).model.module
    assert answers(folders / "two", module, kernels) == answers(folders / "two", fresh, kernels)
    if not weights.model.packed.weights:
        assert {n: w.data.data_ptr() for n, w in weights.model.weights.items()} == memory
    assert weights.check(CheckWeights(7, ALL)).damages == []


def test_a_source_that_cannot_be_read_is_told_and_nothing_is_checked(folders, tmp_path):
    weights = loaded(folders / "one", reference_kernels())
    agreed = weights.reload(tmp_path / "none", progress=silent, on_replaced=silent)
    assert "no such file" in agreed.problem
    checked = weights.check(CheckWeights(1, ALL))
    assert checked.through and checked.num_bytes == 0
    assert not weights.reload(folders / "one", progress=silent, on_replaced=silent).problem


def start_differing(folders, spoil, rank=0):
    """On each of two ranks: what a start finds, rank 1 having other weights where asked."""
    rank, layout = dist.get_rank(), Layout(tp=2)
    mesh = Mesh(layout.place(rank), tensor_group(layout, rank))
    source = open_source(folders / "one")
    if spoil == "version" and rank:
        source = replace(source, digest="another version")
    how = BuildOptions(torch.float32, torch.device("cpu"), 512)
    kernels = reference_kernels()
    model = assemble(source.spec, source.weights, mesh=mesh, kernels=kernels, options=how)
    if spoil == "value" and rank:
        flip(model.weights["layers.1.attention_norm.weight"], 2)
    problem = "the disk is gone" if spoil == "failed" and rank else ""
    weights = RankWeights(model, source, mesh=mesh, kernels=kernels, options=how)
    return weights.agree(problem).problem


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("", ()),
        ("version", ("ranks [0] loaded version", "ranks [1] loaded version another")),
        ("value", ("attention_norm.weight on ranks [1] differs from ranks [0]",)),
        ("failed", ("rank 1: the disk is gone",)),
    ],
)
def test_ranks_that_differ_are_refused_by_name(ranks, folders, spoil, words):
    found = ranks(2).run(start_differing, folders, spoil)
    assert found[0] == found[1] and bool(found[0]) == bool(words)
    assert all(word in found[0] for word in words)


def load_through_nodes(folder, layout, rank=0):
    """On each rank: loads with one reader a node; which rank read, and what it came to hold."""
    rank = dist.get_rank()
    group = node_group(timeout_seconds=60, node=f"host-{rank // 2}")
    source, mesh = open_source(folder), Mesh(layout.place(rank), tensor_group(layout, rank))
    assert reading_group("own") is None
    sums = []
    for leader_of in (group, None):
        how = BuildOptions(torch.float32, torch.device("cpu"), 512, leader_of=leader_of)
        seen = []
        model = assemble(
            source.spec, source.weights, mesh=mesh, kernels=reference_kernels(), options=how,
            progress=lambda phase, done, total, unit, seen=seen: seen.append((done, total)),
        )  # fmt: skip
        assert seen[-1][0] == seen[-1][1] > 0  # each rank tells how far it is
        sums.append(WeightWatch(model.weights, source.spec, mesh.place).digest())
    return dist.get_world_size(group), dist.get_global_rank(group, 0), sums[0] == sums[1]


def test_each_node_has_one_reader(ranks, tmp_path):
    write_layout_miniature(tmp_path / "hf")
    shard(tmp_path / "hf", tmp_path / "store")
    found = ranks(4).run(load_through_nodes, tmp_path / "store", Layout(tp=4))
    assert found == [(2, 0, True), (2, 0, True), (2, 2, True), (2, 2, True)]
