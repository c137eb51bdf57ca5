"""Owns the smoke run: is this a service that speaks the protocol with a model that works?

Knows nothing of the server behind the address; it gathers checks into one report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass

import httpx

from firstlight.accept.bench_load import find_model
from firstlight.accept.client import Answer, Api, BrokenStream, Endpoint, get
from firstlight.accept.report import Check, Report, Section
from firstlight.accept.samples import Profile, Sample, load_profile
from firstlight.accept.smoke_abilities import (
    IMAGES,
    TOOLS,
    check_images,
    check_streamed,
    check_tools,
    judge_reasoning,
    streamed_samples,
)
from firstlight.accept.smoke_answers import Answered, judge_groups, judge_health
from firstlight.accept.smoke_exchanges import exchange_rows, exchanges
from firstlight.accept.smoke_likelihood import check_likelihood
from firstlight.accept.smoke_protocol import PROTOCOL_CHECKS, check_stream
from firstlight.accept.smoke_refusals import check_refusals
from firstlight.accept.smoke_service import (
    ABSENT_STATUSES,
    Malformed,
    Refused,
    Service,
    find_apis,
)
from firstlight.errors import EnvironmentProblem, UsageError


@dataclass(frozen=True, slots=True)
class SmokeSettings:
    """What to smoke-test; without a model the first one listed is taken.

    `answer_tokens` limits each answer of a sample that names no limit of its own: raise it for
    models that reason at length. `timeout_seconds` is for a single request. `dtype` is the type the
    service computes in; when empty the one it names at /startup, else float32.
    """

    base_url: str
    model: str = ""
    profile: str = "unknown"
    api_key: str = ""
    answer_tokens: int = 256
    timeout_seconds: float = 300.0
    dtype: str = ""

    def __post_init__(self) -> None:
        if self.answer_tokens < 1:
            raise UsageError(f"{self.answer_tokens} tokens for an answer; allow 1 or more")


def run_smoke(settings: SmokeSettings) -> Report:
    """Runs all checks and returns the report; a degenerate model or service fails it.

    Raises EnvironmentProblem when no service answers at all, UsageError for an unknown profile.
    """
    return asyncio.run(_smoke(settings, load_profile(settings.profile)))


async def _smoke(settings: SmokeSettings, profile: Profile) -> Report:
    endpoint = Endpoint(settings.base_url, settings.api_key, settings.timeout_seconds)
    async with endpoint.open() as client:
        models, model = await _check_models(client, settings.model)
        answers = await find_apis(client, model) if model else {}
        offered = tuple(api for api, answer in answers.items() if answer.status == 200)
        interfaces = _judge_interfaces(answers)
        opening = Section("service", checks=(models, *interfaces))
        sections = [opening]
        answered: list[Answered] = []
        if offered:
            service = Service(client, model, offered)
            sections += await _protocol_sections(service)
            dtype = settings.dtype or await _named_dtype(client)
            asked = await _answer_sections(service, profile, settings.answer_tokens, dtype)
            answered = asked.answered
            sections += asked.sections
    lines = (f"{endpoint.root}, model {model or '?'}", f"profile: {profile.description}")
    heading = Section("", lines=lines)
    return Report("firstlight smoke", (heading, *sections), data=_data(settings, model, answered))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What came of the profile's samples."""

    answered: list[Answered]
    sections: list[Section]


async def _named_dtype(client: httpx.AsyncClient) -> str:
    """The type of compute a firstlight service names; of any other service, float32."""
    answer = await get(client, "/startup")
    facts = answer.body.get("facts") if answer.ok else None
    named = facts.get("dtype") if isinstance(facts, dict) else None
    return named if isinstance(named, str) else "float32"


async def _answer_sections(
    service: Service, profile: Profile, answer_tokens: int, dtype: str
) -> _Asked:
    sight = await _guarded_or_none(IMAGES, check_images(service, profile))
    sees = sight is None or sight.status == "ok"
    samples = [
        one for one in profile.samples if one.api in service.apis and (sees or not one.images)
    ]
    answered = [await _ask(service, sample, answer_tokens) for sample in samples]
    checks = [*judge_health(answered), *judge_groups(profile, answered)]
    checks += [
        await _guarded(f"likelihood of {one.name}", check_likelihood(service, one, dtype))
        for one in profile.likelihoods
    ]
    abilities = [sight] if sight else []
    if "chat" in service.apis:
        abilities += await _ability_checks(service, profile, answer_tokens, sees=sees)
        abilities.insert(1 if sight else 0, judge_reasoning(profile, answered))
    return _Asked(
        answered,
        [
            Section("abilities", checks=tuple(abilities)),
            Section(f"answers (profile {profile.name})", checks=tuple(checks)),
            *exchanges(answered),
        ],
    )


