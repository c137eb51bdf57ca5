"""Known answers and speeds on this machine's processors: right, wrong, lacking and avoided."""

import dataclasses

import pytest
import torch

from firstlight.adapt.probe import curves, device_answers, two_ranks
from firstlight.adapt.probe.device_answers import CASES, Case, run_case
from firstlight.platforms.find import find_platform

SPEC = find_platform("cpu").spec()
PRODUCT = CASES[0]


def test_the_processors_give_every_known_answer_they_can():
    answers = device_answers.answer(["cpu"])["answers"]
    assert {one["state"] for one in answers} <= {"right", "lacking"}
    assert sum(one["state"] == "right" for one in answers) >= 8


def wrong_product(a, b):
    out = torch.mm(a, b)
    if a.dtype == torch.float32:
        out[3, 5] += 1
    return out


@pytest.mark.parametrize(
    ("run", "quirks", "state"),
    [
        (torch.mm, (), "right"),
        (wrong_product, (), "wrong"),
        (lambda a, b: torch.mm(a, b) * float("nan"), (), "wrong"),
        (wrong_product, ("known",), "avoided"),
    ],
)
def test_wrong_numbers_are_wrong_unless_a_workaround_avoids_them(run, quirks, state):
    case = dataclasses.replace(PRODUCT, run=run, quirk="known")
    spec = dataclasses.replace(SPEC, quirks=frozenset(quirks))
    assert run_case(case, "cpu", spec)[0] == state


def test_what_a_device_lacks_is_no_error():
    def refused(x):
        raise NotImplementedError("not on this device\nlong explanation")

    case = Case("topk", PRODUCT.make, lambda a, b: refused(a))
    assert run_case(case, "cpu", SPEC) == ("lacking", "not on this device")
    needing = dataclasses.replace(PRODUCT, needs=("telepathy",))
    assert run_case(needing, "cpu", SPEC) == ("lacking", "the device has no telepathy")


def test_indices_are_compared_one_by_one():
    case = Case("topk", CASES[4].make, lambda x: x.topk(8).indices.roll(int(x.dtype.itemsize > 8)))
    assert run_case(case, "cpu", SPEC)[0] == "right"
    shifts = iter((0, 1))
    case = dataclasses.replace(case, run=lambda x: x.topk(8).indices.roll(next(shifts)))
    assert run_case(case, "cpu", SPEC)[0] == "wrong"


@pytest.mark.slow
def test_two_ranks_add_up_and_are_timed():
    found = two_ranks.answer(["cpu", "curve"])
    assert found["right"] and list(found["seconds"]) == [str(size) for size in two_ranks.SIZES]
    assert all(seconds > 0 for seconds in found["seconds"].values())


def test_storage_is_measured_where_it_is_asked_for_and_leaves_nothing(tmp_path):
    found = curves.storage(str(tmp_path))
    assert found["write"] > 0 and found["read"] > 0 and list(tmp_path.iterdir()) == []


def test_every_point_is_measured_in_its_curve():
    bench = curves.Bench("cpu", SPEC, find_platform("cpu"))
    calls = []
    points = [curves.Point("copies", size, 64, lambda: calls.append(1)) for size in ("1", "2")]
    found, spread = curves.measured(points, bench)
    assert list(found) == ["copies"] and list(found["copies"]) == ["1", "2"]
    assert all(rate > 0 for rate in found["copies"].values()) and spread >= 0
    assert len(calls) >= 2 * curves.ROUNDS
