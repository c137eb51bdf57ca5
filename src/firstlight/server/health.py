"""Owns what the engine's heartbeat means: alive, ready, and how far start-up has come.

Knows heartbeats and limits; nothing of requests.
"""

from __future__ import annotations

from firstlight.engine.client import EngineClient
from firstlight.engine.messages import Phase, Status
from firstlight.server.context import Limits
from firstlight.server.response_models import Health, Ready, Startup, StartupPhase
from firstlight.units import format_seconds


def check_health(engine: EngineClient, limits: Limits) -> Health:
    """Judges the engine by its heartbeat and its progress, never by total time.

    Loading may pause longer than serving: `loading_stall_seconds` counts until the engine is ready.
    """
    status = engine.status
    age = engine.status_age_seconds
    return Health(
        healthy=(problem := _problem(engine, limits)) is None,
        problem=problem,
        heartbeat_age_seconds=None if status is None else age,
        stalled_seconds=engine.stalled_seconds,
    )


def _problem(engine: EngineClient, limits: Limits) -> str | None:
    status, age = engine.status, engine.status_age_seconds
    if status is None:
        late = age > limits.first_heartbeat_seconds
        return f"the engine has not reported for {format_seconds(age)}" if late else None
    if status.failure is not None:
        return f"the engine has failed: {status.failure}"
    if status.unhealthy is not None:
        return status.unhealthy
    if age > limits.heartbeat_stale_seconds:
        return f"the engine's last heartbeat is {format_seconds(age)} old"
    most = limits.stall_seconds if status.ready else limits.loading_stall_seconds
    if status.busy and engine.stalled_seconds > most:
        return f"the busy engine has made no progress for {format_seconds(engine.stalled_seconds)}"
    return None


def check_ready(engine: EngineClient, *, draining: bool, limits: Limits | None = None) -> Ready:
    """Says whether requests are served, and otherwise which start-up phase runs.

    With `limits` an engine that is not healthy is not ready either. Requests are admitted without:
    they may come while heartbeats that prove its health wait to be read.
    """
    status = engine.status
    problem = None if limits is None else _problem(engine, limits)
    running = None if status is None else _running(status)
    return Ready(
        ready=is_ready(status) and not draining and problem is None,
        draining=draining,
        phase=None if running is None else running.name,
        detail=None if running is None else running.detail,
        progress=0 if status is None else status.progress,
        failure=problem if status is None else status.failure or status.unhealthy or problem,
    )


def is_ready(status: Status | None) -> bool:
    """Whether the start-up gate has passed and nothing has failed since."""
    if status is None or status.failure is not None or status.unhealthy is not None:
        return False
    return status.ready


def startup_timeline(engine: EngineClient) -> Startup:
    """The phases of the start so far."""
    status = engine.status
    if status is None:
        return Startup(ready=False, phases=[], facts={})
    phases = [
        StartupPhase(
            name=phase.name,
            parent=phase.parent,
            detail=phase.detail,
            began=phase.began,
            ended=phase.ended,
        )
        for phase in status.phases
    ]
    return Startup(ready=is_ready(status), phases=phases, facts=status.facts)


def _running(status: Status) -> Phase | None:
    """The innermost phase that has not ended: the one that began last."""
    running = [phase for phase in status.phases if phase.ended is None]
    return max(running, key=lambda phase: phase.began, default=None)
