"""Owns what a store made from a checkpoint consists of, and its manifest; reads headers only."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from firstlight import __version__
from firstlight.adapt.shard_files import find_licence
from firstlight.checkpoint.names import Match, NameReport, require_match
from firstlight.checkpoint.reader import count_values
from firstlight.checkpoint.store import (
    FORMAT_NAME,
    FORMAT_VERSION,
    CoverageRecord,
    Manifest,
    PrecisionRecord,
    SourceRecord,
    TiedRecord,
)
from firstlight.checkpoint.store_layout import (
    BlockRecord,
    PartRecord,
    UnitRecord,
    payload_bytes,
    plan_units,
    uncovered_parts,
    unit_record,
)
from firstlight.checkpoint.tensor_info import Checkpoint, TensorInfo
from firstlight.models.spec import ModelSpec, read_model_spec
from firstlight.sharding.codecs import KEEP, Codec, find_codec
from firstlight.sharding.rules import REPLICATED, Facts, TensorRule
from firstlight.sharding.slices import granule_count

UNUSED_UNIT = "unused"


@dataclass(frozen=True)
class ShardPlan:
    """What a conversion will write, known from headers alone."""

    spec: ModelSpec
    report: NameReport
    units: tuple[UnitRecord, ...]
    request: Mapping[str, str]
    precision: PrecisionRecord | None = None

    @property
    def store_bytes(self) -> int:
        """Bytes of all unit files."""
        return sum(unit.size for unit in self.units)


def plan_shard(
    checkpoint: Checkpoint, *, dtype: str = "keep", precision: PrecisionRecord | None = None
) -> ShardPlan:
    """Returns what a conversion will write; reads headers only. `precision` names layers that a
    quantising codec leaves as they are.

    Raises ConfigError or TensorError, everything that does not fit listed.
    """
    spec = read_model_spec(checkpoint.config())
    report = require_match(checkpoint, spec)
    codec = find_codec(dtype)
    kept = precision.kept if precision is not None else frozenset()
    parts = [
        (match.rule, _part(match, KEEP if match.rule.layer in kept else codec, spec.facts))
        for match in report.matched
    ]
    units = [*plan_units(parts, spec.facts), *_unused_unit(report)]
    uncovered = [name for unit in units for name in uncovered_parts(unit)]
    assert not uncovered, f"granules do not cover {uncovered}"
    request = {
        "source": checkpoint.source_digest(),
        "codec": codec.name,
        "family": spec.family.table.family,
        "rules": str(spec.family.table.version),
        "format": str(FORMAT_VERSION),
    }
    if kept:
        request["kept layers"] = ",".join(map(str, sorted(kept)))
    return ShardPlan(spec, report, tuple(units), request, precision)


def _part(match: Match, codec: Codec, facts: Facts) -> PartRecord:
    """Returns the record of one tensor; the codec leaves alone what the rule keeps as it is."""
    rule, stored = match.rule, match.info.dtype
    if rule.dtype or (codec.quantised and not quantises(codec, rule, facts)):
        codec = KEEP
    return PartRecord(
        name=rule.name,
        sources=(rule.source,),
        source_dtype=stored,
        dtype=codec.dtype or stored,
        shape=rule.shape,
        dim=rule.dim,
        codec=codec.name,
        source_rows=rule.source_rows,
        unused=rule.unused,
    )


def quantises(codec: Codec, rule: TensorRule, facts: Facts) -> bool:
    """Says whether a codec takes a tensor: a matrix of a layer that ranks cut, whose groups are
    full and can be cut at least two ways between them."""
    axis = facts.axes.get(rule.axis)
    if rule.layer is None or rule.dtype or axis is None or not codec.takes(rule.shape):
        return False
    cut = granule_count(axis, rule.shape[rule.dim], codec.group(rule.dim))
    return cut > 1 or axis.pieces == 1


def _unused_unit(report: NameReport) -> list[UnitRecord]:
    """Keeps tensors no model reads, so that the round trip is exact; tied twins are not kept."""
    tied = {extra.name for extra, _ in report.tied}
    parts = tuple(
        PartRecord(i.name, (i.name,), i.dtype, i.dtype, i.shape, unused=True)
        for i, _ in report.ignored
        if i.name not in tied
    )
    return [unit_record(UNUSED_UNIT, [BlockRecord(REPLICATED, 1, parts)])] if parts else []


def make_manifest(
    checkpoint: Checkpoint,
    plan: ShardPlan,
    *,
    units: Sequence[UnitRecord],
    files: dict[str, str],
    answers: dict[str, str],
) -> Manifest:
    """Returns the manifest of a finished store; `units` are the records with their digests."""
    content = blake3()
    for unit in units:
        content.update(unit.source_digest.encode())
    payload = sum(payload_bytes(unit) for unit in units)
    infos = [checkpoint.tensors[name] for name in _stored_sources(units)]
    return Manifest(
        format=FORMAT_NAME,
        version=FORMAT_VERSION,
        creator=f"firstlight {__version__}",
        family=plan.request["family"],
        rule_version=int(plan.request["rules"]),
        codec=plan.request["codec"],
        source=SourceRecord(
            name=checkpoint.path.name,
            format=checkpoint.format,
            headers_digest=plan.request["source"],
            content_digest=content.hexdigest(),
            stored=_stored_forms(checkpoint.tensors.values()),
        ),
        licence=find_licence(checkpoint),
        units=tuple(units),
        coverage=CoverageRecord(
            tensors=len(infos),
            values=count_values(infos),
            payload_bytes=payload,
            padding_bytes=sum(unit.size for unit in units) - payload,
        ),
        tied=tuple(TiedRecord(extra.name, twin.name) for extra, twin in plan.report.tied),
        files=files,
        answers=answers,
        precision=plan.precision,
    )


def _stored_sources(units: Iterable[UnitRecord]) -> dict[str, None]:
    """Every source tensor of the store, once."""
    return {
        name: None
        for unit in units
        for block in unit.blocks
        for part in block.parts
        for name in part.sources
    }


def _stored_forms(infos: Iterable[TensorInfo]) -> dict[str, int]:
    return dict(sorted(Counter(info.stored for info in infos).items()))
