"""The checks on recorded machines: what is broken is found with its fix; nothing unknown holds."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.adapt.probe.examine import chosen_stack, examine
from firstlight.adapt.probe.host_checks import Purpose
from firstlight.errors import BadInput
from firstlight.platforms.find import platforms
from firstlight.platforms.machine import RecordedMachine, RecordingMachine, read_record

MACHINES = Path(__file__).parents[1] / "data" / "machines"
STACKS = [one.stack for one in platforms()]
HEALTHY = ("healthy-s5000", "healthy-h100", "healthy-cpu")
# machine -> number of the check, name, status, words of the detail, words of the fix
BROKEN = {
    "wrong-driver": (6, "versions together", "fail", "driver contradicts row m27", "driver 3.3.*"),
    "driver-not-available": (3, "driver", "fail", "'N/A'", "container image and toolkit"),
    "link-down": (8, "links", "fail", "MTLink down: card 3 link 2", "reseat"),
    "link-downgraded": (8, "links", "warn", "card 0 link 4", "slower collectives"),
    "no-peer-memory": (11, "peer memory", "fail", "mthreads_peermem is not", "modprobe mthreads"),
    "foreign-mccl": (9, "collectives", "fail", "package mccl 0.3.1", "pip uninstall mccl"),
    "foreign-backend": (9, "collectives", "fail", "comes from mccl.backend", "uninstall"),
    "stock-torch": (5, "torch_musa", "fail", "No module named", "Moore Threads"),
    "wrong-wheel": (5, "torch build", "fail", "built for 22, the cards are 31", "architecture"),
    "plugin-mismatch": (5, "torch_musa", "fail", "2.5.0 with torch 2.7.1", "torch 2.5.0"),
    "arch-21": (7, "cards", "fail", "architecture 21 is not served", "newer generation"),
    "mixed-cards": (7, "equal cards", "fail", "MTT S4000", "MUSA_VISIBLE_DEVICES"),
    "full-disk": (1, "disk", "fail", "full", "--folder"),
    "no-shared-memory": (1, "shared memory", "fail", "no /dev/shm", "--shm-size"),
    "wrong-python": (1, "python", "fail", "Python 3.10 only", "use Python 3.10"),
    "unknown-driver-for-sdk": (6, "versions together", "unknown", "driver not verified", "known"),
    "loader-error": (4, "libraries", "fail", "undefined symbol: musaLaunch", "LD_LIBRARY_PATH"),
    "blind-container": (
        2,
        "device nodes",
        "fail",
        "no device node",
        "MTHREADS_VISIBLE_DEVICES=all",
    ),
    "no-permission": (2, "device nodes", "fail", "Permission denied", "group render"),
    "bad-kernel": (1, "kernel", "fail", "5.15.0-127", "5.15.0-105"),
    "peer-garbage": (10, "copy 0-1", "fail", "other numbers", "do not serve"),
    "wrong-sum": (9, "collectives", "fail", "numbers differ", "one card"),
    "bad-mask": (2, "masks", "fail", "no list of cards", "MUSA_VISIBLE_DEVICES=0,1"),
    "masks-disagree": (2, "masks", "warn", "CUDA_VISIBLE_DEVICES=2,3 differs", "set both alike"),
    "placeholder-mooncake": (6, "versions together", "fail", "placeholder", "Python 3.10"),
    "cuda-old-driver": (6, "versions together", "fail", "driver contradicts row c12", "525.60.13"),
    "cuda-cpu-torch": (5, "torch build", "fail", "built without cuda", "CPU only"),
    "cuda-library-mismatch": (3, "driver", "unknown", "version mismatch", "install the vendor's"),
    "cuda-no-peer-memory": (11, "peer memory", "fail", "nvidia_peermem", "modprobe nvidia_peermem"),
    "cuda-no-bfloat16": (7, "cards", "fail", "architecture 75 is not served", "newer"),
    "cpu-no-torch": (5, "torch", "fail", "not installed", "pip install torch=="),
    "cpu-old-python": (1, "python", "fail", "3.9.18; 3.10 is needed", "use Python 3.11"),
    "cpu-locked-memory": (11, "locked memory", "fail", "8388608 bytes", "ulimit -l unlimited"),
}


def findings(machine, nodes=2):
    return examine(machine, chosen_stack(machine, "auto", STACKS), Purpose(nodes=nodes))


def worst_of(found):
    """The worst status said under each number and name."""
    order = ("fail", "unknown", "warn", "ok")
    worst = {}
    for one in found:
        key = (one.check, one.name)
        worst[key] = min(worst.get(key, "ok"), one.status, key=order.index)
    return worst


def record_of(name):
    return read_record(MACHINES / f"{name}.json")._record


def without(record, keys):
    return {kind: {k: v for k, v in table.items() if (kind, k) not in keys}
            for kind, table in record.items()}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_machine_holds_in_all_eleven_checks(name):
    found = findings(read_record(MACHINES / f"{name}.json"))
    bad = [one for one in found if one.status != "ok" and one.name != "workarounds"]
    assert bad == [] and {one.check for one in found} == set(range(1, 12))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_machine_gives_its_finding_and_fix(name):
    check, title, status, detail, fix = BROKEN[name]
    found = findings(read_record(MACHINES / f"{name}.json"))
    hits = [one for one in found if (one.check, one.name, one.status) == (check, title, status)]
    assert any(detail in one.detail and fix in one.fix for one in hits), found


def test_every_recorded_machine_is_tested():
    assert {path.stem for path in MACHINES.glob("*.json")} == {*HEALTHY, *BROKEN}


@pytest.mark.parametrize("stack", STACKS[:2], ids=lambda stack: stack.name)
def test_a_machine_of_which_nothing_is_known_holds_in_nothing(stack):
    found = examine(RecordedMachine({}), stack, Purpose())
    assert [one for one in found if one.status == "ok"] == []
    assert all(one.fix for one in found)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_forgetting_facts_never_makes_a_check_hold(data):
    record = record_of(data.draw(st.sampled_from(sorted(BROKEN))))
    keys = sorted((kind, key) for kind, table in record.items() for key in table)
    lost = data.draw(st.sets(st.sampled_from(keys), max_size=6))
    machine = RecordedMachine(record)
    stack = chosen_stack(machine, "auto", STACKS)
    before = worst_of(examine(machine, stack, Purpose(nodes=2)))
    forgetful = RecordedMachine(without(record, lost))
    after = worst_of(examine(forgetful, stack, Purpose(nodes=2)))
    assert [key for key, was in before.items() if was != "ok" and after.get(key) == "ok"] == []


def test_one_machine_does_without_what_only_several_need():
    machine = read_record(MACHINES / "no-peer-memory.json")
    one = next(f for f in findings(machine, nodes=1) if f.name == "peer memory")
    assert one.status == "warn" and "one machine does without" in one.detail


def test_a_record_of_a_machine_is_judged_like_the_machine(tmp_path):
    recording = RecordingMachine(read_record(MACHINES / "link-down.json"))
    first = findings(recording)
    (tmp_path / "record.json").write_text(json.dumps(recording.record))
    assert findings(read_record(tmp_path / "record.json")) == first


def test_a_file_that_is_no_record_says_so(tmp_path):
    (tmp_path / "a.json").write_text('{"filez": {}}')
    with pytest.raises(BadInput, match="unknown parts of a record: filez"):
        read_record(tmp_path / "a.json")
    with pytest.raises(BadInput, match="no record of a machine"):
        read_record(tmp_path / "absent.json")
