"""Ranks and coordinates correspond one to one, and stages share layers evenly."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from firstlight.errors import ConfigError, LayoutError
from firstlight.sharding.codecs import DTYPE_BITS, dtype_bytes, find_codec, tensor_bytes
from firstlight.sharding.layout import Layout, stage_layers


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_every_rank_has_its_own_place(tp, pp, dp, ep):
    assume(tp * dp % ep == 0)
    layout = Layout(tp=tp, pp=pp, dp=dp, ep=ep)
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert len({(p.pp_index, p.dp_index, p.tp_index) for p in places}) == layout.world_size
    stage = [p for p in places if p.pp_index == 0]
    assert len({(p.ep_index, p.expert_tp_index) for p in stage}) == tp * dp
    assert all(p.ep_index < ep and p.expert_tp_index < layout.expert_tp for p in stage)


@given(st.integers(1, 100), st.integers(1, 12))
def test_stages_tile_the_layers_nearly_evenly(num_layers, pp):
    assume(pp <= num_layers)
    stages = [stage_layers(num_layers, Layout(pp=pp), index) for index in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


@pytest.mark.parametrize("degrees", [{"tp": 0}, {"pp": -1}, {"tp": 4, "ep": 3}])
def test_impossible_degrees_are_refused(degrees):
    with pytest.raises(LayoutError):
        Layout(**degrees)


def test_ranks_outside_and_too_many_stages_are_refused():
    with pytest.raises(LayoutError, match="outside"):
        Layout(tp=2).place(2)
    with pytest.raises(LayoutError, match="exceeds"):
        stage_layers(3, Layout(pp=4), 0)


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_sizes_follow_the_bits(dtype):
    assert dtype_bytes(dtype) * 8 == DTYPE_BITS[dtype]
    assert tensor_bytes(dtype, (3, 0, 2)) == 0
    assert tensor_bytes(dtype, ()) == dtype_bytes(dtype)


def test_unknown_types_and_codecs_list_the_known():
    with pytest.raises(ConfigError, match="BF16"):
        dtype_bytes("F7")
    with pytest.raises(ConfigError, match="keep"):
        find_codec("int2")
