"""Owns how the numbers of a load run are shown; knows nothing of how they were measured."""

from __future__ import annotations

from typing import Any

import msgspec

from firstlight.accept.bench import BenchReport, CompareReport
from firstlight.accept.bench_numbers import DEFINITIONS, Numbers, Spread
from firstlight.accept.report import Cell, Check, Report, Section
from firstlight.units import format_seconds


def bench_report(bench: BenchReport) -> Report:
    """Turns a load run into the report the command shows."""
    sections = (_load(bench), _rates(bench.numbers), _latencies(bench.numbers), _definitions())
    return Report("firstlight bench", sections, _checks(bench, ""), bench_data(bench))


def compare_report(compared: CompareReport) -> Report:
    """Turns a run of two endpoints in turns into the report the command shows."""
    rows = tuple(
        (
            ratio.name,
            "higher" if ratio.higher_is_better else "lower",
            sorted(ratio.a)[len(ratio.a) // 2],
            sorted(ratio.b)[len(ratio.b) // 2],
            ratio.median,
            min(ratio.ratios),
            max(ratio.ratios),
        )
        for ratio in compared.ratios
    )
    columns = ("number", "better", "A median", "B median", "A/B median", "A/B min", "A/B max")
    lines = (
        f"A: {compared.a.root}",
        f"B: {compared.b.root}",
        f"{len(compared.pairs)} pairs of runs in turns A B A B; the same prompts within a pair",
        f"load: {compared.pairs[0][0].settings.load}",
    )
    checks = tuple(
        check
        for index, pair in enumerate(compared.pairs, start=1)
        for side, bench in zip("AB", pair, strict=True)
        for check in _checks(bench, f"{side}{index} ")
        if check.status != "ok"
    ) or (Check("every run is sound", "ok", f"{2 * len(compared.pairs)} runs"),)
    ratios = Section("ratios over the pairs", lines=lines, columns=columns, rows=rows)
    data = {
        "a": compared.a.root,
        "b": compared.b.root,
        "pairs": [[bench_data(a), bench_data(b)] for a, b in compared.pairs],
        "ratios": {r.name: {"ratios": r.ratios, "median": r.median} for r in compared.ratios},
    }
    return Report("firstlight bench: two endpoints", (ratios, _definitions()), checks, data)


def bench_data(bench: BenchReport) -> dict[str, Any]:
    """Everything a program may want of a run but the single requests; holds no key."""
    settings = msgspec.to_builtins(bench.settings, enc_hook=str)
    settings["endpoint"] = bench.settings.endpoint.root
    return {
        "model": bench.model,
        "settings": settings,
        "load": bench.settings.load,
        "accepted": msgspec.to_builtins(bench.dialect),
        "client": msgspec.to_builtins(bench.client),
        "client_was_bottleneck": bench.client_was_bottleneck,
        "numbers": msgspec.to_builtins(bench.numbers),
        "definitions": dict(DEFINITIONS),
    }


def _load(bench: BenchReport) -> Section:
    settings = bench.settings
    kind = "token ids" if bench.dialect.token_ids else "text"
    lengths = f"about {settings.input_tokens} tokens in, up to {settings.output_tokens} out"
    lines = [
        f"endpoint: {settings.endpoint.root}, model {bench.model}, {settings.api} interface",
        f"load: {settings.load}; {settings.num_requests} requests",
        f"prompts: {settings.prompts} as {kind}, {lengths}, seed {settings.seed}",
    ]
    if settings.shared_prefix:
        lines.append(f"the first {settings.shared_prefix:.0%} of every prompt is the same")
    lines += [f"note: {note}" for note in bench.dialect.notes if _is_news(bench, note)]
    return Section("load", lines=tuple(lines))


def _is_news(bench: BenchReport, note: str) -> bool:
    """Whether a note tells of something that was asked for and not accepted."""
    if "ignore_eos" in note:
        return bench.settings.ignore_eos
    return True


def _rates(numbers: Numbers) -> Section:
    rows: list[tuple[Cell, ...]] = [
        ("wall time", format_seconds(numbers.wall_seconds)),
        ("requests succeeded", numbers.num_succeeded),
        ("requests failed", numbers.num_failed),
        ("prompt tokens", numbers.prompt_tokens),
        ("output tokens", numbers.output_tokens),
        ("tokens per chunk", numbers.tokens_per_chunk),
        ("requests/s", numbers.requests_per_second),
        ("output tokens/s", numbers.output_tokens_per_second),
        ("total tokens/s", numbers.total_tokens_per_second),
    ]
    if numbers.goodput_per_second is not None:
        rows.append(("goodput requests/s", numbers.goodput_per_second))
        rows.append(("share within objectives", numbers.goodput_share))
    rows += [(f"failed: {kind}", count) for kind, count in numbers.failures.items()]
    return Section("throughput", columns=("number", "value"), rows=tuple(rows))


def _latencies(numbers: Numbers) -> Section:
    parts = (("TTFT", numbers.ttft), ("TPOT", numbers.tpot), ("ICL", numbers.icl))
    rows = tuple(_latency_row(name, part) for name, part in (*parts, ("E2E", numbers.e2e)) if part)
    columns = ("latency", "count", "mean", "p50", "p90", "p99", "max")
    return Section("latency", columns=columns, rows=rows)


def _latency_row(name: str, part: Spread) -> tuple[Cell, ...]:
    values = (part.mean, part.p50, part.p90, part.p99, part.maximum)
    return (name, part.count, *(format_seconds(value) for value in values))


def _definitions() -> Section:
    return Section("definitions", lines=tuple(f"{k}: {v}" for k, v in DEFINITIONS.items()))


def _checks(bench: BenchReport, prefix: str) -> tuple[Check, ...]:
    return (
        _requests_check(bench, prefix),
        _client_check(bench, prefix),
        _counting_check(bench, prefix),
    )


def _requests_check(bench: BenchReport, prefix: str) -> Check:
    name, numbers = f"{prefix}requests succeed", bench.numbers
    total = numbers.num_succeeded + numbers.num_failed
    if not numbers.num_failed:
        return Check(name, "ok", f"{total} of {total}")
    first = next(record for record in bench.records if record.failure)
    detail = f"{numbers.num_failed} of {total} failed; first: {first.failure}: {first.detail}"
    fix = "the numbers hold for the others only; see the service's log"
    return Check(name, "warn" if numbers.num_succeeded else "fail", ascii(detail)[1:-1], fix)


def _client_check(bench: BenchReport, prefix: str) -> Check:
    name, client = f"{prefix}client keeps up", bench.client
    detail = (
        f"event loop late by {format_seconds(client.lag_p99)} (p99), "
        f"{client.cpu_share:.0%} of one core used"
    )
    if not bench.client_was_bottleneck:
        return Check(name, "ok", detail)
    fix = "the client limits these numbers: run it on another machine or lower the load"
    return Check(name, "warn", detail, fix)


def _counting_check(bench: BenchReport, prefix: str) -> Check:
    name, numbers = f"{prefix}tokens counted by the service", bench.numbers
    if not numbers.num_counted_by_chunks:
        return Check(name, "ok", "from usage")
    detail = f"{numbers.num_counted_by_chunks} requests carried no usage: chunks were counted"
    return Check(name, "warn", detail, "token rates are a lower bound; enable usage in streams")