async def _ability_checks(
    service: Service, profile: Profile, answer_tokens: int, *, sees: bool
) -> list[Check]:
    tools = await _guarded(TOOLS, check_tools(service, profile, answer_tokens))
    streams = [
        await _guarded(
            f"stream equals whole: {kind}", check_streamed(service, kind, sample, answer_tokens)
        )
        for kind, sample in streamed_samples(profile, images=sees)
    ]
    return [tools, *streams]


async def _check_models(client: httpx.AsyncClient, wanted: str) -> tuple[Check, str]:
    """Whether models are listed, and the model to ask; empty when there is none."""
    name = "models are listed"
    answer = await get(client, "/v1/models")
    rows = answer.body.get("data") if answer.ok else None
    ids = [row.get("id") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    names = [one for one in ids if isinstance(one, str) and one]
    if not names:
        detail = f"HTTP {answer.status}: {ascii(answer.error_message)[1:-1]}"
        return Check(name, "fail", detail, 'answer {"data": [{"id": ...}]} at /v1/models'), wanted
    if wanted and wanted not in names:
        fix = "name one that is listed"
        return Check(name, "fail", f"{wanted} is not among {', '.join(names[:5])}", fix), wanted
    return Check(name, "ok", ", ".join(names[:5])), await find_model(client, wanted or names[0])


def _judge_interfaces(answers: dict[Api, Answer]) -> tuple[Check, ...]:
    """One check for each interface, and a failure when there is none."""
    checks = []
    for api, answer in answers.items():
        if answer.status == 200:
            checks.append(Check(f"{api} answers", "ok", "HTTP 200"))
        elif answer.status in ABSENT_STATUSES:
            checks.append(Check(f"{api} answers", "unknown", f"not offered (HTTP {answer.status})"))
        else:
            detail = f"HTTP {answer.status}: {ascii(answer.error_message)[1:-1]}"
            checks.append(Check(f"{api} answers", "fail", detail, "see the service's log"))
    if not any(answer.status == 200 for answer in answers.values()):
        checks.append(Check("an interface answers", "fail", "neither chat nor completions does"))
    return tuple(checks)


async def _protocol_sections(service: Service) -> list[Section]:
    checks = [
        await _guarded(f"stream equals whole ({api})", check_stream(service, api))
        for api in service.apis
    ]
    checks += [await _guarded(name, check(service)) for name, check in PROTOCOL_CHECKS]
    refusals = await _guarded_all("bad input is refused", check_refusals(service))
    return [Section("protocol", checks=tuple(checks)), Section("bad input", checks=refusals)]


async def _guarded(name: str, check: Awaitable[Check]) -> Check:
    """Turns whatever a check may meet on the wire into a failure of that check."""
    try:
        return await check
    except (Refused, Malformed, BrokenStream, EnvironmentProblem, httpx.TransportError) as problem:
        return Check(name, "fail", ascii(f"{type(problem).__name__}: {problem}")[1:-1])


async def _guarded_or_none(name: str, check: Awaitable[Check | None]) -> Check | None:
    try:
        return await check
    except (Malformed, EnvironmentProblem) as problem:
        return Check(name, "fail", ascii(f"{type(problem).__name__}: {problem}")[1:-1])


async def _guarded_all(name: str, checks: Awaitable[tuple[Check, ...]]) -> tuple[Check, ...]:
    try:
        return await checks
    except EnvironmentProblem as problem:
        return (Check(name, "fail", ascii(str(problem))[1:-1]),)


async def _ask(service: Service, sample: Sample, answer_tokens: int) -> Answered:
    try:
        reply = await service.ask(
            sample.api,
            sample.prompt,
            max_tokens=sample.max_tokens or answer_tokens,
            **sample.options,
        )
    except (Refused, Malformed, EnvironmentProblem) as problem:
        return Answered(sample, None, ascii(str(problem))[1:-1])
    return Answered(sample, reply)


def _data(settings: SmokeSettings, model: str, answered: list[Answered]) -> dict[str, object]:
    return {
        "base_url": settings.base_url,
        "model": model,
        "profile": settings.profile,
        "answers": exchange_rows(answered),
    }
