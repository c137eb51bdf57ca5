"""Weights packed without loss, priced from the types they were stored in."""

from firstlight.planning.packed import packed_bytes
from firstlight.planning.weights import weight_table
from firstlight.sharding.layout import Layout


def test_bf16_sources_take_half_where_rows_are_whole_blocks(dense):
    table = weight_table(dense, "float32")
    matrices = sum(
        c.copies * max(1, len(c.layers)) for c in table.classes if len(c.tensor.shape) == 2
    )
    sizes = packed_bytes(table, Layout(), {"BF16": matrices})
    norms = sum(
        table.whole_bytes(c) * max(1, len(c.layers))
        for c in table.classes
        if len(c.tensor.shape) == 1
    )
    assert sizes == {0: norms + (table.total_bytes - norms) // 2}


def test_blocks_of_four_bits_with_an_embedding_of_eight(dense):
    table = weight_table(dense, "float32")
    layers = sum(len(c.layers) for c in table.classes if len(c.tensor.shape) == 2)
    sizes = packed_bytes(table, Layout(tp=2), {"Q4_1": layers, "Q8_0": 2, "F32": 11})
    assert sizes is not None and sizes[0] < sum(table.stage_bytes(Layout(tp=2), 0).values()) / 5


def test_counts_that_do_not_tell_are_not_guessed_at(dense):
    table = weight_table(dense, "float32")
    assert packed_bytes(table, Layout(), {"F32": 100}) is None
    assert packed_bytes(table, Layout(), {"Q4_1": 30, "Q8_0": 30, "BF16": 30}) is None
