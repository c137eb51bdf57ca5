"""Devices that cannot serve are refused in one sentence that says what to use."""

import dataclasses

import pytest

from firstlight.errors import EnvironmentProblem
from firstlight.platforms.fitness import require_fit
from firstlight.platforms.spec import DeviceSpec, Memory

CARD = DeviceSpec(
    name="MTT S80",
    kind="musa",
    index=0,
    memory=Memory(2**34, 2**34),
    cores=32,
    capabilities=frozenset({"float32", "float16"}),
    arch=31,
)


def test_an_architecture_that_is_not_served_is_refused():
    with pytest.raises(
        EnvironmentProblem, match=r"MTT S80 \(architecture 21\) is not served: .*https"
    ):
        require_fit(dataclasses.replace(CARD, arch=21), "float32")


def test_a_type_the_device_lacks_is_refused_with_another():
    with pytest.raises(
        EnvironmentProblem, match="does not compute in bfloat16; use --dtype float16"
    ):
        require_fit(CARD, "bfloat16")
    require_fit(CARD, "float16")


def test_fp8_caches_need_a_device_that_holds_fp8():
    with pytest.raises(EnvironmentProblem, match=r"MTT S80 is not known to hold FP8.*int8"):
        require_fit(CARD, "float16", "fp8")
    require_fit(CARD, "float16", "int8")
    able = CARD.capabilities | {"fp8_storage"}
    require_fit(dataclasses.replace(CARD, capabilities=able), "float16", "fp8")


def test_an_architecture_nobody_described_is_not_refused():
    require_fit(dataclasses.replace(CARD, arch=77), "float32")
