"""Owns the checks of what joins cards and machines: links, collectives, network.

Knows no vendor but through its stack record.
"""

from __future__ import annotations

from collections.abc import Iterator

from firstlight.adapt.probe.facts import Facts
from firstlight.adapt.probe.findings import Finding, Looking
from firstlight.platforms.machine import FactUnknown

_RDMA = "/sys/class/infiniband"


def check_links(facts: Facts, look: Looking) -> Iterator[Finding]:
    """Every link of every card is up."""
    stack = facts.stack
    if not stack.link_name:
        yield look.ok("ranks meet in the host's memory")
        return
    if len(facts.cards()) < 2:
        yield look.ok("one card: nothing to join")
        return
    links = list(facts.told_cards()["links"])
    states = {(int(one["card"]), int(one["link"])): str(one["state"]) for one in links}
    told = {card for card, _ in states}
    silent = [card.index for card in facts.cards() if card.index not in told]
    if not states:
        yield look.warn(
            f"no {stack.link_name} is told of: cards meet over PCIe",
            "keep tensor parallel groups small; see the topology",
        )
        return
    if silent or "unknown" in states.values():
        raise FactUnknown(f"the state of {stack.link_name} of cards {silent or 'some'} is not told")
    down = [f"card {c} link {k}" for (c, k), state in states.items() if state == "down"]
    slow = [f"card {c} link {k}" for (c, k), state in states.items() if state == "downgrade"]
    if down:
        yield look.fail(
            f"{stack.link_name} down: {', '.join(down)}",
            "reseat the bridge or the card and reboot; until then hide these cards with "
            f"{stack.visible_variables[0]}",
        )
    if slow:
        yield look.warn(
            f"{stack.link_name} slower than built for: {', '.join(slow)}",
            "reseat the card; expect slower collectives until then",
        )
    if not down and not slow:
        yield look.ok(f"{len(states)} {stack.link_name} up on {len(told)} cards")


def check_collectives(facts: Facts, look: Looking) -> Iterator[Finding]:
    """The backend is the vendor's, no package takes its name, and two ranks add up right."""
    stack, machine = facts.stack, facts.machine
    for name, why in stack.foreign.items():
        if (version := machine.distribution(name)) is not None:
            yield look.fail(
                f"package {name} {version} is installed: {why}", f"pip uninstall {name}"
            )
            return
    told = facts.torch()
    origin = str(told.get("backend_origin") or "")
    if told.get("error") or told.get("plugin_error"):
        raise FactUnknown("torch does not load, so its collectives cannot be asked")
    if not origin:
        yield look.fail(
            f"torch knows no backend {stack.collective_backend}",
            "install the torch build that brings it",
        )
        return
    if origin.split(".")[0] not in stack.backend_modules:
        yield look.fail(
            f"{stack.collective_backend} comes from {origin}, not from {stack.backend_modules[0]}",
            f"uninstall the package that has {origin}",
        )
        return
    answer = machine.ask(f"collective {stack.name}")
    if not answer["right"]:
        yield look.fail(
            f"a sum over two ranks by {stack.collective_backend} is wrong: {answer['detail']}",
            "do not use more than one card; prove links and driver first",
        )
    else:
        yield look.ok(f"{stack.collective_backend} from {origin}; {answer['detail']}")


def check_network(facts: Facts, look: Looking, nodes: int) -> Iterator[Finding]:
    """What several machines need: peer memory, locked memory, RDMA devices."""
    stack, machine = facts.stack, facts.machine

    def lacking(part: str, detail: str, fix: str) -> Finding:
        one = Looking(look.check, part)
        return (
            one.fail(detail, fix)
            if nodes > 1
            else one.warn(f"{detail}; one machine does without", fix)
        )

    limit = facts.host()["memlock"]
    if limit is None:
        yield Looking(look.check, "locked memory").ok("unlimited")
    else:
        yield lacking("locked memory", f"limited to {limit} bytes", "set ulimit -l unlimited")
    devices = machine.names(_RDMA)
    if devices:
        yield Looking(look.check, "RDMA devices").ok(", ".join(devices))
    else:
        yield lacking(
            "RDMA devices",
            "none are seen",
            "install the network's driver, and pass /dev/infiniband in",
        )
    if stack.peer_module:
        modules = {
            line.split(" ", 1)[0] for line in (machine.text("/proc/modules") or "").splitlines()
        }
        if not modules:
            raise FactUnknown("/proc/modules does not tell which kernel modules are loaded")
        if stack.peer_module in modules:
            yield Looking(look.check, "peer memory").ok(f"{stack.peer_module} is loaded")
        else:
            yield lacking(
                "peer memory",
                f"the kernel module {stack.peer_module} is not loaded",
                f"run modprobe {stack.peer_module} on the host",
            )
