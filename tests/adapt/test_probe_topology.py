"""Where cards and network devices sit, and how they are joined, as text."""

import json
from pathlib import Path

from firstlight.adapt.probe.facts import Facts
from firstlight.adapt.probe.topology import draw, read_topology
from firstlight.platforms import cpu, musa
from firstlight.platforms.machine import RecordedMachine, read_record

MACHINES = Path(__file__).parents[1] / "data" / "machines"


def drawn(record, stack=musa.STACK):
    return draw(read_topology(Facts(RecordedMachine(record), stack)))


def healthy():
    return read_record(MACHINES / "healthy-s5000.json")._record


def test_cards_stand_below_their_memory_node():
    lines = drawn(healthy())
    second = lines.index("node 1: processors 64-127")
    assert [line.split()[2] for line in lines[1:5]] == ["0", "1", "2", "3"]
    assert lines[second + 1].strip().startswith("+- card 4  0000:14:00.0")


def test_a_domain_of_eight_digits_is_the_same_card():
    record = json.loads(json.dumps(healthy()))
    for card in record["answers"]["cards musa"]["cards"]:
        card["pci"] = f"0000{card['pci'].upper()}"
    assert not any("not told" in line for line in drawn(record))


def test_links_without_a_far_end_are_counted_by_card():
    record = json.loads(json.dumps(healthy()))
    for link in record["answers"]["cards musa"]["links"]:
        link["to"] = None
    assert "  card 7: up x7" in drawn(record)


def test_what_is_not_told_is_said():
    record = json.loads(json.dumps(healthy()))
    record["files"] = {k: v for k, v in record["files"].items() if "numa_node" not in k}
    assert any(line.startswith("node not told: card 0, card 1") for line in drawn(record))
    assert drawn({}) == ("node 0: processors ?",)
    assert drawn({}, cpu.STACK) == ("node 0: processors ?",)
