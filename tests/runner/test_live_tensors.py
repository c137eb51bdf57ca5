"""Bytes that tensors hold at once, counted operation by operation."""

import torch

from firstlight.runner.live_tensors import LiveTensors

KIB = 1024


def rows(count: int) -> torch.Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def test_what_is_held_at_once_counts_and_what_was_there_before_does_not() -> None:
    before = rows(100)
    with torch.inference_mode(), LiveTensors() as live:
        first = rows(3)
        del first
        kept = [rows(2), rows(2)]
        before[: 2 * KIB] += kept[0]
        parts = before.view(4, -1)[1:]
    assert parts.shape[0] == 3
    assert 4 * KIB <= live.peak_bytes < 5 * KIB


def test_parts_of_a_tensor_are_no_new_ones_and_keep_it_alive() -> None:
    with torch.inference_mode(), LiveTensors() as live:
        part = rows(8)[:KIB].view(4, -1)
        others = [rows(1) for _ in range(3)]
        del part
        others.append(rows(8))
    assert live.peak_bytes == 11 * KIB
