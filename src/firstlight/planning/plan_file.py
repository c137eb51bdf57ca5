"""Owns the plan file: one JSON document, versioned, that says what was planned and how to start it.

Knows neither search nor emitters; whoever starts an engine compares what it measures with
`predicted_bytes` of the record read here.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from firstlight.errors import BadInput
from firstlight.planning.memory import CACHES
from firstlight.planning.search import Answer
from firstlight.planning.weights import ELEMENT_BYTES
from firstlight.planning.workload import ENCODER_CACHE_BYTES
from firstlight.sharding.layout import Layout

VERSION = 1


class PlannedRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes planned for each rank from `first_rank` on, `num_ranks` of them, which are equal."""

    stage: int
    first_rank: int
    num_ranks: int
    components: dict[str, int]
    parts: dict[str, dict[str, int]]
    device_bytes: int


class PlannedTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Predicted seconds (`tokens_per_second`: output tokens of the fleet): expected, low, high."""

    ttft: tuple[float, float, float]
    tpot: tuple[float, float, float]
    tokens_per_second: tuple[float, float, float]
    cold_start: dict[str, float]


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A plan as it is kept. Degrees are those of one replica."""

    version: int
    model: str
    family: str
    fleet: str
    tp: int
    pp: int
    dp: int
    ep: int
    context_parallel: int
    replicas: int
    context: int
    concurrency: int
    sequences_per_part: int
    dtype: str
    cache_element_bytes: int
    block_size: int
    chunk_tokens: int
    max_batch_tokens: int
    reserve_share: float
    weight_bytes: int
    ranks: list[PlannedRank]
    times: PlannedTimes
    images: int = 0
    image_tokens: int = 1024
    kv_dtype: str = "auto"
    encoder_cache_bytes: int = ENCODER_CACHE_BYTES
    attention: str = "full"
    tiers: str = ""

    @property
    def layout(self) -> Layout:
        """The layout of one replica."""
        return Layout(tp=self.tp, pp=self.pp, dp=self.dp, ep=self.ep)

    @property
    def kv_budget_bytes(self) -> int:
        """What one rank gives its caches: the most any stage needs."""
        return max(rank.components[CACHES] for rank in self.ranks)

    def predicted_bytes(self, component: str) -> int:
        """Bytes planned for a component as the engine names it: `weights/3`, `kv/0`.

        Raises BadInput for a name this plan has not.
        """
        name, _, number = component.partition("/")
        for rank in self.ranks:
            inside = number.isdigit() and 0 <= int(number) - rank.first_rank < rank.num_ranks
            if inside and name in rank.components:
                return rank.components[name]
        raise BadInput(f"the plan has no component {component!r}")


def plan_of(answer: Answer, model: str, weight_bytes: int) -> PlanFile:
    """Returns the document of an answer that has a plan."""
    memory, forecast, question = answer.memory, answer.forecast, answer.question
    assert memory is not None and forecast is not None, "nothing fits: there is no plan to keep"
    layout, rules = memory.arrangement.layout, question.rules
    return PlanFile(
        version=VERSION,
        model=model,
        family=question.spec.family.name,
        fleet=answer.fleet.text,
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        ep=layout.ep,
        context_parallel=memory.arrangement.context_parallel,
        replicas=memory.arrangement.replicas,
        context=question.workload.context,
        concurrency=question.workload.concurrency,
        sequences_per_part=memory.sequences,
        dtype=rules.dtype,
        cache_element_bytes=rules.cache_element_bytes or ELEMENT_BYTES[rules.dtype],
        block_size=rules.block_size,
        chunk_tokens=rules.chunk_tokens,
        max_batch_tokens=rules.max_batch_tokens,
        reserve_share=rules.reserve_share,
        weight_bytes=weight_bytes,
        ranks=[
            PlannedRank(
                stage=one.stage,
                first_rank=one.ranks.start,
                num_ranks=len(one.ranks),
                components=dict(one.components),
                parts={name: dict(parts) for name, parts in one.parts.items()},
                device_bytes=one.device_bytes,
            )
            for one in memory.stages
        ],
        times=PlannedTimes(
            ttft=(forecast.ttft.expected, forecast.ttft.low, forecast.ttft.high),
            tpot=(forecast.tpot.expected, forecast.tpot.low, forecast.tpot.high),
            tokens_per_second=(
                forecast.tokens_per_second.expected,
                forecast.tokens_per_second.low,
                forecast.tokens_per_second.high,
            ),
            cold_start={phase.name: phase.seconds for phase in forecast.cold_start},
        ),
        images=question.workload.images,
        image_tokens=question.workload.image_tokens,
        kv_dtype=rules.kv_dtype,
        encoder_cache_bytes=rules.encoder_cache_bytes,
        attention=rules.attention,
        tiers=rules.tiers,
    )


def write_plan(plan: PlanFile, path: Path) -> None:
    """Writes a plan as indented JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")


def read_plan(path: Path) -> PlanFile:
    """Returns a plan. Raises BadInput for what is no plan, or one of another version."""
    try:
        text = path.read_bytes()
        version = msgspec.json.decode(text, type=_Versioned).version
        if version != VERSION:
            raise BadInput(
                f"{path}: plan of version {version}, this program reads {VERSION}; plan again"
            )
        return msgspec.json.decode(text, type=PlanFile)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise BadInput(f"{path}: no plan: {error}") from error


class _Versioned(msgspec.Struct, frozen=True):
    version: int
