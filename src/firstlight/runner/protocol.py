"""Owns the records between the engine process and its ranks; torch-free."""

from collections.abc import Sequence

import msgspec

from firstlight.schedule.step import StepPlan, StepResult


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a rank needs to start, passed as one JSON argument.

    `context_length` 0 is the model's own; the rank ends when `parent_id` is no longer its parent.
    """

    rank: int
    tp: int
    ep: int = 1
    source: str
    dtype: str
    device: str
    threads: int
    rendezvous: str
    plan_endpoint: str
    result_endpoint: str
    max_sequences: int
    context_length: int
    block_size: int
    parent_id: int
    kv_dtype: str = "auto"
    check_digests: bool = True
    encoder_cache_bytes: int = 0
    seconds_to_join: int = 60


class AllocateCaches(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to allocate its caches: blocks in every paged group, but for those with a window
    that `window_blocks` names, and slots in every recurrent one.
    """

    num_blocks: int
    num_slots: int
    window_blocks: dict[int, int] = {}


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to run one step."""

    plan: StepPlan


class StopRank(msgspec.Struct, frozen=True, tag=True):
    """Ends a rank."""


class RankProgress(msgspec.Struct, frozen=True, tag=True):
    """A start-up phase of a rank began, advanced or ended. `at` is seconds since the epoch."""

    rank: int
    phase: str
    at: float
    done: int = 0
    total: int = 0
    ended: bool = False


class RankLoaded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A rank holds its weights. Byte counts are those of this rank alone; `available_bytes` is its
    part where ranks share a device, `owned` whether it is an engine's alone. `device` is its spec
    in a line.
    """

    rank: int
    source_digest: str
    rank_digest: str
    weights_allocated: int
    bytes_read: int
    available_bytes: int
    owned: bool = False
    device: str = ""
    resident_bytes: int
    kernels: list[str]
    threads: int
    packed_bytes: int = 0
    stored: dict[str, int] = {}


class CachesAllocated(msgspec.Struct, frozen=True, tag=True):
    """A rank holds its caches, `recurrent_bytes` of them slots; `rest_bytes` are held between steps
    from now on."""

    rank: int
    planned_bytes: int
    allocated_bytes: int
    recurrent_bytes: int = 0
    rest_bytes: int = 0


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to a step, with its resident and peak memory.

    What was not measured in this step is 0: `activation_bytes` its tensors took above what is held
    between steps, `step_peak_bytes` the process held at most. `encoder_bytes` are kept of images.
    """

    rank: int
    result: StepResult
    resident_bytes: int
    peak_bytes: int
    activation_bytes: int = 0
    step_peak_bytes: int = 0
    encoder_bytes: int = 0


def joint_result(done: Sequence[StepDone]) -> StepResult:
    """The first rank's answer with the failures of all: what one of them could not compute has
    made the sums of the others wrong.
    """
    first = done[0].result
    failed = {row.row: row for report in reversed(done) for row in report.result.failed}
    if len(failed) == len(first.failed):
        return first
    return msgspec.structs.replace(first, failed=[failed[row] for row in sorted(failed)])


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot go on; the message is for people, the exit code for scripts."""

    rank: int
    message: str
    exit_code: int


ToRank = AllocateCaches | RunStep | StopRank
FromRank = RankProgress | RankLoaded | CachesAllocated | StepDone | RankFailed
