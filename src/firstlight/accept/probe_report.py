"""Owns how what was found out about a machine becomes the report people read.

Finds nothing out itself but by asking the machine; judges no fact that a check has judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from firstlight.accept.report import Cell, Check, Section, Status
from firstlight.adapt.probe.facts import Facts
from firstlight.adapt.probe.findings import Finding
from firstlight.adapt.probe.topology import draw, read_topology
from firstlight.platforms.machine import FactUnknown, Machine
from firstlight.platforms.spec import DeviceSpec
from firstlight.units import format_bytes, format_seconds

_STATUS: dict[str, Status] = {"ok": "ok", "warn": "warn", "fail": "fail", "unknown": "unknown"}
_TITLES = {
    1: "host", 2: "nodes and masks", 3: "driver", 4: "libraries", 5: "torch",
    6: "versions together", 7: "cards", 8: "links", 9: "collectives", 10: "known answers",
    11: "several machines",
}  # fmt: skip
_BUILD = "python -m firstlight.kernels.build"
QUIET_SPREAD = 0.1
_UNTOLD = "run `firstlight probe MODEL` on the machine itself, with torch and the model's config"
_NO_FAST = "none needed: references run here; nobody has written faster kernels for this device"
_ORDER = ("wrong", "missing", "unknown", "reference", "fast")


def device_section(specs: Sequence[DeviceSpec], facts: Facts) -> Section:
    """The processors, then every device torch or the driver tells of."""
    rows: list[tuple[Cell, ...]] = [
        (
            f"{spec.kind}:{spec.index}",
            spec.name,
            spec.cores,
            format_bytes(spec.memory.total_bytes),
            format_bytes(spec.memory.available_bytes),
        )
        for spec in specs
    ]
    for card in _cards(facts):
        total, free = format_bytes(card["total"]), format_bytes(card["free"])
        rows.append((f"{facts.stack.name}:{card['index']}", card["name"], None, total, free))
    notes = tuple(f"{spec.kind}:{spec.index}: {note}" for spec in specs for note in spec.notes)
    columns = ("device", "name", "cores", "memory", "available")
    return Section("devices", lines=(*notes, *_specs(facts)), columns=columns, rows=tuple(rows))


def device_data(specs: Sequence[DeviceSpec], facts: Facts) -> list[dict[str, Any]]:
    """The same for programs; sizes in bytes."""
    own = [
        {
            "kind": spec.kind,
            "index": spec.index,
            "name": spec.name,
            "cores": spec.cores,
            "total_bytes": spec.memory.total_bytes,
            "available_bytes": spec.memory.available_bytes,
            "capabilities": sorted(spec.capabilities),
            "cpu_features": sorted(spec.cpu_features),
            "notes": list(spec.notes),
        }
        for spec in specs
    ]
    return own + [
        {
            "kind": facts.stack.name,
            "index": card["index"],
            "name": card["name"],
            "arch": card["arch"],
            "total_bytes": card["total"],
            "available_bytes": card["free"],
        }
        for card in _cards(facts)
    ]


def _cards(facts: Facts) -> list[dict[str, Any]]:
    if not facts.stack.driver_command:
        return []
    try:
        found = facts.cards()
    except FactUnknown:
        return []
    return [
        {"index": c.index, "name": c.name, "arch": c.arch or None, "total": c.total_bytes,
         "free": c.free_bytes}
        for c in found
    ]  # fmt: skip


def _specs(facts: Facts) -> tuple[str, ...]:
    """The frozen specs as an engine would log them."""
    if not facts.stack.driver_command:
        return ()
    try:
        return tuple(str(one["text"]) for one in facts.torch().get("devices", ()))
    except FactUnknown:
        return ()


def check_sections(findings: Iterable[Finding]) -> tuple[Section, ...]:
    """One section for each of the eleven checks, in order."""
    by_number: dict[int, list[Check]] = {}
    for one in findings:
        check = Check(one.name, _STATUS[one.status], one.detail, one.fix)
        by_number.setdefault(one.check, []).append(check)
    return tuple(
        Section(f"{number}. {_TITLES[number]}", checks=tuple(checks))
        for number, checks in sorted(by_number.items())
    )


def version_section(facts: Facts) -> Section:
    """Every component's version, `-` where nothing tells it."""
    rows = tuple((name, version) for name, version in facts.versions().items())
    return Section("versions", columns=("component", "version"), rows=rows)


def topology_section(facts: Facts) -> Section:
    """Nodes, cards, network devices and links, drawn."""
    return Section("topology", lines=draw(read_topology(facts)))


