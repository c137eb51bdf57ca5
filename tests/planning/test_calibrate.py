"""Rates fitted to timed requests give those times back, and those of loads not seen."""

from dataclasses import replace

import pytest

from firstlight.planning.arrangement import Arrangement
from firstlight.planning.calibrate import Machine, Observation, error_of, fit
from firstlight.planning.constants import EXPECTED
from firstlight.planning.hardware import Fleet
from firstlight.planning.host_profile import measure_host
from firstlight.planning.rates import rates_of
from firstlight.planning.work import model_work
from firstlight.planning.workload import PlanRules, Workload
from firstlight.sharding.layout import Layout

SEEN = ((64, 16, 1), (512, 16, 1), (256, 32, 4), (1024, 8, 2))
HELD_OUT = ((200, 24, 1), (900, 12, 3))


def load(prompt, output, concurrency):
    return Workload(
        context=4096, concurrency=concurrency, input_tokens=prompt, output_tokens=output
    )


def test_a_fit_finds_the_machine_that_was_timed(dense):
    rules = PlanRules(dtype="float32", chunk_tokens=512, max_batch_tokens=2048)
    machine = Machine(model_work(dense, "float32"), Arrangement(Layout()), rules)
    start = rates_of(Fleet(1, measure_host(), 1), EXPECTED, "float32")
    start = replace(start, memory=1.5e10, matrix=3.3e11, narrow=3.3e11)  # the same start each time
    slow = replace(EXPECTED, memory=1.0, matrix=1.0, kernel=2e-5, host=2e-3, overlap=0.0)
    slow = replace(slow, sequence=1e-4, request=4e-3)
    true = replace(start, constants=slow, memory=4e9, matrix=3e10, narrow=3e10, measured=True)
    timed = [
        Observation(load(*one), found.ttft, found.tpot)
        for one in SEEN
        for found in [machine.speed(true, load(*one))]
    ]
    fitted = fit(machine, start, timed)
    assert error_of(machine, fitted, timed) < error_of(machine, start, timed) / 100
    for one in HELD_OUT:
        found, wanted = machine.speed(fitted, load(*one)), machine.speed(true, load(*one))
        assert found.ttft == pytest.approx(wanted.ttft, rel=0.1)
        assert found.tpot == pytest.approx(wanted.tpot, rel=0.1)
