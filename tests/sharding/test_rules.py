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
