"""Owns the two records that cross to the ranks each step; knows no tensor and no policy.

A plan holds new sequences whole and running ones as differences, so that its size does not grow
with the tokens already sent. `row` is the sequence's place in every rank's row table, from
NewSequence until it is named in `released`.
"""

import msgspec

from firstlight.schedule.request import MediaItem, SamplingParams

# Why a row fails whose mask leaves it nothing to choose.
NO_TOKEN_LEFT = "the grammar of the request allows no further token of this model"


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence the ranks do not hold: every known token, and its blocks, one list a cache group.

    `num_prompt` tells prompt from output, which penalties treat differently.
    """

    row: int
    request_id: str
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    blocks: list[list[int]]
    media: tuple[MediaItem, ...] = ()


class StateCopy(msgspec.Struct, frozen=True, array_like=True):
    """A copy of one slot onto another in every layer of a recurrent cache group."""

    group: int
    source: int
    target: int


class UnitCopy(msgspec.Struct, frozen=True, array_like=True):
    """A copy of unit `source` of a cache group onto unit `target`, in every layer of the group. It
    stays on the device where an allocator makes room, and goes out of it where tiers keep content.

    Units of all places share one numbering: those of the device, then host memory, then disk.
    """

    group: int
    source: int
    target: int


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """Copies to the device for one request, which it waits for before it starts. Until `ticket` is
    no longer pending nobody else reads or writes the targets.
    """

    ticket: int
    copies: list[UnitCopy]


class TokenMask(msgspec.Struct, frozen=True, array_like=True):
    """The tokens a row may sample: bit i of the little-endian 32-bit words stands for token i."""

    row: int
    bits: bytes


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """What one sequence computes in this step: its known tokens [start, start + count).

    `new_tokens` became known and `new_blocks` (one list a cache group, or no lists when there are
    none) were granted since the last plan that named this row; both are empty for a sequence that
    is new in this plan. `sample` asks for the next token: it is set when start + count reaches the
    known tokens, unless the request wants no output. `moved` are blocks that got another number:
    (cache group, place in its table, new number).
    """

    row: int
    start: int
    count: int
    sample: bool
    new_tokens: list[int]
    new_blocks: list[list[int]]
    moved: list[tuple[int, int, int]] = []


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step of every rank. `released` rows are dropped before the step begins.

    `restores` are carried out before the first token is computed, `saves` after the last one; each
    list reads all its sources before it writes a target. Before all of them the tickets `recalled`
    are dropped and `moves` are carried out in their order; behind the restores `fetches` begin.
    `masks` limit the rows they name; other rows may sample anything.
    """

    step: int
    new: list[NewSequence]
    steps: list[SequenceStep]
    released: list[int]
    restores: list[StateCopy] = []
    saves: list[StateCopy] = []
    masks: list[TokenMask] = []
    moves: list[UnitCopy] = []
    fetches: list[Fetch] = []
    recalled: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(s.count for s in self.steps)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, natural log, and the most likely alternatives with theirs.

    Taken from the model's distribution before temperature and truncation.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """The token chosen for a row, with its log-probabilities if the request wants them."""

    row: int
    token_id: int
    logprobs: TokenLogprobs | None


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the known tokens [first, first + len(tokens)) of a row."""

    row: int
    first: int
    tokens: list[TokenLogprobs]


class FailedRow(msgspec.Struct, frozen=True, array_like=True):
    """A row that could not be sampled, its numbers not finite or all its tokens masked.

    Its request fails and nothing of it is reused.
    """

    row: int
    reason: str


class LostUnit(msgspec.Struct, frozen=True, array_like=True):
    """A unit outside the device whose content could not be written or read, and why."""

    group: int
    unit: int
    reason: str


class TierFlow(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that a rank moved from (`inward`) or to a place, and the seconds it took."""

    place: str
    inward: bool
    num_bytes: int
    seconds: float


class TierReport(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of its tiers: tickets not carried out yet, and since its last report what
    was lost and moved.
    """

    pending: list[int] = []
    lost: list[LostUnit] = []
    flows: list[TierFlow] = []


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a rank answers to a plan. Only the first rank of a tensor parallel group samples."""

    step: int
    tokens: list[SampledToken]
    prompt_logprobs: list[PromptLogprobs]
    failed: list[FailedRow]
    seconds: float
    tiers: TierReport | None = None
