"""One flipped bit in memory is found and named; ranks that differ are told apart."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.checkpoint.consistency import WeightWatch, agree_on_weights
from firstlight.checkpoint.loader import load_into
from firstlight.checkpoint.read_plan import kept_types, parameter_shapes, targets_of
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.torch_types import TORCH_TYPES, bytes_of
from firstlight.checkpoint.watched_weights import checksums
from firstlight.errors import CheckFailed
from firstlight.models.spec import read_model_spec
from firstlight.sharding.layout import Layout
from k3_layouts import write_layout_miniature
from rank_pool import RankFailure

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("kimi")
    write_layout_miniature(made)
    return made


def load(folder, place):
    checkpoint = open_checkpoint(folder)
    spec = read_model_spec(checkpoint.config())
    kept = kept_types(spec)
    parameters = {
        name: torch.empty(shape, dtype=TORCH_TYPES[kept.get(name, "BF16")])
        for name, shape in parameter_shapes(spec, place).items()
    }
    load_into(parameters, checkpoint, spec, place, check=False)
    return parameters, spec


def flip(tensor, byte, bit=0):
    """Flips one bit of a tensor in place."""
    bytes_of(tensor)[byte] ^= 1 << bit


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES), rows=st.integers(1, 4), length=st.integers(1, 50),
    place=st.integers(0, 10_000), bit=st.integers(0, 7),
)  # fmt: skip
def test_any_flipped_bit_changes_its_row_and_no_other(dtype, rows, length, place, bit):
    values = torch.randn(rows, length).mul(9).to(dtype)
    before = checksums(values)
    byte = place % values.nbytes
    flip(values, byte, bit)
    changed = (checksums(values) != before).nonzero().flatten().tolist()
    assert changed == [byte // (values.nbytes // rows)]


def test_long_rows_are_weighed_as_a_whole():
    values = torch.randint(0, 256, (2, 2**20 + 77), dtype=torch.uint8)
    weights = torch.arange(values.shape[1]) * 2 + 1
    assert torch.equal(checksums(values), (values.long() * weights).sum(1))
    swapped = values.flip(1)
    assert not torch.equal(checksums(swapped), checksums(values))


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4, ep=2), Layout(tp=2, pp=2)], ids=str)
def test_a_bit_in_any_tensor_is_named_with_layer_expert_granule_and_rank(folder, layout):
    place = layout.place(layout.world_size - 1)
    parameters, spec = load(folder, place)
    watch = WeightWatch(parameters, spec, place)
    assert watch.check() == []
    wanted = set()
    for target in {t.name: t for t in targets_of(spec, place)}.values():  # the last expert of each
        tensor, rule, part = parameters[target.name], target.rule, target.part
        if part.stop == part.start:
            continue
        last = (part.stop - part.start) * tensor[0].nbytes - 1 if part.padded else tensor.nbytes - 1
        flip(tensor, last)
        axis, granule = spec.facts.axes.get(rule.axis), 0
        if axis is not None:
            piece = 64 if axis.ragged else rule.shape[rule.dim] // axis.pieces
            granule = (part.stop - 1) // piece
        wanted.add((place.rank, rule.unit, rule.name, rule.expert, granule))
    found = watch.check()
    assert {(d.rank, d.unit, d.tensor, d.expert, d.granule) for d in found} == wanted
    assert len(found) == len(wanted) > 50
    damage = next(d for d in found if d.expert is not None)
    assert damage.line() == (
        f"rank {place.rank}: {damage.unit}, {damage.tensor}, expert {damage.expert}, granule "
        f"{damage.granule}"
    )


def test_a_new_baseline_is_taken_after_weights_were_replaced(folder):
    parameters, spec = load(folder, Layout().place(0))
    old = WeightWatch(parameters, spec, Layout().place(0))
    parameters["head.norm.weight"].add_(1)
    assert [d.tensor for d in old.check()] == ["head.norm.weight"]
    new = WeightWatch(parameters, spec, Layout().place(0))
    assert new.check() == [] and new.digest() != old.digest()


def agree(folder, layout, spoil, rank=0):
    """On each rank: loads its part, spoils it where asked, and agrees with the others."""
    place = layout.place(dist.get_rank())
    parameters, spec = load(folder, place)
    version = "v1"
    if spoil and spoil[0] == place.rank:
        if spoil[1] == "version":
            version = "v2"
        else:
            flip(parameters[spoil[1]], 5)
    agree_on_weights(WeightWatch(parameters, spec, place), place, version)
    return place.rank


def test_ranks_that_hold_the_same_agree(ranks, folder):
    assert ranks(4).run(agree, folder, Layout(tp=2, dp=2, ep=2), None) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("layout", "spoil", "words"),
    [
        (Layout(tp=2), (1, "version"), ("ranks [0] loaded version v1", "[1] loaded version v2")),
        (
            Layout(tp=3),
            (2, "layers.1.attention_norm.weight"),
            ("attention_norm", "ranks [2] differs from ranks [0, 1]"),
        ),
        (
            Layout(tp=1, dp=2, ep=1),
            (1, "layers.0.mlp.up_proj.weight"),
            ("up_proj.weight on ranks [1] differs from ranks [0]",),
        ),
    ],
    ids=str,
)
def test_a_rank_that_differs_is_named_on_every_rank(ranks, folder, layout, spoil, words):
    with pytest.raises(RankFailure) as caught:
        ranks(layout.world_size).run(agree, folder, layout, spoil)
    assert isinstance(caught.value.exception, CheckFailed)
    assert all(word in str(caught.value.exception) for word in words)
