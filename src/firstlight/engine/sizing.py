"""Owns how many cache blocks an engine takes; pure arithmetic over what ranks reported."""

from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.engine.settings import EngineSettings
from firstlight.errors import OutOfBudget, UsageError
from firstlight.models.spec import ModelSpec
from firstlight.sharding.state_spec import StateSpec
from firstlight.units import format_bytes

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Kept for the framework, the driver and activations, of what is left after the weights.
RESERVED_SHARE = 0.2
# Without a budget a machine that is shared (CPU memory) is not taken whole.
DEFAULT_LIMIT = 4 * 1024**3


@dataclass(frozen=True)
class CacheNeeds:
    """What the cache must hold: layer states, tokens per block, sequences and their longest
    length.
    """

    states: Sequence[StateSpec]
    block_size: int
    tp: int
    element_bytes: int
    max_sequences: int
    context_length: int

    @property
    def block_bytes(self) -> int:
        """Bytes on one rank of one block in every cache group."""
        per_token = sum(s.token_bytes(self.tp, self.element_bytes) for s in self.states)
        return per_token * self.block_size

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks that one sequence of full length takes."""
        return -(-self.context_length // self.block_size)


def cache_needs(settings: EngineSettings, spec: ModelSpec) -> CacheNeeds:
    """Returns what the cache of an engine must hold.

    Raises UsageError when the asked context exceeds the model's.
    """
    asked = settings.context_length
    if asked is not None and asked > spec.context_length:
        raise UsageError(
            f"context {asked} exceeds the model's {spec.context_length} tokens; positions beyond "
            "it were never trained"
        )
    return CacheNeeds(
        spec.states,
        settings.block_size,
        settings.tp,
        ELEMENT_BYTES[settings.dtype],
        settings.max_sequences,
        asked or spec.context_length,
    )


def num_blocks(needs: CacheNeeds, *, available: int, budget: int | None) -> int:
    """Returns blocks per cache group, the null block included.

    `available` is the least memory any rank has left, in bytes, already divided among ranks that
    share it. Raises OutOfBudget, with the ways out in numbers, when not even one sequence fits or
    the budget grants more than is available.
    """
    limit = budget if budget is not None else default_budget(available)
    wanted = needs.max_sequences * needs.blocks_per_sequence + 1
    blocks = min(wanted, limit // needs.block_bytes)
    if blocks <= needs.blocks_per_sequence and blocks < wanted:
        raise OutOfBudget(_ways_out(needs, limit))
    if (taken := blocks * needs.block_bytes) > available:
        raise OutOfBudget(
            f"the KV cache would take {format_bytes(taken)} on each rank, "
            f"{format_bytes(available)} are free. Lower the budget below that, or max_sequences, "
            "or the context"
        )
    return int(blocks)


def default_budget(available: int) -> int:
    """Returns the bytes a rank gives its caches when nobody said."""
    return min(int(available * (1 - RESERVED_SHARE)), DEFAULT_LIMIT)


def _ways_out(needs: CacheNeeds, limit: int) -> str:
    per_sequence = needs.blocks_per_sequence * needs.block_bytes
    fits = max(0, limit // needs.block_bytes - 1) * needs.block_size
    return (
        f"one sequence of {needs.context_length} tokens needs {format_bytes(per_sequence)} of KV "
        f"cache on each rank, the budget is {format_bytes(limit)}. Raise the budget to "
        f"{format_bytes(per_sequence + needs.block_bytes)}, or lower the context to {fits} tokens, "
        f"or use more ranks"
    )
