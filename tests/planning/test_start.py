"""Starts from a plan: what is taken from it, what is refused, and in which words."""

import contextlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.cli.main import main
from firstlight.cli.serve import resolve_serve
from firstlight.errors import OutOfBudget, UsageError
from firstlight.planning.plan_file import read_plan
from firstlight.planning.start import check_plan, check_start, plan_start, start_load

CHECKPOINT = Path(__file__).parents[1] / "data" / "k3" / "checkpoint"
LOAD = ("--dtype", "float32", "--chunk-tokens", "64", "--max-batch-tokens", "128")


def plan(*words, model=CHECKPOINT):
    """Runs the verb and returns its exit code and what it printed as data."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(["plan", str(model), "--devices", "1xB300", "--tp", "1", *words, "--json"])
    return code, json.loads(printed.getvalue())


@pytest.fixture
def made(tmp_path):
    """A plan file of the miniature."""
    path = tmp_path / "plan.json"
    load = ("--context", "256", "--concurrency", "2")
    assert plan(*LOAD, *load, "--plan-path", str(path))[0] == 0
    return path


def test_values_come_from_the_plan_unless_somebody_set_another(made):
    resolved = resolve_serve(
        {"model": CHECKPOINT, "plan": made, "chunk_tokens": "32", "context": None}, None
    )
    assert resolved.value.context == 256 and resolved.value.max_sequences == 2
    assert resolved.value.chunk_tokens == 32
    assert resolved.origins["context"].text == f"plan {made}"
    assert resolved.origins["chunk_tokens"].source == "flag"
    assert resolved.origins["port"].source == "default"


def test_the_plan_of_another_model_is_refused(made, dense):
    asked = resolve_serve({"model": CHECKPOINT, "plan": made}, None).value
    with pytest.raises(UsageError, match=r"is the plan of a kimi_k3 model .* is a llama model"):
        check_plan(read_plan(made), dense, asked)


def test_a_degree_that_the_plan_is_not_for_is_refused(made, mini):
    asked = resolve_serve({"model": CHECKPOINT, "plan": made, "tp": "2"}, None).value
    with pytest.raises(UsageError, match="plan for tp 1, asked for is tp 2"):
        check_plan(read_plan(made), mini, asked)


def test_a_plan_that_serve_cannot_carry_out_is_refused_with_a_way_out(made):
    content = json.loads(made.read_text()) | {"pp": 2, "dp": 4}
    made.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"cannot start pp 2, dp 4; plan with `--tp N`"):
        resolve_serve({"model": CHECKPOINT, "plan": made}, None)


@settings(max_examples=15, deadline=None)
@given(context=st.integers(16, 1024), concurrency=st.integers(1, 6), chunk=st.integers(1, 128))
def test_plan_and_start_agree_to_the_byte_and_in_words(
    tmp_path_factory, mini, context, concurrency, chunk
):
    """With the memory a plan needs both accept; with a byte less both refuse in one sentence."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    load = (
        *("--dtype", "float32", "--chunk-tokens", str(chunk), "--max-batch-tokens", "128"),
        *("--context", str(context), "--concurrency", str(concurrency), "--reserve-share", "0"),
    )
    assert plan(*load, "--plan-path", str(path))[0] == 0
    asked = resolve_serve({"model": CHECKPOINT, "plan": path}, None).value
    content = read_plan(path)
    free = 1 << 40
    needed = plan_start(mini, start_load(asked, mini, free_bytes=free, plan=content)).worst.used
    assert plan(*load, "--memory-bytes", str(needed))[0] == 0
    check_start(mini, start_load(asked, mini, free_bytes=needed, plan=content))
    code, report = plan(*load, "--memory-bytes", str(needed - 1))
    assert code == 1
    told = next(c["detail"] for c in report["checks"] if c["name"] == "memory")
    with pytest.raises(OutOfBudget) as refused:
        check_start(mini, start_load(asked, mini, free_bytes=needed - 1, plan=content))
    assert str(refused.value).startswith(told) and re.search("short by 1 B on rank 0", told)


@pytest.mark.parametrize("attention", ["full", "sparse=16x2", "window=64,sinks=16"])
def test_with_tiers_plan_and_start_agree_on_the_least_device(tmp_path, mini, attention):
    """It is smaller than one without tiers, but that at this size buffers for chosen blocks are
    larger than what is saved.
    """
    path, context = tmp_path / "plan.json", 1024
    load = (
        *("--dtype", "float32", "--chunk-tokens", "32", "--max-batch-tokens", "64"),
        *("--context", str(context), "--concurrency", "2", "--reserve-share", "0"),
        *("--attention", attention, "--tiers", "host=1MiB,disk=/x:4MiB"),
    )
    assert plan(*load, "--plan-path", str(path))[0] == 0
    asked = resolve_serve({"model": CHECKPOINT, "plan": path}, None).value
    assert (asked.attention, asked.tiers) == (attention, "host=1MiB,disk=/x:4MiB")
    content = read_plan(path)

    def load_of(free):
        return start_load(asked, mini, free_bytes=free, plan=content)

    least = plan_start(mini, load_of(1)).worst.used
    alone = replace(load_of(1), rules=replace(load_of(1).rules, tiers=""))
    assert (least < plan_start(mini, alone).worst.used) == ("sparse" not in attention)
    assert plan(*load, "--memory-bytes", str(least))[0] == 0
    check_start(mini, load_of(least))
    code, report = plan(*load, "--memory-bytes", str(least - 1))
    told = next(c["detail"] for c in report["checks"] if c["name"] == "memory")
    with pytest.raises(OutOfBudget) as refused:
        check_start(mini, load_of(least - 1))
    assert code == 1 and str(refused.value).startswith(told)


def test_on_a_processor_the_host_tier_is_taken_from_the_same_memory(mini):
    asked = resolve_serve({"model": CHECKPOINT, "tiers": "host=1MiB", "context": 512}, None).value
    taken = [
        plan_start(mini, start_load(asked, mini, free_bytes=1 << 30, owned=owned)).worst
        for owned in (True, False)
    ]
    both = [stage.components["tiers"] for stage in taken]
    assert both[1] - both[0] == 2**20 == taken[1].places.host_bytes


def test_without_a_plan_one_sequence_must_fit(mini):
    asked = resolve_serve({"model": CHECKPOINT, "context": "512"}, None).value
    load = start_load(asked, mini, free_bytes=1 << 30)
    assert load.sequences == 1 and plan_start(mini, load).fits


def test_what_is_kept_of_a_device_may_already_be_taken(made, mini):
    asked = resolve_serve({"model": CHECKPOINT, "plan": made}, None).value
    content = read_plan(made)
    device, kept = content.ranks[0].device_bytes, content.reserve_share
    load = start_load(asked, mini, free_bytes=int(device * (1 - kept)) + 1, plan=content)
    assert load.memory_bytes == pytest.approx(device, abs=2)
