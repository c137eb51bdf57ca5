"""Memory that units pass through: how much is lent at once, and that it is kept."""

import threading

import pytest

from firstlight.runner.staging_rows import StagingRows


def test_no_more_is_lent_than_the_limit_and_waiting_ends() -> None:
    rows = StagingRows(100)
    first, second = rows.lend(60), rows.lend(40)
    with pytest.raises(TimeoutError, match="100 bytes"):
        rows.lend(1, 0.01)
    threading.Timer(0.01, rows.give_back, [first]).start()
    assert rows.lend(60, 5.0) is first, "memory that was taken is used again"
    rows.give_back(second)
    assert rows.num_bytes == 100


def test_a_piece_above_the_limit_is_lent_alone_and_not_kept() -> None:
    rows = StagingRows(100)
    small = rows.lend(50)
    with pytest.raises(TimeoutError):
        rows.lend(300, 0.01)
    rows.give_back(small)
    large = rows.lend(300)
    assert rows.num_bytes == 300, "what was kept makes room"
    with pytest.raises(TimeoutError):
        rows.lend(1, 0.01)
    rows.give_back(large)
    assert rows.num_bytes == 0
