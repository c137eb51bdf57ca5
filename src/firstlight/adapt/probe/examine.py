"""Owns the order of the checks and which stack a machine is held to.

Knows neither how facts are found nor how findings are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from firstlight.adapt.probe import device_checks, host_checks, link_checks, stack_checks
from firstlight.adapt.probe.facts import Facts, vendors_present
from firstlight.adapt.probe.findings import Finding, Looking, judged
from firstlight.adapt.probe.host_checks import Purpose
from firstlight.platforms.find import platforms
from firstlight.platforms.machine import FactUnknown, Machine
from firstlight.platforms.stack import VendorStack

Judge = Callable[[Looking], Iterator[Finding]]
_DRIVER_FIX = "install the vendor's driver and management library where this runs"
_TORCH_FIX = "run `firstlight probe` in the environment that will serve"
_RECORD_FIX = "run `firstlight probe` on the machine itself"


def chosen_stack(machine: Machine, asked: str, known: Sequence[VendorStack]) -> VendorStack:
    """Returns the stack asked for; for `auto` that of the accelerators the kernel sees, of which
    the first known counts, else the last one (the processors).
    """
    for stack in known:
        if stack.name == asked:
            return stack
    try:
        present = vendors_present(machine)
    except FactUnknown:
        present = set()
    return next((s for s in known if s.pci_vendor and s.pci_vendor in present), known[-1])


def examine(machine: Machine, stack: VendorStack, purpose: Purpose) -> list[Finding]:
    """Runs every check and returns what they found, in order; none stops another."""
    facts = Facts(machine, stack)
    found: list[Finding] = []
    for number, name, fix, judge in _checks(facts, purpose):
        found += judged(Looking(number, name), fix, judge)
    return found


def _checks(facts: Facts, purpose: Purpose) -> list[tuple[int, str, str, Judge]]:
    others = [
        variable
        for one in platforms()
        if one.name != facts.stack.name
        for variable in one.stack.visible_variables
    ]
    masks = partial(device_checks.check_masks, facts, others=others)
    room = partial(host_checks.check_room, facts, purpose=purpose)
    network = partial(link_checks.check_network, facts, nodes=purpose.nodes)
    return [
        (1, "system", _RECORD_FIX, partial(host_checks.check_system, facts)),
        (1, "disk", "name a folder that can be read with --folder", room),
        (1, "shared memory", _RECORD_FIX, partial(host_checks.check_shared_memory, facts)),
        (2, "device nodes", _RECORD_FIX, partial(device_checks.check_nodes, facts)),
        (2, "masks", _RECORD_FIX, masks),
        (3, "driver", _DRIVER_FIX, partial(device_checks.check_driver, facts)),
        (4, "libraries", _TORCH_FIX, partial(device_checks.check_libraries, facts)),
        (5, "torch", _TORCH_FIX, partial(stack_checks.check_torch, facts)),
        (6, "versions together", _TORCH_FIX, partial(stack_checks.check_combination, facts)),
        (7, "cards", _DRIVER_FIX, partial(device_checks.check_cards, facts)),
        (8, "links", _DRIVER_FIX, partial(link_checks.check_links, facts)),
        (9, "collectives", _TORCH_FIX, partial(link_checks.check_collectives, facts)),
        (10, "known answers", _TORCH_FIX, partial(_known_answers, facts)),
        (11, "network", _RECORD_FIX, network),
    ]


def _known_answers(facts: Facts, look: Looking) -> Iterator[Finding]:
    """Operations whose results are known: silent garbage shows here and nowhere else."""
    answers = facts.machine.ask(f"answers {facts.stack.name}")["answers"]
    if not answers:
        raise FactUnknown("no operation was run")
    for one in answers:
        yield _answer(Looking(look.check, str(one["name"])), str(one["state"]), str(one["detail"]))


def _answer(look: Looking, state: str, detail: str) -> Finding:
    if state == "right":
        return look.ok(detail)
    if state == "lacking":
        return look.warn(detail, "none needed: the engine takes another way where it lacks this")
    if state == "avoided":
        return look.warn(detail, "none needed: the engine does not use it on this version")
    if state == "wrong":
        return look.fail(detail, "do not serve on this machine; update driver and torch together")
    return look.unknown(detail, "report it: the operation ended in a way nobody foresaw")
