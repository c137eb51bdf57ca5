"""Owns how the cache groups of a model are made from their sizes; takes no decision."""

from collections.abc import Callable, Sequence

from firstlight.cache.allocator import DYNAMIC
from firstlight.cache.cache_group import RECURRENT
from firstlight.cache.cache_options import CacheOptions
from firstlight.cache.moves import Moves
from firstlight.cache.paged_group import PagedGroup, group_blocks
from firstlight.cache.prefix_index import PrefixKey
from firstlight.cache.recurrent_group import RecurrentGroup
from firstlight.cache.tiers import make_pools
from firstlight.errors import ConfigError
from firstlight.sharding.state_spec import StateSpec

PAGED = frozenset({"grouped_query", "latent"})


def make_groups(
    specs: Sequence[StateSpec],
    near: Sequence[int],
    moves: Moves,
    *,
    block_size: int,
    options: CacheOptions,
    holds_pages: Callable[[PrefixKey], bool],
) -> list[PagedGroup | RecurrentGroup]:
    """Returns one group a spec, with `near` units on the device and those of `options.far` beyond
    it, whose moves are appended to `moves`.
    """
    pools = make_pools(near, options.far, moves.copies)
    groups = [
        RecurrentGroup(
            spec,
            index=index,
            num_slots=near[index],
            block_size=block_size,
            holds_pages=holds_pages,
            clock=options.clock,
            far=pools[index],
        )
        if spec.kind == RECURRENT
        else PagedGroup(
            spec,
            num_blocks=near[index],
            block_size=block_size,
            chunk_tokens=options.chunk_tokens,
            clock=options.clock,
            far=pools[index],
        )
        for index, spec in enumerate(specs)
    ]
    if options.allocator == DYNAMIC:
        for index, group in enumerate(groups):
            if isinstance(group, PagedGroup):
                group.lie_in_rows(moves, group=index)
    return groups


def near_units(
    specs: Sequence[StateSpec], num_blocks: int, num_slots: int, options: CacheOptions
) -> list[int]:
    """Returns the units of each group on the device, the null ones included."""
    windows = options.window_blocks
    return [
        num_slots if spec.kind == RECURRENT else group_blocks(spec, num_blocks, windows)
        for spec in specs
    ]


def check_specs(groups: Sequence[StateSpec]) -> None:
    """Raises ConfigError unless a cache can hold these groups."""
    if not groups:
        raise ConfigError("the model declares no layer that keeps state: there is nothing to cache")
    if len(set(groups)) != len(groups):
        raise ConfigError("a state spec is given twice: layers of equal state form one cache group")
    kinds = {spec.kind for spec in groups}
    unknown = sorted(kinds - PAGED - {RECURRENT})
    if unknown:
        known = ", ".join(sorted({*PAGED, RECURRENT}))
        raise ConfigError(f"the cache holds {known} state; this model keeps {', '.join(unknown)}")
    if not kinds & PAGED:
        raise ConfigError(
            "the model keeps recurrent state only; this version needs a layer that keeps state per "
            "token as well"
        )
