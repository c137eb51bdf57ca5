"""Owns the names of cached content and where it lies; knows no request, no holder and no tensor.

    tokens   0 ........ B-1 | B ....... 2B-1 | 2B ...... 3B-1 | 3B ... n-1
    blocks        0         |       1        |       2        | 3 (not full: it has no key)
    keys     k0 = H(root,0) | k1 = H(k0,1)   | k2 = H(k1,2)   |
    images                        [ a .............. )

    root = H(model digest, block size, salt)

The block in which an image begins has it in its key, and through the chain so have all behind it: a
is in k1 and k2, not in k0. A key therefore names everything the content depends on, and nothing
behind it: prompts that differ in a later image share what lies before it. Keys are 256-bit BLAKE3
digests.
"""

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple, NewType, Protocol

from blake3 import blake3

PrefixKey = NewType("PrefixKey", bytes)

_ROOT_CONTEXT = "firstlight prefix cache root, version 2"
_SPAN = Struct("<QQ")


class MediaSpan(Protocol):
    """An image or other medium behind the placeholder tokens [first, first + count)."""

    @property
    def first(self) -> int:
        """Position of the first placeholder token."""
        ...

    @property
    def count(self) -> int:
        """Placeholder tokens."""
        ...

    @property
    def digest(self) -> str:
        """Names the content."""
        ...


class PrefixScope(NamedTuple):
    """What content depends on besides its tokens: blocks are shared only within equal scopes."""

    model_digest: str
    block_size: int
    salt: str

    def root(self) -> PrefixKey:
        """The parent of the first block's key. Each field goes in behind its length."""
        hasher = blake3(derive_key_context=_ROOT_CONTEXT)
        for field in (self.model_digest, str(self.block_size), self.salt):
            hasher.update(_framed(field))
        return PrefixKey(hasher.digest())


class PrefixChain:
    """Keys of the full blocks of one growing list of tokens, hashed when first asked for and kept.

    The list may only grow at its end, by tokens that stand for no medium.
    """

    def __init__(
        self, scope: PrefixScope, token_ids: Sequence[int], media: Sequence[MediaSpan] = ()
    ) -> None:
        self._token_ids = token_ids
        # Those no key names yet, the next one at the end.
        self._media_ahead = sorted(media, key=lambda span: span.first, reverse=True)
        self._block_size = scope.block_size
        self._pack = Struct(f"<{scope.block_size}I").pack
        self._root = scope.root()
        self._keys: list[PrefixKey] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        return len(self._token_ids)

    def key(self, block_index: int) -> PrefixKey:
        """The key of tokens [block_index * B, (block_index + 1) * B), all known by now."""
        keys = self._keys
        while len(keys) <= block_index:
            first = len(keys) * self._block_size
            tokens = self._token_ids[first : first + self._block_size]
            assert len(tokens) == self._block_size, "only full blocks have a key"
            parent = keys[-1] if keys else self._root
            media = self._take_media(first) if self._media_ahead else b""
            keys.append(PrefixKey(blake3(parent + self._pack(*tokens) + media).digest()))
        return keys[block_index]

    def _take_media(self, first: int) -> bytes:
        """Writes the media that begin in the block at `first`.

        The parent and the tokens before them have a fixed length, so no two blocks read alike.
        """
        ahead, begun = self._media_ahead, []
        while ahead and ahead[-1].first < first + self._block_size:
            begun.append(ahead.pop())
        return b"".join(_SPAN.pack(s.first, s.count) + _framed(s.digest) for s in begun)


def _framed(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "little") + data


class PrefixIndex:
    """Which block of one cache group holds which content: one block a key, one key a block."""

    def __init__(self) -> None:
        self._blocks: dict[PrefixKey, int] = {}
        self._keys: dict[int, PrefixKey] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def find(self, key: PrefixKey) -> int | None:
        """The block with this content, or None."""
        return self._blocks.get(key)

    def key_of(self, block: int) -> PrefixKey | None:
        """The content of a block, or None when it is not known."""
        return self._keys.get(block)

    def enter(self, key: PrefixKey, block: int) -> None:
        """Makes a full block findable, unless another block with that content is."""
        if key not in self._blocks:
            assert block not in self._keys, f"block {block} is entered under two keys"
            self._blocks[key] = block
            self._keys[block] = key

    def discard(self, block: int) -> bool:
        """Forgets what the block holds and says whether anything was known."""
        key = self._keys.pop(block, None)
        if key is None:
            return False
        del self._blocks[key]
        return True

    def clear(self) -> list[int]:
        """Forgets what all blocks hold; returns those of which anything was known."""
        blocks = list(self._keys)
        self._blocks.clear()
        self._keys.clear()
        return blocks

    def check_integrity(self) -> None:
        """Checks that the two directions name the same pairs."""
        pairs = {(key, block) for block, key in self._keys.items()}
        assert pairs == set(self._blocks.items()), "keys and blocks of the prefix index disagree"
