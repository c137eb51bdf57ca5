"""Owns the records between the API process and the engine process; knows neither HTTP nor
tensors.
"""

import msgspec

from firstlight.checkpoint.damage import Damage
from firstlight.schedule.request import FinishReason, SubmittedRequest
from firstlight.schedule.step import TokenLogprobs


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Asks the engine to serve requests; those of one call stand next to each other in the
    queue.
    """

    requests: list[SubmittedRequest]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Ends requests; unknown ids are ignored, because they may have finished on their own."""

    request_ids: list[str]


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Refuses new requests from now on and ends the engine when the last one has finished."""


class CheckWeights(msgspec.Struct, frozen=True, tag=True):
    """Asks for a round over all weights now; a WeightsReport of this id answers."""

    check_id: str


class ReloadWeights(msgspec.Struct, frozen=True, tag=True):
    """Asks for weights to be read again in place, once running requests have finished; None is the
    source they came from. A WeightsReloaded of this id answers.
    """

    reload_id: str
    source: str | None = None


class RankWeightsChecked(msgspec.Struct, frozen=True):
    """What one rank found in a round: bytes it read, and what is not as it was loaded."""

    rank: int
    num_bytes: int
    damages: list[Damage]


class WeightsReport(msgspec.Struct, frozen=True, tag=True):
    """What a round found, rank by rank; reading took `seconds`."""

    check_id: str
    ranks: list[RankWeightsChecked]
    seconds: float


class WeightsReloaded(msgspec.Struct, frozen=True, tag=True):
    """The weights served from now on. `problem` says why a reload failed; `refusal` is the code of
    one that touched nothing.
    """

    reload_id: str
    source_digest: str = ""
    known_answers: str = ""
    seconds: float = 0.0
    problem: str = ""
    refusal: str = ""


class Score(msgspec.Struct, frozen=True):
    """Log-probabilities of prompt tokens from position `first`; position 0 has none."""

    first: int
    tokens: list[TokenLogprobs]


class Output(msgspec.Struct, frozen=True):
    """What became known of one request since its last Output. `finish` is set in the last one.

    `num_cached` counts prompt tokens found in the prefix cache, once the request has started.
    `refusal` is the code of a request that was never queued; `error` then says why and `parameter`
    names the field to blame.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: Score | None = None
    finish: FinishReason | None = None
    error: str | None = None
    num_cached: int = 0
    refusal: str | None = None
    parameter: str | None = None


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Everything one step produced."""

    outputs: list[Output]


class Phase(msgspec.Struct, frozen=True):
    """One start-up phase: seconds since process start at which it began and ended (None:
    running).
    """

    name: str
    began: float
    ended: float | None
    detail: str = ""
    parent: str = ""


class Status(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine's heartbeat, sent every half second from outside the engine's thread.

    `progress` counts finished steps and loading advances: while `busy` it must grow, or the engine
    is hung. `ready` is set once the start-up gate has passed, and not while weights are reloaded.
    `failure` ends the service; `unhealthy` refuses requests until weights were reloaded.
    """

    sequence: int
    progress: int
    busy: bool
    ready: bool
    phases: list[Phase]
    failure: str | None = None
    unhealthy: str | None = None
    exit_code: int = 0
    facts: dict[str, str | int | float] = {}
    metrics: dict[str, float] = {}


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The engine has ended after a drain or a failure; nothing follows."""

    failure: str | None = None
    exit_code: int = 0


ToEngine = Submit | Cancel | Drain | CheckWeights | ReloadWeights
FromEngine = Outputs | Status | Stopped | WeightsReport | WeightsReloaded
