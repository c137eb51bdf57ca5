"""Owns which blocks of one cache group are free, how often each is used, and what is reused next.

Knows no content, no request and no tensor: a block is a number.
"""

from firstlight.errors import OutOfBudget

NULL_BLOCK = 0


class BlockPool:
    """Reference counts and a free list, both O(1) per block.

    Block 0 is the null block: it is never handed out, so padded entries of a block table may point
    at it. A free block keeps its content until `acquire` hands it out again, least recently used
    first:

        reused next                                   reused last
        [dropped ...][released long ago ... released just now]

    The list is doubly linked through two arrays and closed by the null block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise OutOfBudget(
                f"a cache of {num_blocks} blocks cannot hold a token: block 0 is reserved, so at "
                "least 2 are needed; give the cache more memory"
            )
        self.num_blocks = num_blocks
        self.num_usable = num_blocks - 1
        self.num_free = self.num_usable
        self._references: list[int] = [0] * num_blocks
        self._next: list[int] = [*range(1, num_blocks), NULL_BLOCK]
        self._previous: list[int] = [num_blocks - 1, *range(num_blocks - 1)]
        self._is_held = bytearray(num_blocks)
        self._is_held[NULL_BLOCK] = 1

    def references(self, block: int) -> int:
        """How many holders the block has; 0 is free."""
        return self._references[block]

    def are_free(self, first: int, count: int) -> bool:
        """Whether so many blocks from this one on are there and free."""
        stop = first + count
        return stop <= self.num_blocks and not any(self._is_held[first:stop])

    @property
    def longest_free_run(self) -> int:
        """The most free blocks in a row; looks at every block."""
        return max(map(len, self._is_held.split(b"\x01")))

    def acquire(self) -> int:
        """Takes the free block that was unused longest; its old content is gone from now on."""
        block = self._next[NULL_BLOCK]
        assert block != NULL_BLOCK, "acquire from an empty pool: compare num_free first"
        self._unlink(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Adds a holder to a block whose content is to be kept, be it free or in use."""
        if self._references[block] == 0:
            self._unlink(block)
        self._references[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """Takes one holder away. A block without holders is reused last if `keep`, else next."""
        left = self._references[block] - 1
        assert left >= 0 and block != NULL_BLOCK, f"block {block} is released more often than taken"
        self._references[block] = left
        if left == 0:
            self._link(block, after=self._previous[NULL_BLOCK] if keep else NULL_BLOCK)

    def reuse_next(self, block: int) -> None:
        """Moves a free block, whose content is worth nothing any more, to that end of the list."""
        assert self._references[block] == 0, f"block {block} is in use"
        self._unlink(block)
        self._link(block, after=NULL_BLOCK)

    def check_integrity(self) -> None:
        """Recounts the free list in both directions against the reference counts."""
        free = [block for block in range(1, self.num_blocks) if self._references[block] == 0]
        forward, backward = self._walk(self._next), self._walk(self._previous)
        assert forward == backward[::-1], "the free list differs forwards and backwards"
        assert sorted(forward) == free, "the free list is not the set of unused blocks"
        assert len(free) == self.num_free, f"{len(free)} blocks are free, {self.num_free} counted"
        assert min(self._references) >= 0 and self._references[NULL_BLOCK] == 0
        marked = [block for block in range(1, self.num_blocks) if not self._is_held[block]]
        assert marked == free, "the marks of free blocks are not those of unused ones"

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._is_held[block] = 1
        self.num_free -= 1

    def _link(self, block: int, *, after: int) -> None:
        follower = self._next[after]
        self._next[after] = self._previous[follower] = block
        self._previous[block], self._next[block] = after, follower
        self._is_held[block] = 0
        self.num_free += 1

    def _walk(self, links: list[int]) -> list[int]:
        blocks: list[int] = []
        block = links[NULL_BLOCK]
        while block != NULL_BLOCK and len(blocks) < self.num_blocks:
            blocks.append(block)
            block = links[block]
        return blocks
