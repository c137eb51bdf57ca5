import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.planning.arrangement import arrangements
from firstlight.planning.rehearse import rehearse
from firstlight.planning.weights import weight_table
from firstlight.sharding.layout import Layout
from firstlight.sharding.slices import held_bytes

GIB = 2**30


def test_kimi_k3_takes_what_its_index_says(k3):
    table = weight_table(k3, "bfloat16")
    unused = 69 * 32 * 4  # the zero tails of A_log, which no rank holds
    assert table.total_bytes + unused == 1_560_860_324_864


def test_kimi_k3_at_tp_8_takes_191_8_gib_on_each_rank(k3):
    parts = weight_table(k3, "bfloat16").stage_bytes(Layout(tp=8), 0)
    assert sum(parts.values()) / GIB == pytest.approx(191.8, abs=0.05)
    assert parts["experts"] == 92 * 896 * 17_547_264 // 8
    assert parts["vision"] + parts["projector"] == 2 * (401_214_464 + 46_144_512)


def layouts(spec, most=24):
    return [a.layout for n in range(1, most + 1) for a in arrangements(spec, n) if a.replicas == 1]


@pytest.mark.parametrize("name", ["mini", "dense"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rule_by_rule_equals_tensor_by_tensor_on_every_rank(name, request, data):
    spec = request.getfixturevalue(name)
    layout = data.draw(st.sampled_from(layouts(spec)))
    table = weight_table(spec, "bfloat16")
    for rank in range(layout.world_size):
        place = layout.place(rank)
        exact = held_bytes(spec.tensors, spec.facts, place, element_bytes=2)
        assert sum(table.stage_bytes(layout, place.pp_index).values()) == exact


@pytest.mark.parametrize("name", ["mini", "dense"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_ranks_read_every_byte_once_and_declared_copies_again(name, request, data):
    spec = request.getfixturevalue(name)
    layout = data.draw(st.sampled_from(layouts(spec)))
    table = weight_table(spec, "bfloat16")
    expected = 0
    for one in table.classes:
        if one.tensor.unused:
            continue
        axis = spec.facts.axes.get(one.tensor.axis)
        pieces = 1 if axis is None else axis.pieces
        shared = axis is None or axis.replicable  # more ranks than pieces hold copies
        copies = layout.dp * (max(1, layout.tp // pieces) if shared else 1)
        if one.is_expert:
            copies = 1 if one.tensor.axis == "expert" else layout.expert_tp
        whole = table.whole_bytes(one) * one.copies * max(1, len(one.layers))
        expected += copies * whole
    loads = rehearse(spec, table, layout).loads
    assert sum(load.read_bytes for load in loads) == expected
