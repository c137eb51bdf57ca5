"""Measured speeds as the planner's device record, and what fits, in numbers."""

import json
from pathlib import Path

import pytest

from firstlight.accept.probe_profile import Wanted, by_name, profile_of, suggestions, write_profile
from firstlight.accept.probe_report import curve_section
from firstlight.models.spec import read_model_spec
from firstlight.planning.hardware import find_device, read_device

CONFIG = Path(__file__).parents[1] / "data" / "k3" / "full" / "config.json"
CURVES = {
    "device": "Example 9000",
    "cores": 4,
    "count": 1,
    "memory_bytes": 8 * 2**30,
    "products": {"float32": {"256": 5e10, "2048": 6e10}, "bfloat16": {"2048": 9e10}},
    "memory": {"1048576": 3e10, "268435456": 1e10},
    "host": {},
    "storage": {"write": 1e9, "read": 2e9},
    "collective_seconds": {"4096": 1e-4, "16777216": 2**24 / 1e9},
    "took_seconds": 1.0,
    "spread": 0.02,
}


def test_a_profile_is_what_the_planner_reads(tmp_path):
    device = profile_of(CURVES, "host")
    write_profile(device, tmp_path / "device.json")
    assert read_device((tmp_path / "device.json").read_bytes()) == device
    assert device.name == "cpu" and device.memory.value == 8 * 2**30
    assert device.bf16_rate.value == 6e10 and "float32" in device.bf16_rate.source
    assert device.memory_bandwidth.value == 1e10
    assert device.link_bandwidth.value == pytest.approx(1e9)


@pytest.mark.parametrize(("spread", "status"), [(0.02, "ok"), (0.4, "warn")])
def test_measuring_beside_other_work_is_said(spread, status):
    section = curve_section(CURVES | {"spread": spread})
    assert [check.status for check in section.checks] == [status] and len(section.rows) == 9


def test_a_card_keeps_published_figures_where_nothing_was_measured():
    measured = CURVES | {"device": "MTT S5000", "host": {"268435456": 5e10}}
    device, known = profile_of(measured, "Moore Threads"), find_device("S5000")
    assert device.bf16_rate.value == 9e10 and device.host_bandwidth.value == 5e10
    assert device.link_bandwidth == known.link_bandwidth and device.fp8_rate == known.fp8_rate
    unheard = profile_of(measured | {"device": "Nobody's 1"}, "Nobody")
    assert unheard.link_bandwidth.value is None and unheard.network_bandwidth.low


@pytest.mark.parametrize(
    ("name", "known"),
    [("MTT S5000", "S5000"), ("NVIDIA H100 80GB HBM3", "H100"), ("MTT S80", None), ("", None)],
)
def test_a_card_is_known_by_a_word_of_its_name(name, known):
    found = by_name(name)
    assert (found.name if found else None) == known


def test_suggestions_say_what_is_left_and_what_is_short():
    spec = read_model_spec(json.loads(CONFIG.read_text()))
    wanted = Wanted(context=8192, concurrency=1, dtype="bfloat16")
    lines = suggestions(spec, find_device("B300"), 8, wanted)
    assert [line.split()[1] for line in lines] == ["1", "2", "4", "8"]
    assert lines[0].endswith("at 8K x 1") and "on rank 0" in lines[0]
    assert lines[3].startswith("tp 8 fits with ") and "left at 8K x 1" in lines[3]


def test_what_does_not_fit_at_all_comes_with_ways_out():
    spec = read_model_spec(json.loads(CONFIG.read_text()))
    wanted = Wanted(context=128 * 1024, concurrency=16, dtype="bfloat16")
    lines = suggestions(spec, find_device("S5000"), 8, wanted)
    assert all("fits" not in line for line in lines)
    assert any("devices hold it" in line for line in lines), lines
