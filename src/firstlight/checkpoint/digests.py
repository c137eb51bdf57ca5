"""Owns what a granule's digest and checksum are, and the .idx file; knows no layout and no tensor.

Digest: BLAKE3, 16 bytes, over the granule's bytes and then its position (so that a moved granule is
found, and the bytes start at a block boundary of the hash). Checksum: sum of w[i] * (2i + 1) modulo
2^64 over the granule's little-endian 64-bit words, which integer operations of any device can take.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from blake3 import blake3

from firstlight.checkpoint.store_layout import DIGEST_BYTES, GranuleKey

ENTRY_TYPE = np.dtype([("digest", f"V{DIGEST_BYTES}"), ("checksum", "<u8")])
Entries = np.ndarray[Any, np.dtype[Any]]


def granule_digest(data: memoryview, unit: str, key: GranuleKey) -> bytes:
    """Returns the digest of a granule's bytes at its position."""
    return close_digest(blake3(data), unit, key)


def scattered_digest(pieces: Iterable[memoryview], unit: str, key: GranuleKey) -> bytes:
    """Returns the digest of a granule whose bytes lie in several places."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return close_digest(hasher, unit, key)


def close_digest(hasher: blake3, unit: str, key: GranuleKey) -> bytes:
    """Returns the digest of a granule whose bytes were all hashed."""
    hasher.update(f"{unit}\0{key.block}\0{key.expert}\0{key.granule}".encode())
    return hasher.digest(DIGEST_BYTES)


def checksums(rows: Entries, first_byte: int = 0) -> Entries:
    """Returns the share of each row [G, num_bytes] in its granule's checksum, as uint64 [G].

    The rows begin at `first_byte` of their granules, a multiple of 8; shares add up modulo 2^64.
    """
    num_bytes = rows.shape[1]
    whole = num_bytes // 8 * 8
    if whole < num_bytes:
        rows = np.pad(rows, ((0, 0), (0, whole + 8 - num_bytes)))
    words = np.ascontiguousarray(rows).view("<u8")
    start = first_byte // 8
    weights = np.arange(start, start + words.shape[1], dtype="<u8") * np.uint64(2) + np.uint64(1)
    shares: Entries = np.einsum("ij,j->i", words, weights)  # wraps modulo 2^64
    return shares


def checksums_of(data: memoryview) -> int:
    """Returns the checksum of one whole granule."""
    return int(checksums(np.frombuffer(data, np.uint8).reshape(1, -1))[0])


def rank_digest(digests: Iterable[bytes]) -> str:
    """Returns the digest of what a rank holds: BLAKE3 over its granules' digests in order."""
    hasher = blake3()
    for digest in digests:
        hasher.update(digest)
    return hasher.hexdigest()
