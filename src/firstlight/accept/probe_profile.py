"""Owns how measured speeds become the device record plans are made with, and what plans then say.

Measures nothing; a figure that was not measured comes from the catalogue, or is a range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from firstlight.models.spec import ModelSpec
from firstlight.planning.explain import verdict
from firstlight.planning.hardware import HOST_VENDOR, Device, Figure, Fleet, catalogue
from firstlight.planning.search import Question, evaluate
from firstlight.planning.workload import PlanRules, Workload
from firstlight.sharding.layout import Layout
from firstlight.sharding.slices import legal_degrees

_SOURCE = "measured on this machine"
# Nothing was measured: from one network card of 10 Gb/s to eight links of 400.
_UNMEASURED = Figure(None, "not measured", low=1.25e9, high=4e11)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a model is to hold: sequences at once, each of `context` tokens; compute type."""

    context: int
    concurrency: int
    dtype: str


def profile_of(curves: Mapping[str, Any], vendor: str) -> Device:
    """Returns the record of the measured device; the largest size of each curve counts.

    One link's rate is that at which two ranks sum: bytes of a message over its time.
    """
    is_host = vendor == HOST_VENDOR
    known = by_name(str(curves["device"]))
    memory = Figure(_last(curves["memory"]), f"{_SOURCE}, copies read and written")
    products = curves["products"]
    dtype = "float32" if is_host or "bfloat16" not in products else "bfloat16"
    size, seconds = list(curves["collective_seconds"].items())[-1]
    ranks = int(curves["cores"]) if is_host else int(curves["count"])
    shared_link = Figure(int(size) / float(seconds), f"{_SOURCE}, a sum of 2 ranks, {size} bytes")
    one_device = known.link_bandwidth if known else _UNMEASURED
    return Device(
        name="cpu" if is_host else str(curves["device"]),
        vendor=vendor,
        island=max(1, ranks),
        machine=max(1, ranks),
        memory=Figure(float(curves["memory_bytes"]), f"{_SOURCE}, free"),
        memory_bandwidth=memory,
        bf16_rate=Figure(_last(products[dtype]), f"{_SOURCE}, {dtype} products"),
        fp8_rate=known.fp8_rate if known else None,
        low_bit_rate=known.low_bit_rate if known else None,
        link_bandwidth=shared_link if is_host or ranks > 1 else one_device,
        network_bandwidth=known.network_bandwidth if known else _UNMEASURED,
        host_bandwidth=Figure(_last(curves["host"]), _SOURCE) if curves["host"] else memory,
        notes=f"{curves['device']}, {curves['cores']} cores",
    )


def by_name(name: str) -> Device | None:
    """Returns the device of the catalogue whose name is a word of a card's name."""
    words = name.lower().replace("-", " ").split()
    return next((device for device in catalogue() if device.name.lower() in words), None)


def write_profile(device: Device, path: Path) -> None:
    """Writes the record that `firstlight plan --profile` reads."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(device), indent=1) + b"\n")


def suggestions(spec: ModelSpec, device: Device, count: int, wanted: Wanted) -> tuple[str, ...]:
    """Says for each tensor parallel degree that uses all devices alike whether it fits, with what
    is left or short, and for the widest that does not what would help.
    """
    workload = Workload(
        context=wanted.context,
        concurrency=wanted.concurrency,
        input_tokens=max(1, wanted.context // 2),
        output_tokens=max(1, wanted.context // 4),
    )
    question = Question(
        spec,
        Fleet(count, device, min(device.island, count)),
        workload,
        PlanRules(dtype=wanted.dtype),
    )
    lines: list[str] = []
    degrees = [tp for tp in legal_degrees(spec.facts.axes, count) if count % tp == 0]
    for tp in degrees:
        answer = evaluate(question, Layout(tp=tp))
        memory = answer.memory or answer.lost[0].memory
        lines.append(verdict(memory, workload))
    # The ways out of the last: the widest cut is the one nearest to fitting.
    return (*lines, *answer.ways_out) if lines else ("the model cannot be cut for this machine",)


def _last(curve: Mapping[str, float]) -> float:
    values: Sequence[float] = list(curve.values())
    return float(values[-1])
