"""Owns the checks of torch, its plug-in, and of versions that must belong together.

Knows no vendor but through its stack record and the published table.
"""

from __future__ import annotations

from collections.abc import Iterator

from firstlight.adapt.probe.facts import Facts
from firstlight.adapt.probe.findings import Finding, Looking
from firstlight.platforms.compatibility import (
    Row,
    find_row,
    known_bad,
    possibly_bad,
    published_together,
    quirks_on,
    unknown_facts,
)
from firstlight.platforms.machine import FactUnknown
from firstlight.platforms.versions import TORCH, at_least, release

_PINNED = f"pip install torch=={TORCH.tested}"


def check_torch(facts: Facts, look: Looking) -> Iterator[Finding]:
    """Torch is there, is the vendor's build, and was built for these cards."""
    stack, machine = facts.stack, facts.machine
    install = (
        f"install {stack.vendor}'s torch build from its own index" if stack.plugin else _PINNED
    )
    version = machine.distribution("torch")
    if version is None:
        yield look.fail("torch is not installed", install)
        return
    if not at_least(version, TORCH.minimum):
        yield look.fail(f"torch {version} is too old, {TORCH.minimum} is needed", install)
        return
    told = facts.torch()
    if told.get("error"):
        yield look.fail(f"torch {version} does not load: {told['error']}", install)
        return
    yield look.ok(f"torch {told['version']}; tested with {TORCH.tested}")
    if stack.plugin:
        yield from _plugin(facts, Looking(look.check, stack.plugin), install)
    if stack.build_attribute:
        yield from _build(facts, Looking(look.check, "torch build"), install)


def _plugin(facts: Facts, look: Looking, install: str) -> Iterator[Finding]:
    stack, told = facts.stack, facts.torch()
    if told.get("plugin_error"):
        yield look.fail(
            f"{stack.plugin}: {told['plugin_error']}", f"{install}, with {stack.plugin}"
        )
        return
    plugin = str(told["plugin"] or "")
    if not plugin:
        raise FactUnknown(f"{stack.plugin} loads, but tells no version")
    # Its release is that of the torch it was built for, or a row says they belong together.
    torch = str(told["version"])
    same = release(plugin)[:3] == release(torch)[:3]
    if not same and not published_together(facts.known, plugin, torch):
        yield look.fail(
            f"{stack.plugin} {plugin} with torch {told['version']}",
            f"install the torch {plugin.partition('+')[0]} that belongs to it",
        )
    else:
        yield look.ok(f"{stack.plugin} {plugin}")


def _build(facts: Facts, look: Looking, install: str) -> Iterator[Finding]:
    stack, told = facts.stack, facts.torch()
    if not told.get("build"):
        detail = f"torch {told['version']} was built without {stack.name}"
        yield look.fail(detail, f"{install}; what is installed computes on the CPU only")
        return
    built = [int(arch) for arch in told.get("archs") or ()]
    archs = {card.arch for card in facts.cards()}
    if not built or 0 in archs:
        raise FactUnknown("which architectures torch was built for, or the cards', is not told")
    # A build for 80 runs on 86: within a generation newer cards run older code.
    missing = [a for a in archs if not any(b // 10 == a // 10 and b <= a for b in built)]
    if missing:
        yield look.fail(
            f"built for {', '.join(map(str, built))}, the cards are {', '.join(map(str, missing))}",
            f"{install}: wheels differ by architecture",
        )
    else:
        yield look.ok(
            f"for {stack.name} {told['build']}, architectures {', '.join(map(str, built))}"
        )


def check_combination(facts: Facts, look: Looking) -> Iterator[Finding]:
    """The versions against the published table, and the quirks that follow."""
    known, versions, arch = facts.known, facts.versions(), facts.arch()
    if not facts.stack.driver_command:
        yield look.ok("nothing but torch has to fit")
        return
    for bad in known_bad(known, versions):
        yield look.fail(f"{bad.name}: {bad.why} ({bad.link})", bad.fix)
    if suspected := possibly_bad(known, versions):
        untold = dict.fromkeys(name for bad in suspected for name in unknown_facts(bad, versions))
        yield look.unknown(
            f"{', '.join(untold)} not known, so not ruled out: "
            + ", ".join(bad.name for bad in suspected),
            "run the probe where these versions can be read",
        )
    match = find_row(known, versions, arch)
    shown = ", ".join(
        f"{name} {versions.get(name) or '?'}" for name in ("sdk", "torch", "plugin", "driver")
    )
    if match.row is None:
        yield look.unknown(
            f"{shown}: no published row fits, so nothing of it is verified",
            "compare with the vendor's release notes; all workarounds are on",
        )
    elif match.wrong:
        yield look.fail(
            f"{shown}: {', '.join(match.wrong)} contradicts row {match.row.id} ({match.row.link})",
            _wanted(match.row, match.wrong),
        )
    elif match.unknown:
        yield look.unknown(
            f"{shown}: row {match.row.id} fits, {', '.join(match.unknown)} not verified: nothing "
            f"published says it ({match.row.link})",
            "run the known answers below before trusting it, and tell us what you find",
        )
    else:
        yield look.ok(f"{shown}: row {match.row.id} ({match.row.link})")
    yield from _quirks(facts, versions, arch)


def _wanted(row: Row, wrong: tuple[str, ...]) -> str:
    listed = {
        "sdk": f"{row.sdk_min} to {row.sdk_max}",
        "torch": ", ".join(row.torch),
        "plugin": ", ".join(row.plugin),
        "driver": f"{row.driver_min} or newer" if row.driver_min else ", ".join(row.driver),
        "arch": ", ".join(map(str, row.archs)),
    }
    return "install " + "; ".join(f"{name} {listed[name]}" for name in wrong)


def _quirks(facts: Facts, versions: dict[str, str | None], arch: int) -> Iterator[Finding]:
    look = Looking(6, "workarounds")
    on = quirks_on(facts.known, versions, arch)
    if on:
        names = ", ".join(quirk.name for quirk in on)
        yield look.warn(f"{len(on)} on: {names}", "none needed: they are applied by themselves")
    elif facts.known.quirks:
        yield look.ok("none of the known ones is needed")
