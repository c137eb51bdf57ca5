"""Owns the pieces in which ranks take host memory for cache tiers; pure arithmetic.

Knows no tier: ranks take memory by these numbers, and whoever plans or audits it counts with them.
"""

# Memory of the host tier is taken in slabs of about so many bytes.
SLAB_BYTES = 32 * 1024**2
# Between device and disk are so many bytes each way at most, or one larger unit.
STAGING_BYTES = 16 * 1024**2
# Beside a host tier it is no more than this part of it each way.
STAGING_SHARE = 1 / 32


def rows_per_slab(row_bytes: int) -> int:
    """Returns how many rows are taken at once."""
    return max(1, SLAB_BYTES // max(1, row_bytes))


def slab_bytes(num_touched: int, num_rows: int, row_bytes: int) -> int:
    """Returns the bytes taken for `num_rows` rows of which the first `num_touched` were needed."""
    per_slab = rows_per_slab(row_bytes)
    return min(num_rows, -(-num_touched // per_slab) * per_slab) * row_bytes


def most_staging_bytes(unit_bytes: tuple[int, ...]) -> int:
    """Returns the bytes that units of these sizes pass through at most, on their way out and in."""
    return 2 * max(STAGING_BYTES, *unit_bytes)
