"""Owns after which tokens of a request its recurrent state is worth a snapshot.

Knows no slot and no other request; the manager says how far pages of the request were found.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class SnapshotPoint(NamedTuple):
    """State behind `num_tokens` tokens is to be kept; `is_turn` replaces the turn's last one."""

    num_tokens: int
    is_turn: bool = False


@dataclass
class SnapshotPoints:
    """The points of one request, all of them ends of blocks.

        tokens   0 ...... branch ...... prompt_end ... num_prompt ......... num_known
        kept at             ^               ^                     ^       ^
                     where the pages    the last block      every `turn_tokens` of output,
                     of others end      a repetition of     each in the place of the one
                                        the prompt reuses   before it: the end of the turn

    `branch` is past 0 when pages of the prefix were found further than its state: another request
    had that prefix and left no snapshot there, so it is shared text, as a system prompt is.
    """

    block_size: int
    prompt_end: int
    branch: int
    turn_tokens: int
    last_turn: int

    def ahead(self, num_computed: int, num_known: int) -> Iterator[SnapshotPoint]:
        """Yields the points behind the computed tokens and within the known ones, in order."""
        if num_computed < self.prompt_end or num_computed < self.branch:
            for point in sorted({self.branch, self.prompt_end}):
                if point > num_computed:
                    yield SnapshotPoint(point)
        turn = num_known // self.block_size * self.block_size
        if turn > num_computed and turn - self.last_turn >= self.turn_tokens:
            yield SnapshotPoint(turn, is_turn=True)


def make_points(
    num_prompt: int, *, block_size: int, branch: int, turn_tokens: int, num_cached: int
) -> SnapshotPoints:
    """Returns the points of a request that starts behind `num_cached` tokens."""
    prompt_end = (num_prompt - 1) // block_size * block_size
    last_turn = max(prompt_end, num_cached)
    return SnapshotPoints(block_size, prompt_end, branch, turn_tokens, last_turn)
