"""Owns the question to a running service whether the weights in its memory are still those it
loaded; compares nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from firstlight.accept.client import Answer, Endpoint, post
from firstlight.accept.report import Check, Report, Section
from firstlight.errors import CheckFailed, EnvironmentProblem, UsageError
from firstlight.units import format_bytes, format_seconds

PATH = "/weights/check"


def check_live_weights(endpoint: Endpoint) -> Report:
    """Asks a service to compare its weights now and returns the report.

    Raises EnvironmentProblem when no service answers, UsageError when it wants another key,
    CheckFailed when it cannot say.
    """
    answer = asyncio.run(_ask(endpoint))
    if answer.status == 401:
        raise UsageError(f"{endpoint.root}: {answer.error_message} (--api-key)")
    if answer.status == 404:
        raise CheckFailed(f"{endpoint.root} has no {PATH}: it is no service of firstlight's")
    if answer.status == 503:
        raise EnvironmentProblem(f"{endpoint.root}: {answer.error_message}")
    if not answer.ok:
        raise CheckFailed(f"{endpoint.root}: HTTP {answer.status}: {answer.error_message}")
    return live_report(endpoint.root, answer.body)


def live_report(url: str, found: Mapping[str, Any]) -> Report:
    """Turns a service's answer into a report: a check for each rank, and one for each damage."""
    ranks = found["ranks"]
    read = sum(rank["num_bytes"] for rank in ranks)
    seconds = format_seconds(found["seconds"])
    line = f"{format_bytes(read)} on {len(ranks)} ranks compared in {seconds}"
    checks = tuple(_rank_check(rank) for rank in ranks)
    damages = tuple(_damage_check(damage) for rank in ranks for damage in rank["damages"])
    return Report(
        "firstlight verify --live", (Section(url, (line,), checks=checks),), damages, found
    )


def _rank_check(rank: Mapping[str, Any]) -> Check:
    name, damages = f"weights of rank {rank['rank']}", len(rank["damages"])
    if not rank["num_bytes"]:
        return Check(name, "fail", "nothing to compare: its last reload failed", _FIX)
    said = f"{damages} runs changed" if damages else "as they were loaded"
    return Check(name, "fail" if damages else "ok", f"{format_bytes(rank['num_bytes'])}, {said}")


def _damage_check(damage: Mapping[str, Any]) -> Check:
    expert = "" if damage["expert"] is None else f", expert {damage['expert']}"
    last = damage["granule"] + damage["granules"] - 1
    granule = (
        f"granule {damage['granule']}"
        if damage["granules"] == 1
        else (f"granules {damage['granule']} to {last}")
    )
    where = f"rank {damage['rank']}: {damage['unit']}, {damage['tensor']}{expert}, {granule}"
    return Check(where, "fail", "not the bits that were loaded", _FIX)


_FIX = "POST /weights/reload reads them again; a machine that does this twice has ill memory"


async def _ask(endpoint: Endpoint) -> Answer:
    async with endpoint.open() as client:
        return await post(client, PATH, {})
