"""Owns how cards, processors and network devices hang together, as one record and drawn as text.

Knows no vendor: nodes come from sysfs, links from whatever the management library told.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from firstlight.adapt.probe.facts import Card, Facts
from firstlight.platforms.machine import FactUnknown, Machine

_NODES = "/sys/devices/system/node"
_CARDS = "/sys/bus/pci/devices"
_RDMA = "/sys/class/infiniband"
_PCI_LETTERS = len("0000:10:00.0")
_SHORT = {"up": "up", "down": "DOWN", "downgrade": "slow", "unknown": "?"}


@dataclass(frozen=True)
class Link:
    """Links between two cards, `count` of them in the same state. `target` None: not told."""

    source: int
    target: int | None
    state: str
    count: int


@dataclass(frozen=True)
class Topology:
    """Memory nodes with their processors, and which of them each card and network device is on."""

    nodes: tuple[tuple[int, str], ...]
    cards: tuple[tuple[Card, int | None], ...]
    networks: tuple[tuple[str, int | None], ...]
    links: tuple[Link, ...]
    link_name: str


def read_topology(facts: Facts) -> Topology:
    """Returns what can be told; parts that are unknown are left out."""
    machine = facts.machine
    links: Counter[tuple[int, int | None, str]] = Counter()
    cards: list[Card] = []
    if facts.stack.driver_command:
        try:
            cards = facts.cards()
            for one in facts.told_cards()["links"]:
                links[int(one["card"]), one.get("to"), str(one["state"])] += 1
        except FactUnknown:
            pass
    return Topology(
        nodes=_nodes(machine),
        cards=tuple((card, _node(machine, f"{_CARDS}/{_address(card)}")) for card in cards),
        networks=tuple(
            (name, _node(machine, f"{_RDMA}/{name}/device")) for name in _names(machine, _RDMA)
        ),
        links=tuple(Link(a, b, state, count) for (a, b, state), count in sorted(
            links.items(), key=str)),
        link_name=facts.stack.link_name,
    )  # fmt: skip


def draw(topology: Topology) -> tuple[str, ...]:
    """Draws the nodes as a tree and the links as a matrix, one line each."""
    lines = []
    for node, processors in topology.nodes or ((0, "?"),):
        lines.append(f"node {node}: processors {processors}")
        for card, place in topology.cards:
            if place == node:
                lines.append(f"  +- card {card.index}  {card.pci}  {card.name}")
        for name, place in topology.networks:
            if place == node:
                lines.append(f"  +- network {name}")
    lost = [f"card {c.index}" for c, place in topology.cards if place is None]
    lost += [name for name, place in topology.networks if place is None]
    if lost:
        lines.append(f"node not told: {', '.join(lost)}")
    return (*lines, *_matrix(topology))


def _matrix(topology: Topology) -> list[str]:
    if not topology.links:
        return []
    indices = [card.index for card, _ in topology.cards]
    lines = [f"{topology.link_name} from card to card: state and number of links"]
    told = [link for link in topology.links if link.target is not None]
    if not told:
        for index in indices:
            own = [f"{x.state} x{x.count}" for x in topology.links if x.source == index]
            lines.append(f"  card {index}: {', '.join(own) or 'none'}")
        return lines
    lines.append("  " + "".join(f"{i:>6}" for i in ("", *indices)))
    for a in indices:
        cells = [_cell(told, a, b) for b in indices]
        lines.append("  " + "".join(f"{cell:>6}" for cell in (a, *cells)))
    return lines


def _cell(links: list[Link], a: int, b: int) -> str:
    found = [link for link in links if (link.source, link.target) == (a, b)]
    return "-" if a == b else "+".join(f"{_SHORT[x.state]}{x.count}" for x in found) or "."


def _nodes(machine: Machine) -> tuple[tuple[int, str], ...]:
    numbers = [
        int(n[4:]) for n in _names(machine, _NODES) if n.startswith("node") and n[4:].isdigit()
    ]
    return tuple((n, _text(machine, f"{_NODES}/node{n}/cpulist") or "?") for n in sorted(numbers))


def _node(machine: Machine, device: str) -> int | None:
    text = _text(machine, f"{device}/numa_node")
    return max(0, int(text)) if text and text.lstrip("-").isdigit() else None


def _address(card: Card) -> str:
    """Some libraries write the domain with eight digits; sysfs has four."""
    return card.pci.lower()[-_PCI_LETTERS:]


def _names(machine: Machine, folder: str) -> tuple[str, ...]:
    try:
        return machine.names(folder) or ()
    except FactUnknown:
        return ()


def _text(machine: Machine, path: str) -> str:
    try:
        return (machine.text(path) or "").strip()
    except FactUnknown:
        return ""
