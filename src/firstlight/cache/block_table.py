"""Owns what one request holds of a paged cache group; knows neither pool nor index."""

from dataclasses import dataclass, field

from firstlight.cache.prefix_index import PrefixKey


@dataclass
class Table:
    """The blocks of a request in token order; the first `num_behind` lie behind the window and are
    null blocks, but for the first `num_sinks`. `keys_behind` are those of findable ones that were
    given back. The first `num_far` lie outside the device. `copied` are the keys of blocks whose
    content was copied from another block, by place; `goal` is the number of blocks on the device
    that the table is expected to come to.
    """

    blocks: list[int]
    num_behind: int = 0
    keys_behind: list[PrefixKey] = field(default_factory=list)
    num_sinks: int = 0
    num_far: int = 0
    copied: dict[int, PrefixKey] = field(default_factory=dict)
    goal: int = 0

    @property
    def held(self) -> list[int]:
        """The blocks of the device that are held, in token order."""
        sinks = min(self.num_sinks, self.num_behind)
        return self.blocks[:sinks] + self.blocks[max(self.num_behind, self.num_far) :]
