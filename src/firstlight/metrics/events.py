"""Owns the event records that producers of metrics emit, and the Recorder they emit them to.

Knows nothing of names, labels or export; an event says what happened, in plain numbers.
"""

from typing import Literal, Protocol

import msgspec

Outcome = Literal["stop", "length", "cancelled", "refused", "error"]


class HttpAnswered(msgspec.Struct, frozen=True, tag=True):
    """An HTTP request was answered, or given up by its client (status 499)."""

    route: str
    status: int


class CompletionReceived(msgspec.Struct, frozen=True, tag=True):
    """One completion was asked of the engine."""


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """A completion's first token came `seconds` after its request had arrived."""

    seconds: float


class CompletionEnded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A completion ended. `seconds` counts from arrival, `decode_seconds` from the first token."""

    outcome: Outcome
    num_prompt: int
    num_cached: int
    num_generated: int
    seconds: float
    decode_seconds: float


class EngineSeen(msgspec.Struct, frozen=True, tag=True):
    """What the API process knows of the engine's health at this moment."""

    heartbeat_age_seconds: float
    stalled_seconds: float
    ready: bool


class RequestStarted(msgspec.Struct, frozen=True, tag=True):
    """A request entered its first step `queue_seconds` after it had reached the engine."""

    queue_seconds: float


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """One step of the engine finished."""

    seconds: float
    num_tokens: int
    num_requests: int


class QueueState(msgspec.Struct, frozen=True, tag=True):
    """How many requests wait and run now."""

    num_waiting: int
    num_running: int


class CacheState(msgspec.Struct, frozen=True, tag=True):
    """How full a cache pool is now."""

    pool: str
    used_bytes: int
    total_bytes: int


class SlotState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How slots of recurrent state are used now; hits and evictions of snapshots in all."""

    num_live: int
    num_snapshots: int
    num_empty: int
    num_hits: int
    num_evictions: int


class CacheGroupState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How a cache group is used now, in bytes of one rank; from `asked_tokens` on, in all.

    used + cached + empty bytes are all there are; `stranded_bytes` are the part of the latter two
    that nobody can use, because another group is full, and `longest_run_bytes` of them lie in a
    row. `unwritten_tokens` have room in blocks that requests hold. `copied_bytes` were copied on
    the device to make room. Of `asked_tokens` this group had `found_tokens`; units that were reused
    or evicted had been idle for so many seconds.
    """

    group: str
    used_bytes: int
    cached_bytes: int
    empty_bytes: int
    stranded_bytes: int
    unwritten_tokens: int
    longest_run_bytes: int
    copied_bytes: int
    asked_tokens: int
    found_tokens: int
    num_reused: int
    reused_seconds: float
    num_evicted: int
    evicted_seconds: float


class TierState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How full one place beyond the device is with state of one cache group, in bytes of one rank,
    and how many of its pages or slots were found, written, given up and lost since the start.
    """

    group: str
    place: str
    held_bytes: int
    cached_bytes: int
    empty_bytes: int
    num_hits: int
    num_stored: int
    num_dropped: int
    num_lost: int


class TierMoved(msgspec.Struct, frozen=True, tag=True):
    """The first rank moved bytes from (`inward`) or to a place beyond the device."""

    place: str
    inward: bool
    num_bytes: int
    seconds: float


class SwapState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What became of state beyond the device, in numbers since the start."""

    num_swaps: int
    num_fetches: int
    num_late: int
    recomputed_tokens: int


class PrefixLookup(msgspec.Struct, frozen=True, tag=True):
    """A prompt of `num_tokens` was looked up and `num_hit` of them were found."""

    num_tokens: int
    num_hit: int


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """A running request was put back to the queue."""


class BooksChecked(msgspec.Struct, frozen=True, tag=True):
    """Blocks, slots, rows and counters were recounted while nothing ran, and added up."""


class NanRows(msgspec.Struct, frozen=True, tag=True):
    """Rows of one step had logits that are not finite."""

    num_rows: int


class WeightsStreamed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a rank moved for a step because not all its weights stay in its memory."""

    rank: int
    file_bytes: int
    host_bytes: int
    expert_hits: int
    expert_misses: int
    waits: int
    wait_seconds: float


class PhaseDone(msgspec.Struct, frozen=True, tag=True):
    """A start-up phase ended."""

    phase: str
    seconds: float


class MemoryMeasured(msgspec.Struct, frozen=True, tag=True):
    """What the plan said of a component and what was allocated, in bytes."""

    component: str
    predicted_bytes: int
    actual_bytes: int


class WeightsRead(msgspec.Struct, frozen=True, tag=True):
    """Ranks read so many bytes of weights each and compared them with what they had loaded;
    `damages` runs of them were other ones."""

    num_bytes: int
    seconds: float
    damages: int


class WeightsRound(msgspec.Struct, frozen=True, tag=True):
    """All weights of all ranks were compared once, from first to last within `seconds`."""

    seconds: float


class ProcessMemory(msgspec.Struct, frozen=True, tag=True):
    """Resident bytes of a process now."""

    process: str
    resident_bytes: int


Event = (
    HttpAnswered
    | CompletionReceived
    | FirstToken
    | CompletionEnded
    | EngineSeen
    | RequestStarted
    | StepDone
    | QueueState
    | CacheState
    | SlotState
    | CacheGroupState
    | TierState
    | TierMoved
    | SwapState
    | PrefixLookup
    | Preempted
    | BooksChecked
    | NanRows
    | WeightsStreamed
    | PhaseDone
    | MemoryMeasured
    | WeightsRead
    | WeightsRound
    | ProcessMemory
)


class Recorder(Protocol):
    """Where producers send events; it must be cheap and must not raise."""

    def record(self, event: Event) -> None:
        """Takes note of an event."""
        ...
