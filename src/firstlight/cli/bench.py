"""Owns the verb `bench`: flags in, report out; load and numbers are accept's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstlight.cli.options import AsJson, options_from
from firstlight.cli.outcome import show
from firstlight.cli.smoke import DEFAULT_URL
from firstlight.settings.settings import resolve_flags, setting

if TYPE_CHECKING:
    from firstlight.accept.bench_settings import BenchSettings

NOT_ASKED = "not asked"


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """What the verb takes; times in seconds, lengths in tokens."""

    url: str = setting(DEFAULT_URL, "address of the service")
    against: str | None = setting(
        None, "a second service, loaded in turns with the first", optional_text="none"
    )
    pairs: int = setting(5, "runs of each service with --against", minimum=1)
    model: str = setting("", "model to ask; the first one listed when not given")
    api: str = setting("completions", "interface to use", choices=("chat", "completions"))
    num_requests: int = setting(64, "requests that are measured", minimum=1)
    concurrency: int = setting(8, "requests in flight", minimum=1)
    rate: float | None = setting(
        None, "arrivals per second (Poisson) instead of --concurrency", optional_text="none"
    )
    prompts: str = setting("random", "what prompts are made of", choices=("random", "text"))
    input_tokens: int = setting(128, "mean prompt length", kind="count", minimum=1)
    input_spread: float = setting(0.0, "spread of prompt lengths (lognormal sigma)", minimum=0)
    output_tokens: int = setting(64, "answer length", kind="count", minimum=1)
    shared_prefix: float = setting(0.0, "share of the prompt all requests have in common")
    ignore_eos: bool = setting(True, "ask for the full answer length")
    warmup_requests: int = setting(2, "requests sent before, not measured", minimum=0)
    seed: int = setting(0, "seed of prompts and arrivals", minimum=0)
    ttft: float | None = setting(
        None, "objective: first token within", minimum=0, optional_text=NOT_ASKED
    )
    tpot: float | None = setting(
        None, "objective: mean time of a further token", minimum=0, optional_text=NOT_ASKED
    )
    e2e: float | None = setting(
        None, "objective: whole answer within", minimum=0, optional_text=NOT_ASKED
    )
    requests_path: Path | None = setting(
        None, "file to write one JSON line a request to", optional_text="none"
    )
    api_key: str = setting("", "key to send", secret=True)


@options_from(BenchFlags, arguments=("url",))
def bench(flags: Mapping[str, Any], as_json: AsJson = False) -> int:
    """Measure a running service under load."""
    from firstlight.accept.bench import compare, run_bench
    from firstlight.accept.bench_report import bench_report, compare_report
    from firstlight.accept.client import Endpoint

    given = resolve_flags(BenchFlags, flags)
    settings = bench_settings(given)
    if given.against is None:
        return show(bench_report(run_bench(settings)), as_json=as_json)
    other = Endpoint(given.against, given.api_key)
    compared = compare(settings, settings.endpoint, other, num_pairs=given.pairs)
    return show(compare_report(compared), as_json=as_json)


def bench_settings(given: BenchFlags) -> BenchSettings:
    """The load run that the flags ask for; raises UsageError when they contradict each other."""
    from firstlight.accept.bench_settings import BenchSettings, Objectives
    from firstlight.accept.client import Endpoint

    return BenchSettings(
        endpoint=Endpoint(given.url, given.api_key),
        model=given.model,
        api="chat" if given.api == "chat" else "completions",
        num_requests=given.num_requests,
        concurrency=given.concurrency,
        rate=given.rate,
        prompts="text" if given.prompts == "text" else "random",
        input_tokens=given.input_tokens,
        input_spread=given.input_spread,
        output_tokens=given.output_tokens,
        shared_prefix=given.shared_prefix,
        ignore_eos=given.ignore_eos,
        warmup_requests=given.warmup_requests,
        seed=given.seed,
        objectives=Objectives(given.ttft, given.tpot, given.e2e),
        requests_path=given.requests_path,
    )
