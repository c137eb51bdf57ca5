"""Owns the verb `probe`: what a machine has, how fast it is, and whether it is fit for a model.

Knows which parts to ask; how they find out is theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstlight.cli.options import AsJson, options_from
from firstlight.cli.outcome import show
from firstlight.errors import BadInput, EnvironmentProblem
from firstlight.settings.settings import resolve_flags, setting

if TYPE_CHECKING:
    from firstlight.accept.report import Report, Section
    from firstlight.adapt.probe.facts import Facts
    from firstlight.models.spec import ModelSpec
    from firstlight.planning.hardware import Device
    from firstlight.platforms.machine import Machine
    from firstlight.platforms.spec import DeviceSpec
    from firstlight.platforms.stack import VendorStack

_NONE = "none"


@dataclass(frozen=True, kw_only=True)
class ProbeFlags:
    """What the verb takes; lengths in tokens."""

    model: Path | None = setting(
        None, "model to judge the machine for: as for plan", optional_text=_NONE
    )
    device: str = setting("auto", "platform to look at; auto takes the cards the kernel sees")
    dtype: str = setting(
        "float32", "compute type kernels are run in", choices=("float32", "bfloat16", "float16")
    )
    context: int | None = setting(
        None, "longest sequence to hold", kind="count", minimum=1, optional_text="the model's own"
    )
    concurrency: int = setting(16, "sequences at once, each of full context", minimum=1)
    nodes: int = setting(1, "machines that will work together", minimum=1)
    folder: Path = setting(Path("."), "where weights will lie; its disk is looked at and measured")
    measure: bool = setting(False, "measure products, memory, copies, storage and collectives")
    threads: int = setting(1, "host threads while measuring", minimum=1)
    save_profile: Path | None = setting(
        None, "measure, and write the device record plan --profile reads", optional_text=_NONE
    )
    record: Path | None = setting(
        None, "write every fact read, so that others can judge this machine", optional_text=_NONE
    )
    machine: Path | None = setting(
        None, "judge a recorded machine instead of this one", optional_text=_NONE
    )


@options_from(ProbeFlags, arguments=("model",))
def probe(flags: Mapping[str, Any], as_json: AsJson = False) -> int:
    """Say whether this machine is fit, and for a model.

    Eleven checks, each ok, warn, fail or unknown with a fix; kernels run against known answers.
    """
    from firstlight.adapt.probe.ask import NAME
    from firstlight.platforms.machine import LiveMachine, RecordingMachine, read_record

    given = resolve_flags(ProbeFlags, flags)
    source = read_record(given.machine) if given.machine else LiveMachine(NAME)
    machine = RecordingMachine(source)
    report = probe_report(given, machine)
    if given.record is not None:
        _write(given.record, json.dumps(machine.record, indent=1, sort_keys=True) + "\n")
    return show(report, as_json=as_json)


def probe_report(given: ProbeFlags, machine: Machine) -> Report:
    """Looks at a machine; raises UsageError for an unknown platform."""
    from firstlight.accept import probe_report as parts
    from firstlight.accept.report import Report
    from firstlight.adapt.probe.examine import chosen_stack, examine
    from firstlight.adapt.probe.facts import Facts

    stack = _stack(given.device, chosen_stack, machine)
    facts, spec = Facts(machine, stack), _model(given)
    specs = [] if given.machine else _processors()
    kernels, kernel_data = parts.kernel_section(
        machine, stack.name, given.dtype, _used(given, machine, stack)
    )
    measured, measured_data, device = _measured(given, machine, stack)
    sections = (
        parts.device_section(specs, facts),
        parts.version_section(facts),
        *parts.check_sections(examine(machine, stack, _purpose(given, spec))),
        parts.topology_section(facts),
        kernels,
        *measured,
        *_suggestions(given, spec, facts, device),
    )
    data = {"platform": stack.name, "devices": parts.device_data(specs, facts)}
    return Report("firstlight probe", sections, data=data | kernel_data | measured_data)


def _stack(asked: str, choose: Any, machine: Machine) -> VendorStack:
    from firstlight.platforms.find import named, platforms

    known = [one.stack for one in platforms()]
    stack: VendorStack = choose(machine, named(asked).name if asked != "auto" else asked, known)
    return stack


def _processors() -> list[DeviceSpec]:
    from firstlight.platforms.find import find_platform

    return [find_platform("cpu").spec()]


def _model(given: ProbeFlags) -> ModelSpec | None:
    from firstlight.cli.plan import read_model

    return read_model(given.model) if given.model is not None else None


def _purpose(given: ProbeFlags, spec: ModelSpec | None) -> Any:
    from firstlight.adapt.probe.host_checks import Purpose
    from firstlight.planning.weights import weight_table

    needed = weight_table(spec, given.dtype).total_bytes if spec is not None else 0
    return Purpose(str(given.folder), needed, given.nodes)


def _used(given: ProbeFlags, machine: Machine, stack: VendorStack) -> Any:
    """Operations by path; None without a model, empty where torch cannot build it."""
    from firstlight.platforms.machine import FactUnknown

    if given.model is None:
        return None
    try:
        found = machine.ask(f"operations {stack.name} {given.dtype} {given.model.resolve()}")
    except FactUnknown:
        return {}
    return {path: found[path] for path in ("text", "image") if found[path]}


def _measured(
    given: ProbeFlags, machine: Machine, stack: VendorStack
) -> tuple[tuple[Section, ...], dict[str, Any], Device | None]:
    from firstlight.accept.probe_profile import profile_of, write_profile
    from firstlight.accept.probe_report import curve_section
    from firstlight.platforms.machine import FactUnknown

    if not (given.measure or given.save_profile):
        return (), {}, None
    try:
        curves = machine.ask(f"curves {stack.name} {given.threads} {given.folder}")
    except FactUnknown as unknown:
        raise EnvironmentProblem(f"nothing can be measured: {unknown}") from unknown
    device = profile_of(curves, stack.vendor)
    if given.save_profile is not None:
        try:
            write_profile(device, given.save_profile)
        except OSError as error:
            raise BadInput(f"{given.save_profile}: {error.strerror}") from error
    return (curve_section(curves),), {"curves": dict(curves)}, device


def _suggestions(
    given: ProbeFlags, spec: ModelSpec | None, facts: Facts, device: Device | None
) -> tuple[Section, ...]:
    from firstlight.accept.probe_profile import Wanted, suggestions
    from firstlight.accept.report import Section

    if spec is None:
        return ()
    count, found = _planned_device(facts, device, live=given.machine is None)
    if found is None:
        words = ("no figures of this device: run with --measure where it is",)
        return (Section("what fits", lines=words),)
    wanted = Wanted(
        context=given.context or spec.context_length,
        concurrency=given.concurrency,
        dtype=given.dtype,
    )
    title = f"what fits on {count} x {found.name}"
    return (Section(title, lines=suggestions(spec, found, count, wanted)),)


def _planned_device(facts: Facts, measured: Device | None, *, live: bool) -> tuple[int, Any]:
    """The cards as the catalogue or a measurement has them, with the memory their driver tells."""
    from msgspec.structs import replace

    from firstlight.accept.probe_profile import by_name
    from firstlight.planning.hardware import Figure
    from firstlight.planning.host_profile import measure_host
    from firstlight.platforms.machine import FactUnknown

    if not facts.stack.driver_command:
        return 1, measured or (measure_host() if live else None)
    try:
        cards = facts.cards()
    except FactUnknown:
        return 0, None
    known = measured or (by_name(cards[0].name) if cards else None)
    if known is None:
        return len(cards), None
    smallest = min(card.total_bytes for card in cards)
    return len(cards), replace(known, memory=Figure(float(smallest), "told by the driver"))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
