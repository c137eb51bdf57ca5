"""Owns what operators may ask about weights over HTTP: compare them now, read them again.

Knows the engine's answers and HTTP statuses; nothing of how weights are read.
"""

from __future__ import annotations

from firstlight.server.context import AppContext
from firstlight.server.failures import ApiFailure, unavailable
from firstlight.server.health import is_ready
from firstlight.server.request_models import ReloadRequest
from firstlight.server.response_models import (
    DamagedWeights,
    RankWeights,
    WeightsChecked,
    WeightsReloaded,
)

_SHUTTING_DOWN = "draining"


async def check_weights(context: AppContext) -> WeightsChecked:
    """Has every rank compare its weights with what it loaded. Raises ApiFailure 503 before."""
    _require_started(context)
    report = await context.engine.check_weights()
    ranks = [
        RankWeights(
            rank=one.rank,
            num_bytes=one.num_bytes,
            damages=[
                DamagedWeights(
                    rank=damage.rank,
                    unit=damage.unit,
                    tensor=damage.tensor,
                    expert=damage.expert,
                    granule=damage.granule,
                    granules=damage.granules,
                )
                for damage in one.damages
            ],
        )
        for one in report.ranks
    ]
    intact = all(rank.num_bytes and not rank.damages for rank in ranks)
    return WeightsChecked(intact=intact, seconds=report.seconds, ranks=ranks)


async def reload_weights(fields: ReloadRequest, context: AppContext) -> WeightsReloaded:
    """Has weights read again in place. Raises ApiFailure: 400 for a path from nobody in particular
    and for a source that cannot take their place, 409 while another reload runs, 500 when it failed
    and the service is unhealthy.
    """
    _require_started(context)
    if fields.source is not None and not context.api_keys:
        raise ApiFailure(
            400,
            "a service without an API key takes no path; start it with --api-key, or leave source "
            "out to read again what is served",
            parameter="source",
            code="key_needed",
        )
    found = await context.engine.reload_weights(fields.source)
    if found.refusal == _SHUTTING_DOWN:
        seconds = context.limits.retry_after_seconds
        raise unavailable(found.problem, seconds, code="shutting_down")
    if found.refusal:
        status = 409 if found.refusal == "reloading" else 400
        parameter = "source" if status == 400 else None
        raise ApiFailure(status, found.problem, parameter=parameter, code=found.refusal)
    if found.problem:
        raise ApiFailure(500, found.problem, code="reload_failed")
    return WeightsReloaded(
        source_digest=found.source_digest, known_answers=found.known_answers, seconds=found.seconds
    )


def _require_started(context: AppContext) -> None:
    """An unhealthy engine may be asked: a reload is its way out."""
    status = context.engine.status
    if is_ready(status) or (status is not None and status.unhealthy is not None):
        return
    seconds = context.limits.retry_after_seconds
    raise unavailable("the model is not ready", seconds, code="not_ready")
