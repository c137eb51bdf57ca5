"""Owns the verb `smoke`: flags in, report out; the checks are accept's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.cli.options import AsJson, options_from
from firstlight.cli.outcome import show
from firstlight.settings.serve import DTYPES
from firstlight.settings.settings import resolve_flags, setting

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, kw_only=True)
class SmokeFlags:
    """What the verb takes."""

    url: str = setting(DEFAULT_URL, "address of the service")
    model: str = setting("", "model to ask; the first one listed when not given")
    profile: str = setting("unknown", "known answers to expect: a bundled profile's name")
    answer_tokens: int = setting(256, "longest answer asked for, in tokens", minimum=1)
    timeout_seconds: float = setting(300.0, "time limit of one request", minimum=0.001)
    dtype: str | None = setting(
        None,
        "type the service computes in: known likelihoods are held to what it allows",
        choices=DTYPES,
        optional_text="what it names at /startup, else float32",
    )
    api_key: str = setting("", "key to send", secret=True)


@options_from(SmokeFlags, arguments=("url",))
def smoke(flags: Mapping[str, Any], as_json: AsJson = False) -> int:
    """Check a running service and its answers.

    Protocol, known answers, and refusal of bad input, over HTTP."""
    from firstlight.accept.smoke import SmokeSettings, run_smoke

    given = resolve_flags(SmokeFlags, flags)
    settings = SmokeSettings(
        base_url=given.url,
        model=given.model,
        profile=given.profile,
        api_key=given.api_key,
        answer_tokens=given.answer_tokens,
        timeout_seconds=given.timeout_seconds,
        dtype=given.dtype or "",
    )
    return show(run_smoke(settings), as_json=as_json)