def kernel_section(
    machine: Machine, stack: str, dtype: str, used: Mapping[str, Sequence[str]] | None
) -> tuple[Section, dict[str, Any]]:
    """Each operation with the kernel that would be used and what it is, and every verdict as data.

    `used` are the operations of a model by path; None: no model was named; empty: nothing tells.
    """
    title = f"kernels for {dtype}"
    try:
        verdicts = machine.ask(f"kernels {stack} {dtype}")["verdicts"]
    except FactUnknown as unknown:
        fix = "install a torch that works with this machine, then probe again"
        check = Check("kernels", "unknown", str(unknown), fix)
        return Section(title, checks=(check,)), {}
    chosen = _chosen(verdicts)
    untold = Check("operations of the model", "unknown", "not told", _UNTOLD)
    paths = {op: _paths(op, used) for op in chosen}
    shown = {op: row for op, row in chosen.items() if not used or paths[op]}
    rows = tuple((op, *row, paths[op] or None) for op, row in shown.items())
    section = Section(
        title,
        columns=("operation", "kernel", "state", "detail", "path"),
        rows=rows,
        checks=(
            _wrong_check(verdicts),
            *((untold,) if used == {} else ()),
            *(
                _coverage(path, ops, chosen, fix=_BUILD if stack == "cpu" else _NO_FAST)
                for path, ops in (used or {"all": list(chosen)}).items()
            ),
        ),
    )
    data = {
        op: {"kernel": row[0], "state": row[1], "path": paths[op]} for op, row in chosen.items()
    }
    return section, {"kernels": data, "verdicts": [list(row) for row in verdicts]}


def _chosen(verdicts: Iterable[Sequence[str]]) -> dict[str, tuple[str, str, str]]:
    """The first kernel of each operation that runs; the last one when none does."""
    found: dict[str, tuple[str, str, str]] = {}
    for operation, kernel, state, detail in verdicts:
        if operation not in found or found[operation][1] == "missing":
            found[operation] = (kernel, state, detail)
    return found


def _paths(operation: str, used: Mapping[str, Sequence[str]] | None) -> str:
    return "+".join(path for path, operations in (used or {}).items() if operation in operations)


def _wrong_check(verdicts: Iterable[Sequence[str]]) -> Check:
    wrong = [
        f"{op}/{kernel} {detail}" for op, kernel, state, detail in verdicts if state == "wrong"
    ]
    if wrong:
        fix = "do not serve with these; rebuild the kernels, or report it with `--record`"
        return Check("kernels agree with their references", "fail", "; ".join(wrong), fix)
    return Check("kernels agree with their references", "ok", "every one that runs here")


def _coverage(
    path: str,
    operations: Sequence[str],
    chosen: Mapping[str, tuple[str, str, str]],
    *,
    fix: str,
) -> Check:
    name = f"{path} path" if path != "all" else "fast kernels"
    by_state: dict[str, list[str]] = {state: [] for state in _ORDER}
    for operation in operations:
        by_state[chosen.get(operation, ("", "missing", ""))[1]].append(operation)
    counts = ", ".join(f"{len(ops)} {state}" for state, ops in by_state.items() if ops)
    detail = f"{counts or 'no operation'} of {len(operations)}"
    if by_state["wrong"] or (by_state["missing"] and path != "all"):
        bad = [*by_state["wrong"], *by_state["missing"]]
        return Check(name, "fail", f"{detail}: {', '.join(bad)}", "use another --dtype or device")
    if by_state["unknown"]:
        untold = f"{detail}: {', '.join(by_state['unknown'])} cannot be judged"
        return Check(name, "unknown", untold, "report it: the probe lacks inputs for them")
    slow = [*by_state["missing"], *by_state["reference"]]
    if slow:
        return Check(name, "warn", f"{detail}: {', '.join(slow)} not fast", fix)
    return Check(name, "ok", detail)


def curve_section(curves: Mapping[str, Any]) -> Section:
    """Measured speeds, one row a point."""
    rows: list[tuple[Cell, ...]] = []
    for dtype, points in curves["products"].items():
        rows += [
            (f"{dtype} product", f"{n} x {n}", f"{v / 1e9:,.1f} GFLOP/s") for n, v in points.items()
        ]
    for word, key in (("copy on the device", "memory"), ("copy from the host", "host")):
        rows += [
            (word, format_bytes(int(n)), f"{format_bytes(v)}/s") for n, v in curves[key].items()
        ]
    rows += [(f"storage {n}", None, f"{format_bytes(v)}/s") for n, v in curves["storage"].items()]
    rows += [
        ("sum of 2 ranks", format_bytes(int(n)), format_seconds(v))
        for n, v in curves["collective_seconds"].items()
    ]
    took = f"medians; measured in {curves['took_seconds']:.0f} s"
    columns = ("what", "size", "rate")
    checks = (_quiet(float(curves["spread"])),)
    return Section("measured", lines=(took,), columns=columns, rows=tuple(rows), checks=checks)


def _quiet(spread: float) -> Check:
    """A profile made beside other work says what was left over, not what the machine can do."""
    detail = f"the middle half of a point's runs lies within {spread:.0%}"
    if spread <= QUIET_SPREAD:
        return Check("quiet machine", "ok", detail)
    return Check("quiet machine", "warn", detail, "end other work and measure again")
