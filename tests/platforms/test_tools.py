"""Streams, timing and graphs in the form a device has them; here a device that has none."""

import dataclasses

import torch

from firstlight.platforms.find import find_platform
from firstlight.platforms.tools import GraphPool, copy_to, new_stream, pinned, seconds_of

CPU = find_platform("cpu")
SPEC = CPU.spec()


def test_a_device_without_graphs_calls_the_work():
    calls = []
    pool = GraphPool(SPEC)
    pool.run("a", lambda: calls.append(1))
    pool.run("a", lambda: calls.append(2))
    assert calls == [1, 2] and pool.live == 0 and not pool.captures


def test_a_quirk_turns_graphs_off():
    able = dataclasses.replace(SPEC, capabilities=SPEC.capabilities | {"graphs"})
    assert GraphPool(able).captures
    assert not GraphPool(dataclasses.replace(able, quirks=frozenset({"graphs_off"}))).captures


def test_what_a_device_lacks_is_left_out():
    x = torch.ones(3)
    assert new_stream(SPEC) is None and pinned(x, SPEC) is x
    assert torch.equal(copy_to(x, "cpu", SPEC), x)


def test_work_is_timed_by_the_host_where_there_are_no_events():
    ran = []
    assert seconds_of(lambda: ran.append(1), SPEC, CPU) >= 0 and ran == [1]
