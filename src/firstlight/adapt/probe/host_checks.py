"""Owns the checks of what every machine needs: system, Python, room on disk and shared memory.

Knows no accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from firstlight.adapt.probe.facts import Facts
from firstlight.adapt.probe.findings import Finding, Looking
from firstlight.platforms.compatibility import known_bad, possibly_bad, unknown_facts
from firstlight.platforms.versions import PYTHON, at_least
from firstlight.units import format_bytes

# Ranks exchange tensors of a step through shared memory; less than this breaks at the first one.
SHARED_MEMORY_BYTES = 2**30
SHARED_MEMORY = "/dev/shm"
SPARE_SHARE = 0.05


@dataclass(frozen=True)
class Purpose:
    """What the machine is wanted for: `folder` will hold `needed_bytes` of weights (0: any), in a
    group of `nodes` machines.
    """

    folder: str = "."
    needed_bytes: int = 0
    nodes: int = 1


def check_system(facts: Facts, look: Looking) -> Iterator[Finding]:
    """System, processor type, C library, Python and kernel."""
    host, stack = facts.host(), facts.stack
    machine = f"{host['system']} {host['machine']}, {host['libc'] or 'no glibc'}"
    if host["system"] != "Linux" or host["machine"] not in stack.machines:
        wanted = " or ".join(stack.machines)
        yield look.fail(machine, f"use a Linux machine of type {wanted}: the stack has no other")
    elif not str(host["libc"]).startswith("glibc"):
        yield look.warn(machine, "use an image with glibc: wheels are built against it")
    else:
        yield look.ok(machine)
    yield _python(Looking(look.check, "python"), facts, str(host["python"]))
    versions, kernel = facts.versions(), Looking(look.check, "kernel")
    bad = [one for one in known_bad(facts.known, versions) if "kernel" in one.when]
    maybe = [one for one in possibly_bad(facts.known, versions) if "kernel" in one.when]
    for one in bad:
        yield kernel.fail(f"{host['kernel']}: {one.why} ({one.link})", one.fix)
    for one in maybe:
        untold = ", ".join(unknown_facts(one, versions))
        yield kernel.unknown(f"{host['kernel']} fails with some {untold} ({one.link})", one.fix)
    if not bad and not maybe:
        yield kernel.ok(f"{host['kernel']} is on no list of failures")


def _python(look: Looking, facts: Facts, found: str) -> Finding:
    pythons = facts.stack.pythons
    short = ".".join(found.split(".")[:2])
    if not at_least(found, PYTHON.minimum):
        return look.fail(f"{found}; {PYTHON.minimum} is needed", f"use Python {PYTHON.tested}")
    if pythons and short not in pythons:
        return look.fail(
            f"{found}; {facts.stack.vendor} publishes builds for Python {', '.join(pythons)} only",
            f"use Python {pythons[0]}",
        )
    if not at_least(PYTHON.tested, short):
        return look.warn(f"{found}; tested up to {PYTHON.tested}", f"use Python {PYTHON.tested}")
    return look.ok(f"{found}; tested with {PYTHON.tested}")


def check_room(facts: Facts, look: Looking, purpose: Purpose) -> Iterator[Finding]:
    """Room where the weights will lie."""
    found = facts.machine.ask(f"room {purpose.folder}")
    free, total = int(found["free"]), int(found["total"])
    detail = f"{format_bytes(free)} of {format_bytes(total)} free at {purpose.folder}"
    needed = purpose.needed_bytes
    if not found["writable"]:
        yield look.fail(
            f"{purpose.folder} cannot be written", "choose another folder with --folder"
        )
    elif needed and free < needed:
        yield look.fail(
            f"{detail}, {format_bytes(needed)} needed",
            f"free {format_bytes(needed - free)}, or name another disk with --folder",
        )
    elif free < SPARE_SHARE * total:
        yield look.fail(f"{detail}: full", "free some, or name another disk with --folder")
    else:
        yield look.ok(detail)


def check_shared_memory(facts: Facts, look: Looking) -> Iterator[Finding]:
    """The memory that processes of one machine share."""
    found = facts.machine.ask(f"room {SHARED_MEMORY}")
    fix = "start the container with --shm-size=16g (or --ipc=host)"
    if not found["exists"] or not found["writable"]:
        yield look.fail(f"no {SHARED_MEMORY} that can be written", f"{fix}, or mount tmpfs there")
    elif int(found["free"]) < SHARED_MEMORY_BYTES:
        yield look.warn(f"{format_bytes(int(found['free']))} at {SHARED_MEMORY}", fix)
    else:
        yield look.ok(f"{format_bytes(int(found['free']))} at {SHARED_MEMORY}")
