"""Owns the records between the engine process and its ranks; torch-free."""

from collections.abc import Sequence

import msgspec

from firstlight.checkpoint.damage import Damage
from firstlight.schedule.step import StepPlan, StepResult, TierReport


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
    attention: str = "full"
    check_digests: bool = True
    encoder_cache_bytes: int = 0
    seconds_to_join: int = 60
    load_from: str = "own"
    weights_budget_bytes: int | None = None
    weights_host_bytes: int = 0


class AllocateCaches(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to allocate its caches: blocks in every paged group, but for those with a window
    that `window_blocks` names, and slots in every recurrent one. `far` are the units of each group
    in host memory and on disk, in a file of `tier_folder`.
    """

    num_blocks: int
    num_slots: int
    window_blocks: dict[int, int] = {}
    far: list[tuple[int, int]] = []
    tier_folder: str = ""


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to run one step."""

    plan: StepPlan


class AgreeOnWeights(msgspec.Struct, frozen=True, tag=True):
    """Asks every rank to compare the weights it holds with those of the others."""


class CheckWeights(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to read about `num_bytes` more of its weights and to compare them with what it
    loaded; a new `round` begins with the first ones."""

    round: int
    num_bytes: int


class ReloadWeights(msgspec.Struct, frozen=True, tag=True):
    """Asks every rank to fill its weights from another source, and to agree on them again."""

    source: str


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
    residency: str = ""


class CachesAllocated(msgspec.Struct, frozen=True, tag=True):
    """A rank holds its caches, `recurrent_bytes` of them slots; `rest_bytes` are held between steps
    from now on."""

    rank: int
    planned_bytes: int
    allocated_bytes: int
    recurrent_bytes: int = 0
    rest_bytes: int = 0


class WeightTraffic(msgspec.Struct, kw_only=True):
    """What a rank moved for a step because not all its weights stay: bytes from files and from host
    memory, experts that were in their slots and that were not, and how often and how long the
    computation waited. A rank counts in it."""

    file_bytes: int = 0
    host_bytes: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    waits: int = 0
    wait_seconds: float = 0.0


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to a step, with its resident and peak memory.

    What was not measured in this step is 0: `activation_bytes` its tensors took above what is held
    between steps, `step_peak_bytes` the process held at most. `encoder_bytes` are kept of images,
    `tier_host_bytes` taken for the host tier, `tier_staging_bytes` for what goes to disk or comes.
    """

    rank: int
    result: StepResult
    resident_bytes: int
    peak_bytes: int
    activation_bytes: int = 0
    step_peak_bytes: int = 0
    encoder_bytes: int = 0
    tier_host_bytes: int = 0
    tier_staging_bytes: int = 0
    traffic: WeightTraffic | None = None


def joint_result(done: Sequence[StepDone]) -> StepResult:
    """The first rank's answer with the failures of all: what one of them could not compute has
    made the sums of the others wrong.
    """
    first = done[0].result
    if len(done) > 1 and any(report.result.tiers for report in done):
        tiers = joint_tiers([report.result.tiers or TierReport() for report in done])
        first = msgspec.structs.replace(first, tiers=tiers)
    failed = {row.row: row for report in reversed(done) for row in report.result.failed}
    if len(failed) == len(first.failed):
        return first
    return msgspec.structs.replace(first, failed=[failed[row] for row in sorted(failed)])


class WeightsAgreed(msgspec.Struct, frozen=True, tag=True):
    """What a rank found when it compared its weights: `problem` is empty where all hold the same.
    `num_bytes` are watched from now on; their checksums took `seconds`."""

    rank: int
    source_digest: str
    num_bytes: int
    seconds: float
    problem: str = ""


class WeightsChecked(msgspec.Struct, frozen=True, tag=True):
    """What a rank found in the weights it read; `through`: this round's last were among them."""

    rank: int
    round: int
    num_bytes: int
    seconds: float
    through: bool
    damages: list[Damage]


def joint_tiers(reports: Sequence[TierReport]) -> TierReport:
    """What all ranks say together: a ticket is pending until the last one has carried it out, and a
    unit that one of them lost is lost. Flows are those of the first: ranks move alike.
    """
    pending = sorted({ticket for report in reports for ticket in report.pending})
    lost = {(one.group, one.unit): one for report in reports for one in report.lost}
    return TierReport(pending, list(lost.values()), reports[0].flows)


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot go on; the message is for people, the exit code for scripts."""

    rank: int
    message: str
    exit_code: int


ToRank = AllocateCaches | RunStep | AgreeOnWeights | CheckWeights | ReloadWeights | StopRank
FromRank = (
    RankProgress
    | RankLoaded
    | CachesAllocated
    | StepDone
    | WeightsAgreed
    | WeightsChecked
    | RankFailed
)
