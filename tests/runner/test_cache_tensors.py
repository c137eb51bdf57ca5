"""Caches as tensors: their bytes are those planned, and slots are copied in every layer at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import ConfigError
from firstlight.layers.layer_state import PagedKeysValues, PagedLatents, RecurrentSlots
from firstlight.planning.caches import HeldCaches, held_cache_bytes
from firstlight.planning.tier_sizing import UnitCut, unit_bytes_of
from firstlight.runner.cache_tensors import (
    CacheShape,
    allocate_states,
    copy_slots,
    planned_cache_bytes,
    state_bytes,
)
from firstlight.runner.rows import RowTable
from firstlight.schedule.request import SamplingParams
from firstlight.schedule.step import NewSequence, SequenceStep, StateCopy, StepPlan
from firstlight.sharding.state_spec import (
    EncoderState,
    GroupedQueryState,
    LatentState,
    RecurrentState,
)

CPU = torch.device("cpu")
KEYS, LATENT = GroupedQueryState(kv_heads=2, head_dim=8), LatentState(width=12)
DELTA = RecurrentState(4, 3, 5, conv_channels=8, conv_taps=3)
OTHER = RecurrentState(2, 3, 5, conv_channels=4, conv_taps=1)
LAYERS = (DELTA, LATENT, DELTA, KEYS, OTHER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_bytes_planned_are_the_bytes_allocated(tp: int, dtype: torch.dtype) -> None:
    shape = CacheShape(7, 16, tp, dtype, CPU, num_slots=5)
    assert state_bytes(allocate_states(LAYERS, shape)) == planned_cache_bytes(LAYERS, shape)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("page", [16, 64, 128])
def test_summaries_are_planned_to_the_byte_whatever_a_page_holds(page: int, kv_dtype: str) -> None:
    layers = (
        GroupedQueryState(kv_heads=2, head_dim=24, summary_tokens=page),
        LatentState(width=144, summary_tokens=page),
    )
    shape = CacheShape(7, page, 2, torch.float32, CPU, kv_dtype=kv_dtype)
    planned = planned_cache_bytes(layers, shape)
    assert state_bytes(allocate_states(layers, shape)) == planned
    held = held_cache_bytes(layers, HeldCaches(7, page, 0, {}, kv_dtype), tp=2, element_bytes=4)
    assert sum(held.values()) == planned
    cut = UnitCut(page, 2, 4, kv_dtype)
    assert 7 * sum(unit_bytes_of(layers, cut)) == planned


def test_each_kind_of_state_has_the_shape_layers_expect() -> None:
    shape = CacheShape(7, 16, 2, torch.bfloat16, CPU, num_slots=5)
    delta, latent, _, keys, other = allocate_states(LAYERS, shape)
    assert isinstance(delta, RecurrentSlots) and isinstance(other, RecurrentSlots)
    assert delta.matrices_RHKV.shape == (5, 2, 3, 5) and delta.inputs_RTC.shape == (5, 3, 4)
    assert (delta.matrices_RHKV.dtype, delta.inputs_RTC.dtype) == (torch.float32, torch.bfloat16)
    assert isinstance(latent, PagedLatents) and latent.rows_PSW.shape == (7, 16, 12)
    assert isinstance(keys, PagedKeysValues) and keys.keys_PKSH.shape == (7, 1, 16, 8)
    assert [state.group for state in (delta, latent, keys, other)] == [0, 1, 2, 3]


def test_a_kind_without_a_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="encoder"):
        allocate_states([EncoderState(8)], CacheShape(2, 4, 1, torch.float32, CPU))


def marked(num_slots: int) -> tuple[RecurrentSlots, ...]:
    """Slots that hold their own number, in three layers of two groups."""
    states = allocate_states((DELTA, OTHER, DELTA), CacheShape(2, 4, 1, torch.float32, CPU, 9))
    for state in states:
        assert isinstance(state, RecurrentSlots)
        for tensor in (state.matrices_RHKV, state.inputs_RTC):
            for slot in range(num_slots):
                tensor[slot] = slot
    return states  # type: ignore[return-value]


copies = st.lists(
    st.builds(StateCopy, st.integers(0, 1), st.integers(0, 8), st.integers(1, 8)),
    unique_by=lambda copy: (copy.group, copy.target),
)


@given(copies)
def test_copies_read_every_source_before_they_write(chosen: list[StateCopy]) -> None:
    states = marked(9)
    copy_slots(states, chosen)
    for state in states:
        want = list(range(9))
        for copy in chosen:
            if copy.group == state.group:
                want[copy.target] = copy.source
        for tensor in (state.matrices_RHKV, state.inputs_RTC):
            assert all(bool((tensor[slot] == want[slot]).all()) for slot in range(9))


def test_the_table_of_a_recurrent_group_is_one_slot_a_sequence() -> None:
    table, params = RowTable(4, 2, 8), SamplingParams(max_tokens=1)
    new = [
        NewSequence(row, f"r{row}", [1] * 9, 9, params, [[row + 5], [1, 2, 3]]) for row in (2, 0)
    ]
    first = [SequenceStep(row, 0, 9, True, [], []) for row in (2, 0)]
    table.apply(StepPlan(1, new, first, []))
    table.apply(StepPlan(2, [], [SequenceStep(2, 9, 1, True, [4], [[], [7]])], []))
    assert table.table(0, [2, 0], CPU).tolist() == [[7], [5]]
    assert table.table(1, [2, 0], CPU).tolist() == [[1, 2, 3, 7], [1, 2, 3, 0]]
