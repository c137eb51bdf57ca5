"""Slices of any legal layout tile every tensor; illegal layouts are refused with the legal ones."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from firstlight.errors import LayoutError
from firstlight.models.spec import read_model_spec
from firstlight.sharding.layout import Layout
from firstlight.sharding.rules import (
    EXPERT,
    Axis,
    Facts,
    Rule,
    RuleTable,
    expand,
    vocabulary_axis,
    width_axis,
)
from firstlight.sharding.slices import (
    check_layout,
    covers_once,
    cut,
    granule_count,
    held_bytes,
    is_legal,
    legal_degrees,
    local_shape,
    slice_for,
)
from tiny_checkpoints import FAMILIES, tiny_config
from tiny_kimi import K3_DATA, linear_config, miniature_config, wide_config

DEGREES = st.integers(1, 16)


@st.composite
def axes(draw):
    kind = draw(st.sampled_from(["plain", "replicable", "ragged"]))
    if kind == "ragged":
        rows = draw(st.integers(1, 2000))
        return vocabulary_axis(rows), rows
    axis = Axis("a", draw(st.integers(1, 24)), replicable=kind == "replicable")
    return axis, axis.pieces * draw(st.integers(1, 8))


@given(axes(), DEGREES)
def test_parts_tile_an_axis_in_order(axis_and_length, degree):
    axis, length = axis_and_length
    assume(is_legal(axis, axis.pieces, degree))
    parts = [cut(axis, length, degree, index) for index in range(degree)]
    runs = sorted({(p.start, p.stop) for p in parts if p.stop > p.start})
    assert [start for start, _ in runs] == [0, *(stop for _, stop in runs[:-1])]
    assert runs[-1][1] == length
    assert len({part.length for part in parts}) == 1, "every rank allocates the same"
    if not axis.replicable:
        assert sum(p.stop - p.start for p in parts) == length


@given(axes(), DEGREES)
def test_a_part_never_cuts_a_piece(axis_and_length, degree):
    axis, length = axis_and_length
    assume(is_legal(axis, axis.pieces, degree))
    piece = 64 if axis.ragged else length // axis.pieces
    for index in range(degree):
        part = cut(axis, length, degree, index)
        assert part.start % piece == 0 or part.start == length
        assert part.stop % piece == 0 or part.stop == length


@given(axes(), DEGREES)
def test_an_illegal_degree_is_refused(axis_and_length, degree):
    axis, length = axis_and_length
    assume(not is_legal(axis, axis.pieces, degree))
    with pytest.raises(LayoutError, match="cannot be cut"):
        cut(axis, length, degree, 0)


@given(pieces=st.integers(1, 96), per_piece=st.integers(1, 64), group=st.sampled_from([1, 32, 128]))
def test_granules_cut_neither_pieces_nor_groups(pieces, per_piece, group):
    axis, elements = Axis("a", pieces), pieces * per_piece
    granules = granule_count(axis, elements, group)
    assert pieces % granules == 0
    if granules > 1:
        assert elements // granules % group == 0


def test_granules_of_the_published_expert_width():
    """Width 3072 in pieces of 32: 96 granules for groups of 32, 24 for blocks of 128."""
    axis = width_axis("width", 3072)
    assert granule_count(axis, 3072, 32) == 96
    assert granule_count(axis, 3072, 128) == 24


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    heads=st.sampled_from([1, 2, 3, 4, 6, 12]),
    groups=st.sampled_from([1, 2, 3, 4]),
    width=st.sampled_from([64, 96, 100, 384, 97]),
    vocab=st.integers(1, 700),
    tp=st.integers(1, 12),
    pp=st.integers(1, 2),
    dp=st.integers(1, 2),
)
def test_every_tensor_of_every_family_is_covered(family, heads, groups, width, vocab, tp, pp, dp):
    assume(heads % groups == 0)
    spec = read_model_spec(
        tiny_config(
            family, num_attention_heads=heads, num_key_value_heads=heads // groups,
            head_dim=4, intermediate_size=width, vocab_size=vocab,
        )
    )  # fmt: skip
    layout = Layout(tp=tp, pp=pp, dp=dp)
    if tp not in legal_degrees(spec.facts.axes, 16):
        with pytest.raises(LayoutError, match="legal tp for this model: 1"):
            check_layout(spec.facts, layout)
        return
    check_layout(spec.facts, layout)
    for tensor in spec.tensors:
        if tensor.unit != "embed" or "tied" not in spec.facts.flags or pp == 1:
            assert covers_once(tensor, spec.facts, layout), tensor.name


def mixture(num_experts=8, width=96):
    table = RuleTable(
        "mixture", 1,
        (
            Rule("l.{layer}.e.{expert}.up", "layers.{layer}.experts.up", ("ffn", "hidden"),
                 EXPERT),
            Rule("l.{layer}.e.{expert}.down", "layers.{layer}.experts.down", ("hidden", "ffn"),
                 EXPERT, dim=1),
            Rule("l.{layer}.router", "layers.{layer}.router", (num_experts, "hidden")),
        ),
    )  # fmt: skip
    axes = (width_axis(EXPERT, width), Axis("heads", 12))
    dims = {"ffn": width, "hidden": 8}
    facts = Facts(2, dims, {a.name: a for a in axes}, num_experts=num_experts)
    return tuple(expand(table, facts)), facts


@pytest.mark.parametrize("layout", [
    Layout(), Layout(tp=3), Layout(tp=3, ep=3), Layout(dp=2, ep=2), Layout(tp=3, dp=2, ep=2),
    Layout(dp=8, ep=8), Layout(pp=2, dp=4, ep=4),
], ids=str)  # fmt: skip
def test_experts_are_dealt_by_id_and_cut_by_width(layout):
    tensors, facts = mixture()
    if layout.ep == 3:
        with pytest.raises(LayoutError, match="ep 3 does not divide"):
            check_layout(facts, layout)
        return
    check_layout(facts, layout)
    assert all(covers_once(tensor, facts, layout) for tensor in tensors)
    experts = [t for t in tensors if t.expert is not None]
    for rank in range(layout.world_size):
        place = layout.place(rank)
        held = {t.expert for t in experts if slice_for(t, facts, place) is not None}
        assert len(held) == 8 // layout.ep


def test_a_cover_with_a_hole_or_an_overlap_is_noticed():
    tensors, facts = mixture()
    router = tensors[-1]
    assert covers_once(router, facts, Layout(tp=3))
    broken = Facts(2, facts.dims, {EXPERT: Axis(EXPERT, 5)}, num_experts=8)
    assert not covers_once(tensors[0], broken, Layout(tp=5))


def test_only_the_first_rank_of_a_sum_holds_its_bias():
    spec = read_model_spec(tiny_config("llama-bias", intermediate_size=64))
    bias = next(t for t in spec.tensors if t.name.endswith("o_proj.bias"))
    parts = [slice_for(bias, spec.facts, Layout(tp=2).place(rank)) for rank in range(2)]
    assert [part.zero for part in parts] == [False, True]


def test_held_bytes_add_up_to_the_allocated_shapes():
    spec = read_model_spec(tiny_config(intermediate_size=64))
    place = Layout(tp=2).place(1)
    shapes = [local_shape(t, slice_for(t, spec.facts, place)) for t in spec.tensors]
    expected = sum(4 * s[0] * (s[1] if len(s) > 1 else 1) for s in shapes)
    assert held_bytes(spec.tensors, spec.facts, place, element_bytes=4) == expected


def test_expert_width_is_cut_by_what_ep_leaves():
    _, facts = mixture()
    with pytest.raises(LayoutError, match=r"tp x dp / ep = 4 does not divide expert \(3 pieces"):
        check_layout(facts, Layout(tp=4))
    check_layout(facts, Layout(tp=4, ep=4))
    check_layout(facts, Layout(tp=6, ep=2))


def test_the_miniature_is_cut_by_nothing_but_ep():
    facts = read_model_spec(miniature_config()).facts
    assert legal_degrees(facts.axes, 64) == [1]
    with pytest.raises(LayoutError) as caught:
        check_layout(facts, Layout(tp=2))
    for reason in ("kda_heads (5 pieces of one KDA head)", "expert (1 piece of one group of 32"):
        assert reason in str(caught.value)
    with pytest.raises(LayoutError, match=r"heads \(4 pieces of one MLA head\)"):
        check_layout(facts, Layout(tp=5))
    with pytest.raises(LayoutError, match="tp x dp / ep = 2"):
        check_layout(facts, Layout(dp=2))
    check_layout(facts, Layout(dp=4, ep=4, pp=3))


@st.composite
def wide_layouts(draw):
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    dp = draw(st.integers(1, 3))
    ep = draw(st.sampled_from([e for e in (1, 2, 3, 4, 6, 12) if tp * dp % e == 0]))
    return Layout(tp=tp, dp=dp, pp=draw(st.integers(1, 3)), ep=ep)


WIDE = {name: read_model_spec(make()) for name, make in
        (("kimi_k3", wide_config), ("kimi_linear", linear_config))}  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(family=st.sampled_from(sorted(WIDE)), layout=wide_layouts())
def test_every_kimi_tensor_is_covered_by_any_legal_layout(family, layout):
    spec = WIDE[family]
    if 12 % layout.expert_tp:  # the width of an expert has 12 pieces
        with pytest.raises(LayoutError, match="does not divide expert"):
            check_layout(spec.facts, layout)
        return
    check_layout(spec.facts, layout)
    for tensor in spec.tensors:
        assert tensor.unused or covers_once(tensor, spec.facts, layout), tensor.name


@pytest.fixture(scope="module")
def published():
    return read_model_spec(json.loads((K3_DATA / "real" / "config.json").read_text()))


@pytest.mark.parametrize("layout", [Layout(tp=8), Layout(tp=8, ep=8)], ids=str)
def test_a_rank_of_the_published_model_holds_an_exact_number_of_bytes(published, layout):
    """191.8 GiB: an eighth of what is cut; all of routers, latent projections, tower and norms."""
    check_layout(published.facts, layout)
    held = {
        held_bytes(published.tensors, published.facts, layout.place(rank), element_bytes=2)
        for rank in (0, 7)
    }
    assert held == {205_951_299_312}


def test_two_stages_share_the_published_model_without_a_rest(published):
    layout = Layout(tp=8, pp=2)
    stages = [
        held_bytes(published.tensors, published.facts, layout.place(8 * n), element_bytes=2)
        for n in range(2)
    ]
    assert sum(stages) == 205_951_299_312
