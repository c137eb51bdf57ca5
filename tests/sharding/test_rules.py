"""A rule table expands to exactly the tensors its config describes, units in load order."""

import pytest

from firstlight.errors import ConfigError
from firstlight.models.spec import read_model_spec
from firstlight.sharding.rules import Facts, Rule, RuleTable, expand, unit_of, width_axis
from tiny_checkpoints import FAMILIES, tiny_config


def expanded(*rules, **facts):
    return list(expand(RuleTable("t", 1, rules), Facts(2, {"a": 4, "b": 6}, {}, **facts)))


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_sources_are_unique_and_units_contiguous(family):
    tensors = read_model_spec(tiny_config(family)).tensors
    assert len({t.name for t in tensors}) == len({t.source for t in tensors}) == len(tensors)
    units = [t.unit for t in tensors]
    assert list(dict.fromkeys(units)) == ["embed", "layer-000", "layer-001", "head"]
    assert units == sorted(units, key=list(dict.fromkeys(units)).index)


def test_fused_pieces_take_consecutive_rows():
    rows = [
        expanded(Rule("w", f"layers.0.{n}", (dim,), fused=("a", "b", "a"), piece=n))[0].source_rows
        for n, dim in enumerate("aba")
    ]
    assert rows == [(0, 4), (4, 10), (10, 14)]


def test_guards_choose_by_flag_and_by_layer_set():
    rules = (
        Rule("x.{layer}", "layers.{layer}.x", ("a",), when="special"),
        Rule("y.{layer}", "layers.{layer}.y", ("a",), when="on"),
        Rule("z.{layer}", "layers.{layer}.z", ("a",), when="off"),
    )
    names = [
        t.name
        for t in expanded(*rules, layer_sets={"special": frozenset({1})}, flags=frozenset({"on"}))
    ]
    assert names == ["layers.0.y", "layers.1.x", "layers.1.y"]


def test_every_word_of_a_guard_must_hold():
    rule = Rule("x.{layer}", "layers.{layer}.x", ("a",), when="special on")
    sets = {"special": frozenset({1})}
    assert len(expanded(rule, layer_sets=sets, flags=frozenset({"on"}))) == 1
    assert expanded(rule, layer_sets=sets) == []


def test_blocks_multiply_a_rule_and_a_prefix_begins_its_source():
    rule = Rule("{prefix}b.{block}.w", "vision.blocks.{block}.w", ("a",))
    tensors = expanded(rule, num_blocks=2, source_prefix="inner.")
    assert [(t.source, t.name) for t in tensors] == [
        ("inner.b.0.w", "vision.blocks.0.w"),
        ("inner.b.1.w", "vision.blocks.1.w"),
    ]
    assert {t.unit for t in tensors} == {"vision"} and {t.layer for t in tensors} == {None}


def test_experts_of_one_name_are_stacked_and_named_ones_are_not():
    shared = Rule("e.{layer}.{expert}", "layers.{layer}.e", ("a",), dtype="U8", values=2)
    apart = Rule("e.{layer}.{expert}", "layers.{layer}.e.{expert}", ("a",))
    one = expanded(shared, num_experts=1)
    assert [(t.stacked, t.dtype, t.values) for t in one] == [(True, "U8", 2)] * 2
    named = expanded(apart, num_experts=2)
    assert [(t.name, t.stacked) for t in named[:2]] == [
        ("layers.0.e.0", False),
        ("layers.0.e.1", False),
    ]


def test_experts_multiply_a_rule():
    tensors = expanded(Rule("e.{layer}.{expert}", "layers.{layer}.e", ("a",)), num_experts=3)
    assert [(t.layer, t.expert) for t in tensors] == [(n, e) for n in (0, 1) for e in (0, 1, 2)]
    assert {t.name for t in tensors} == {"layers.0.e", "layers.1.e"}


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Rule("w", "embed.w", ("c",)), "'c', which the config does not define"),
        (Rule("w", "embed.w", ("a",), axis="heads"), "'heads', which the model lacks"),
    ],
)
def test_words_the_config_does_not_define_are_refused(rule, words):
    with pytest.raises(ConfigError, match=words):
        expanded(rule)


@pytest.mark.parametrize(
    ("name", "unit"),
    [("embed.weight", "embed"), ("layers.7.mlp.up", "layer-007"), ("head.norm.weight", "head")],
)
def test_a_name_tells_its_unit(name, unit):
    assert unit_of(name) == unit


@pytest.mark.parametrize(("width", "pieces"), [(1536, 48), (97, 97), (100, 4), (31, 1)])
def test_a_width_is_cut_in_pieces_of_at_most_32(width, pieces):
    assert width_axis("width", width).pieces == pieces
