"""Pages behind a window belong to somebody else: no kernel may let them into its numbers."""

import pytest
import torch

from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels

HEADS, KV_HEADS, CHANNELS, SLOTS = 4, 2, 32, 4


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("window", [1, 8, 100])
def test_numbers_behind_the_window_are_never_read(tokens: int, window: int) -> None:
    torch.manual_seed(tokens)
    context = 150 + tokens
    pages = -(-context // SLOTS) + 1
    table_BP = torch.randperm(pages, dtype=torch.int32)[None, : pages - 1]
    keys, values = torch.randn(2, pages, KV_HEADS, SLOTS, CHANNELS)
    new = (
        torch.randn(tokens, HEADS, CHANNELS),
        torch.randn(tokens, KV_HEADS, CHANNELS),
        torch.randn(tokens, KV_HEADS, CHANNELS),
    )
    spans = (torch.tensor([0, tokens]).int(), torch.tensor([context]).int())
    want = reference_kernels().paged_attention(
        *new, keys.clone(), values.clone(), *spans, table_BP, 0.2, window
    )
    first_seen = context - tokens - window + 1
    for behind in range(first_seen // SLOTS):
        keys[table_BP[0, behind]] = torch.nan
        values[table_BP[0, behind]] = torch.inf
    for kernels in (reference_kernels(), builtin_kernels().resolve(machine_query())):
        got = kernels.paged_attention(
            *new, keys.clone(), values.clone(), *spans, table_BP, 0.2, window
        )
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
