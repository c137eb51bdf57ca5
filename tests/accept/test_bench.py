"""Holds load runs against a real small service: counting, dialects, failures and comparison."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from firstlight.accept.bench import compare, run_bench
from firstlight.accept.bench_report import bench_report, compare_report
from firstlight.accept.bench_settings import BenchSettings, Objectives
from firstlight.accept.client import Endpoint
from firstlight.accept.report import print_report
from firstlight.errors import BadInput, EnvironmentProblem, UsageError

Start = Callable[..., Any]


def settings(url: str, **changes: Any) -> BenchSettings:
    plain = BenchSettings(
        Endpoint(url, timeout_seconds=20),
        num_requests=9,
        concurrency=3,
        input_tokens=12,
        output_tokens=8,
        warmup_requests=1,
    )
    return replace(plain, **changes)


def test_a_closed_loop_counts_every_token(start_service: Start) -> None:
    service = start_service()
    bench = run_bench(settings(service.url))
    numbers = bench.numbers
    assert (numbers.num_succeeded, numbers.num_failed) == (9, 0)
    assert (numbers.prompt_tokens, numbers.output_tokens) == (9 * 12, 9 * 8)
    assert numbers.ttft and numbers.icl and numbers.ttft.count == 9 and numbers.icl.count == 9 * 7
    assert len(service.faults.requests) == 9 + 1 + 1  # asked once what it takes, one warm-up
    prompts = [tuple(request["prompt"]) for request in service.faults.requests]
    assert len(set(prompts)) == len(prompts)


def test_an_open_loop_sends_at_poisson_times(start_service: Start) -> None:
    bench = run_bench(settings(start_service().url, rate=200.0))
    dues = [record.due for record in bench.records]
    assert dues == sorted(dues) and len(set(dues)) == 9
    assert all(record.sent >= record.due and not record.failure for record in bench.records)


def test_what_an_endpoint_refuses_is_left_out_and_said(start_service: Start) -> None:
    service = start_service("no token ids", "no ignore_eos", "no stream_options")
    bench = run_bench(settings(service.url))
    assert (bench.dialect.token_ids, bench.dialect.ignore_eos, bench.dialect.usage) == (0, 0, 0)
    assert all(record.tokens_from == "chunks" for record in bench.records)
    checks = {check.name: check.status for check in bench_report(bench).all_checks}
    assert checks["tokens counted by the service"] == "warn"


def test_only_what_is_refused_is_left_out(start_service: Start) -> None:
    dialect = run_bench(settings(start_service("no ignore_eos").url)).dialect
    assert (dialect.token_ids, dialect.ignore_eos, dialect.usage) == (True, False, True)


def test_chat_prompts_are_text(start_service: Start) -> None:
    service = start_service()
    bench = run_bench(settings(service.url, api="chat", prompts="text"))
    assert bench.numbers.num_succeeded == 9
    assert all("messages" in request for request in service.faults.requests)


def test_failures_are_counted_by_kind_and_leave_the_rest(start_service: Start) -> None:
    bench = run_bench(settings(start_service("fails often").url, warmup_requests=0))
    assert bench.numbers.failures == {"http 429": 3}
    assert bench.numbers.output_tokens == 6 * 8
    check = next(c for c in bench_report(bench).checks if c.name == "requests succeed")
    assert check.status == "warn" and "queue full" in check.detail


def test_a_stream_without_its_end_is_no_success(start_service: Start) -> None:
    with pytest.raises(BadInput, match="DONE"):
        run_bench(settings(start_service("no end of stream").url))


def test_objectives_give_goodput(start_service: Start) -> None:
    url = start_service().url
    kept = run_bench(settings(url, objectives=Objectives(e2e_seconds=60))).numbers
    missed = run_bench(settings(url, objectives=Objectives(ttft_seconds=1e-9))).numbers
    assert (kept.goodput_share, missed.goodput_share) == (1.0, 0.0)


def test_records_are_written_one_a_line(start_service: Start, tmp_path: Path) -> None:
    path = tmp_path / "new" / "requests.jsonl"
    run_bench(settings(start_service().url, requests_path=path))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(9))


def test_two_endpoints_get_equal_prompts_in_turns(start_service: Start) -> None:
    a, b = start_service(), start_service()
    report = compare(
        settings("http://x", warmup_requests=0), Endpoint(a.url), Endpoint(b.url), num_pairs=2
    )
    sent_a, sent_b = ([str(r["prompt"]) for r in side.faults.requests] for side in (a, b))
    assert sorted(sent_a) == sorted(sent_b) and len(set(sent_a)) == 2 * 9 + 1
    ratio = next(r for r in report.ratios if r.name == "output_tokens_per_second")
    assert len(ratio.ratios) == 2 and min(ratio.ratios) <= ratio.median <= max(ratio.ratios)
    assert compare_report(report).ok


def test_the_report_prints_definitions_and_hides_the_key(start_service: Start) -> None:
    url = start_service().url
    report = bench_report(run_bench(settings(url, endpoint=Endpoint(url, "top-secret"))))
    console = Console(file=io.StringIO(), width=110, no_color=True)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.isascii() and "pN is linear" in text and "TTFT" in text
    assert "top-secret" not in report.to_json() + text


def test_nothing_listening_is_an_environment_problem() -> None:
    with pytest.raises(EnvironmentProblem, match="check that the service runs"):
        run_bench(settings("http://127.0.0.1:9"))


def test_impossible_settings_name_every_offender() -> None:
    with pytest.raises(UsageError, match=r"0 requests.*rate -1.*shared prefix 2"):
        settings("http://x", num_requests=0, rate=-1.0, shared_prefix=2.0)
