"""Owns the checks of cards and what reaches them: nodes, masks, driver, libraries, memory.

Knows no vendor but through its stack record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from firstlight.adapt.probe.facts import Card, Facts
from firstlight.adapt.probe.findings import Finding, Looking
from firstlight.platforms.machine import FactUnknown
from firstlight.units import format_bytes

# A card of which less is free is somebody else's.
FREE_SHARE = 0.9
_MASK = re.compile(r"^(\d+(,\d+)*|(GPU|MIG)-[\w-]+(,(GPU|MIG)-[\w-]+)*)?$", re.IGNORECASE)
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


def check_nodes(facts: Facts, look: Looking) -> Iterator[Finding]:
    """Device nodes and the right to open them."""
    stack = facts.stack
    if not stack.node_folder:
        yield look.ok("none needed: this platform computes on the processors")
        return
    names = facts.machine.names(stack.node_folder) or ()
    nodes = [name for name in names if re.fullmatch(rf"{stack.node_prefix}\d+", name)]
    if not nodes:
        inside = _in_container(facts)
        fix = f"start the container with the vendor's toolkit and {stack.container_variable}=all"
        where = f"{stack.node_folder}/{stack.node_prefix}*"
        loaded = f"load the kernel module {stack.kernel_module} (install the driver)"
        yield look.fail(f"no device node {where}", fix if inside else loaded)
        return
    closed = []
    for name in nodes:
        path = f"{stack.node_folder}/{name}"
        if error := facts.machine.ask(f"open {path}")["error"]:
            closed.append(f"{path}: {error}")
    if closed:
        group = f"add the user to the group {stack.node_group}, or " if stack.node_group else ""
        yield look.fail("; ".join(closed), f"{group}pass the devices into the container")
    else:
        yield look.ok(f"{len(nodes)} nodes in {stack.node_folder} can be opened")


def check_masks(facts: Facts, look: Looking, others: Sequence[str]) -> Iterator[Finding]:
    """Variables that hide cards; `others` are those of other platforms."""
    stack, machine = facts.stack, facts.machine
    if not stack.visible_variables:
        yield look.ok("no variable hides a part of this platform")
        return
    values = {name: machine.variable(name) for name in stack.visible_variables}
    for name, value in values.items():
        if value is not None and not _MASK.match(value):
            yield look.fail(f"{name}={value!r} is no list of cards", f"write {name}=0,1,2,3")
            return
        if value == "":
            yield look.fail(f"{name} is empty: it hides every card", f"unset {name}")
            return
    if stack.container_variable and _in_container(facts):
        given = machine.variable(stack.container_variable)
        if given in (None, "", "none", "void"):
            yield look.fail(
                f"{stack.container_variable} is {given!r} in this container",
                f"start it with {stack.container_variable}=all",
            )
            return
    if stack.plugin and machine.distribution("torchada") is not None:
        mask = next(iter(values.values()))
        for other in others:
            if (seen := machine.variable(other)) not in (None, mask):
                yield look.warn(
                    f"torchada is installed, and {other}={seen} differs from the mask {mask}",
                    f"unset {other}, or set both alike",
                )
                return
    shown = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
    yield look.ok(shown or "no mask is set: all cards are visible")


def _in_container(facts: Facts) -> bool:
    return any(facts.machine.text(mark) is not None for mark in _CONTAINER_MARKS)


def check_driver(facts: Facts, look: Looking) -> Iterator[Finding]:
    """The driver answers, and says who it is."""
    stack = facts.stack
    if not stack.driver_command:
        yield look.ok("none needed")
        return
    modules = facts.machine.text("/proc/modules")
    loaded = {line.split(" ", 1)[0] for line in (modules or "").splitlines()}
    if modules is not None and stack.kernel_module and stack.kernel_module not in loaded:
        yield look.fail(
            f"the kernel module {stack.kernel_module} is not loaded",
            f"install the driver on the host, or run modprobe {stack.kernel_module}",
        )
        return
    version = facts.driver()
    if version.strip().upper() in ("N/A", "", "UNKNOWN"):
        yield look.fail(
            f"the driver's version is {version!r}",
            "use a container image and toolkit that belong to the host's driver",
        )
    else:
        yield look.ok(f"{stack.vendor} driver {version}")


def check_libraries(facts: Facts, look: Looking) -> Iterator[Finding]:
    """Every library loads, in the loader's own words when one does not."""
    names = facts.stack.libraries
    if not names:
        yield look.ok("none needed beyond torch")
        return
    found = facts.machine.ask(f"libraries {','.join(names)}")
    broken = {name: found[name]["error"] for name in names if found[name]["error"]}
    for name, words in broken.items():
        yield look.fail(
            f"{name}: {words}",
            f"install {facts.stack.vendor}'s toolkit for this torch, and put its lib folder into "
            "LD_LIBRARY_PATH",
        )
    if not broken:
        yield look.ok(", ".join(str(found[name]["path"] or name) for name in names))


def check_cards(facts: Facts, look: Looking) -> Iterator[Finding]:
    """Architecture, free memory, and that all cards are equal."""
    if not facts.stack.driver_command:
        yield look.ok("the processors and their memory are the device")
        return
    cards = facts.cards()
    if not cards:
        yield look.fail(
            "the driver lists no card", "reseat the cards, and read dmesg for the driver"
        )
        return
    yield from _architectures(facts, look, cards)
    equal = Looking(look.check, "equal cards")
    kinds = {(card.name, card.total_bytes) for card in cards}
    if len(kinds) > 1:
        shown = ", ".join(sorted(f"{name} {format_bytes(total)}" for name, total in kinds))
        yield equal.fail(shown, f"hide all but one kind with {facts.stack.visible_variables[0]}")
    else:
        yield equal.ok(f"{len(cards)} x {cards[0].name}, {format_bytes(cards[0].total_bytes)}")
    free = Looking(look.check, "free memory")
    taken = [card for card in cards if card.free_bytes < FREE_SHARE * card.total_bytes]
    if taken:
        shown = ", ".join(f"card {c.index}: {format_bytes(c.free_bytes)} free" for c in taken)
        yield free.warn(shown, "end the processes that hold it, or hide these cards")
    else:
        yield free.ok(f"at least {format_bytes(min(card.free_bytes for card in cards))} on each")


def _architectures(facts: Facts, look: Looking, cards: Sequence[Card]) -> Iterator[Finding]:
    for arch in sorted({card.arch for card in cards}):
        names = ", ".join(sorted({card.name for card in cards if card.arch == arch}))
        known = facts.known.architecture(arch)
        if not arch or known is None:
            raise FactUnknown(f"{names}: architecture {arch or 'not told'} is not in the table")
        if known.serves:
            yield look.ok(f"{names}: architecture {arch}: {known.why}")
        else:
            yield look.fail(
                f"{names}: architecture {arch} is not served: {known.why} ({known.link})",
                "use cards of a newer generation; llama.cpp runs on these",
            )
