import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import BadInput, UsageError
from firstlight.planning.constants import EXPECTED, OPTIMISTIC, PESSIMISTIC
from firstlight.planning.hardware import (
    Figure,
    catalogue,
    find_device,
    parse_fleet,
    read_device,
)
from firstlight.planning.host_profile import measure_host
from firstlight.planning.rates import rates_of

NAMES = [
    *("S4000", "S5000", "A100", "L40S", "H100", "H200", "B200", "B300", "GB200", "GB300"),
    *("MI300X", "MI325X", "MI355X", "Ascend910B", "Ascend910C"),
]


def figures(device):
    values = ((name, getattr(device, name)) for name in device.__struct_fields__)
    return {name: figure for name, figure in values if isinstance(figure, Figure)}


def test_every_device_asked_for_is_there():
    assert sorted(d.name for d in catalogue()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_figure_has_a_source_and_a_value_or_a_range(name):
    for figure in figures(find_device(name)).values():
        assert figure.source
        assert figure.value is not None or 0 < figure.low < figure.high
        assert figure.pessimistic <= figure.expected <= figure.optimistic


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_of_the_size_such_devices_have(name):
    device = find_device(name)
    assert 40e9 <= device.memory.expected <= 300e9
    assert 0.4e12 <= device.memory_bandwidth.expected <= 10e12
    assert 5e13 <= device.bf16_rate.expected <= 5e15
    assert device.fp8_rate is None or device.fp8_rate.expected > device.bf16_rate.expected
    assert device.network_bandwidth.expected <= device.link_bandwidth.expected


def test_what_is_not_published_widens_the_band():
    device = find_device("s5000")
    assert device.bf16_rate.value is None and "bf16_rate" in device.unpublished
    fleet = parse_fleet("8xS5000")
    rates = [rates_of(fleet, known, "bfloat16") for known in (PESSIMISTIC, EXPECTED, OPTIMISTIC)]
    assert [rate.matrix for rate in rates] == [400e12, pytest.approx(489.9e12, rel=1e-4), 600e12]


@given(count=st.integers(1, 4096), island=st.integers(1, 8))
def test_fleets_are_read_as_written(count, island):
    fleet = parse_fleet(f"{count}xS5000@{island}")
    assert (fleet.count, fleet.island) == (count, min(count, island))
    assert parse_fleet(fleet.text) == fleet


def test_an_island_is_the_devices_own_unless_said():
    assert parse_fleet("64xS5000").island == 8
    assert parse_fleet("B300").text == "1xB300@1"


@pytest.mark.parametrize(
    ("text", "cards"),
    [("16xS5000@4", 4), ("64xS5000", 8), ("72xGB300", 4), ("64xL40S", 8), ("2xH100", 2)],
)
def test_a_machine_has_so_many_cards(text, cards):
    assert parse_fleet(text).machine == cards


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("64xX9000", "known: S4000"),
        ("64xS5000@16", "at most 8"),
        ("0xS5000", "at least 1"),
        ("many cards", "write for example 64xS5000@8"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_with_the_reason(text, part):
    with pytest.raises(UsageError, match=part):
        parse_fleet(text)


def test_a_device_can_be_described_by_its_user():
    with pytest.raises(BadInput, match=r"device profile: .*missing required field"):
        read_device(b'{"name": "X"}')


def test_this_machine_is_a_device_by_measurement():
    device = measure_host()
    assert device.memory_bandwidth.expected > 1e8 and device.bf16_rate.expected > 1e8
    assert parse_fleet("2xcpu", device).device is device
