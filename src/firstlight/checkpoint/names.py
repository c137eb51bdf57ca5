"""Owns the comparison of a checkpoint's tensors with a rule table; knows no file format or layout.

Every tensor of the checkpoint ends in exactly one list: matched, unexpected, ignored.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Protocol

import msgspec
import numpy as np

from firstlight.checkpoint.findings import ERROR, NOTE, Finding, refuse_errors
from firstlight.checkpoint.tensor_info import FLOAT_TYPES, Checkpoint, TensorInfo
from firstlight.sharding.rules import Facts, RuleTable, TensorRule, applies

_TILE_BYTES = 64 * 2**20


class TableOwner(Protocol):
    """A model family as far as names go."""

    @property
    def table(self) -> RuleTable:
        """The rule table."""
        ...


class WeightSpec(Protocol):
    """A model as far as its weights go; `models.spec.ModelSpec` is one."""

    @property
    def family(self) -> TableOwner:
        """The family, for its table."""
        ...

    @property
    def facts(self) -> Facts:
        """Dims, axes and flags of the config."""
        ...

    @property
    def tensors(self) -> tuple[TensorRule, ...]:
        """Every tensor of the model, units in load order."""
        ...


class Match(msgspec.Struct, frozen=True, gc=False):
    """One tensor of the model and where its values come from."""

    rule: TensorRule
    info: TensorInfo


@dataclass(frozen=True)
class NameReport:
    """How a checkpoint's names compare with the model's. `tied` lists (extra name, its twin): their
    equality is stated by the config and still to be proven by `prove_tied`."""

    matched: tuple[Match, ...]
    missing: tuple[TensorRule, ...]
    unexpected: tuple[TensorInfo, ...]
    ignored: tuple[tuple[TensorInfo, str], ...]
    tied: tuple[tuple[TensorInfo, TensorInfo], ...]
    wrong_shape: tuple[Finding, ...]
    wrong_dtype: tuple[Finding, ...]

    def findings(self) -> tuple[Finding, ...]:
        """Returns every difference as a finding, names in full."""
        missing = tuple(
            Finding(ERROR, rule.source, f"missing: the model needs it for {rule.name}")
            for rule in self.missing
        )
        unexpected = tuple(
            Finding(ERROR, f"{info.file}, {info.name}", "unexpected: no rule of the family uses it")
            for info in self.unexpected
        )
        ignored = tuple(
            Finding(NOTE, f"{info.file}, {info.name}", f"not used: {reason}")
            for info, reason in self.ignored
        )
        return missing + unexpected + self.wrong_shape + self.wrong_dtype + ignored


def match_names(tensors: Mapping[str, TensorInfo], spec: WeightSpec) -> NameReport:
    """Returns how the tensors of a checkpoint compare with those a model has; reads no values."""
    matched: list[Match] = []
    missing: list[TensorRule] = []
    shapes: list[Finding] = []
    dtypes: list[Finding] = []
    used: set[str] = set()
    rows = source_rows(spec)
    find = tensors.get
    for rule in spec.tensors:
        info = find(rule.source)
        if info is None:
            if not rule.optional:
                missing.append(rule)
            continue
        used.add(rule.source)
        matched.append(Match(rule, info))
        if info.shape != rule.shape or rule.source_rows is not None:
            shapes.extend(_shape_defects(rule, info, rows))
        wanted = "" if rule.dtype in FLOAT_TYPES else rule.dtype
        if info.dtype != wanted and (wanted or info.dtype not in FLOAT_TYPES):
            what = f"{info.dtype} values where {wanted or 'floating point'} ones are expected"
            dtypes.append(Finding(ERROR, f"{info.file}, {info.name}", what))
    rest = [] if len(used) == len(tensors) else [i for n, i in tensors.items() if n not in used]
    unexpected, ignored = _sort_rest(rest, spec)
    return NameReport(
        matched=tuple(matched),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        ignored=tuple(ignored),
        tied=tuple(_tied_pairs(tensors, ignored, spec)),
        wrong_shape=tuple(shapes),
        wrong_dtype=tuple(dtypes),
    )


def source_rows(spec: WeightSpec) -> dict[str, int]:
    """Returns the full length of every fused source tensor: where its last piece ends."""
    rows: dict[str, int] = {}
    for rule in spec.tensors:
        if rule.source_rows is not None:
            rows[rule.source] = max(rows.get(rule.source, 0), rule.source_rows[1])
    return rows


def _shape_defects(rule: TensorRule, info: TensorInfo, rows: Mapping[str, int]) -> list[Finding]:
    wanted = rule.shape
    if rule.source in rows:
        if rule.source_rows is None or rule.source_rows[1] != rows[rule.source]:
            return []  # said once, by the last piece
        wanted = (rows[rule.source], *wanted[1:])
    if info.shape == wanted:
        return []
    what = f"shape {list(info.shape)} in the file, {list(wanted)} by the config"
    return [Finding(ERROR, f"{info.file}, {info.name}", what, "config and weights do not belong")]


def _sort_rest(
    rest: list[TensorInfo], spec: WeightSpec
) -> tuple[list[TensorInfo], list[tuple[TensorInfo, str]]]:
    patterns = [
        (re.compile(translate(line.pattern)), line.reason)
        for line in spec.family.table.ignored
        if applies(line.when, spec.facts, None)
    ]
    unexpected: list[TensorInfo] = []
    ignored: list[tuple[TensorInfo, str]] = []
    for info in rest:
        reasons = [reason for pattern, reason in patterns if pattern.match(info.name)]
        if reasons:
            ignored.append((info, reasons[0]))
        else:
            unexpected.append(info)
    return unexpected, ignored


def _tied_pairs(
    tensors: Mapping[str, TensorInfo], ignored: list[tuple[TensorInfo, str]], spec: WeightSpec
) -> list[tuple[TensorInfo, TensorInfo]]:
    """Pairs ignored tensors whose parameter the table ties to another with that other's source."""
    if "tied" not in spec.facts.flags:
        return []
    sources = {rule.name: rule.source for rule in spec.tensors}
    own_name = {rule.source: rule.name for rule in spec.family.table.rules}
    tied = dict(spec.family.table.tied)
    pairs = []
    for info, _ in ignored:
        twin = tensors.get(sources.get(tied.get(own_name.get(info.name, ""), ""), ""))
        if twin is not None:
            pairs.append((info, twin))
    return pairs


def prove_tied(checkpoint: Checkpoint, report: NameReport) -> tuple[Finding, ...]:
    """Reads tensors the config declares tied and returns a finding for each pair that differs."""
    found = []
    for extra, twin in report.tied:
        row = _first_difference(checkpoint, extra, twin)
        if row is not None:
            what = f"differs from {twin.name} (row {row}), but the config says they are tied"
            fix = "set tie_word_embeddings to false in config.json, or drop the tensor"
            found.append(Finding(ERROR, f"{extra.file}, {extra.name}", what, fix))
    return tuple(found)


def _first_difference(checkpoint: Checkpoint, left: TensorInfo, right: TensorInfo) -> int | None:
    if left.shape != right.shape or left.dtype != right.dtype:
        return 0
    rows = max(1, _TILE_BYTES * left.rows // max(1, left.value_bytes))
    for start in range(0, left.rows, rows):
        tile = slice(start, min(left.rows, start + rows))
        left_values = checkpoint.read(left.name, tile).reshape(tile.stop - start, -1)
        right_values = checkpoint.read(right.name, tile).reshape(tile.stop - start, -1)
        same = (left_values.view(np.uint8) == right_values.view(np.uint8)).all(axis=1)
        if not same.all():
            return start + int(np.argmin(same))
    return None


def require_match(checkpoint: Checkpoint, spec: WeightSpec) -> NameReport:
    """Returns the report of a checkpoint that fits the model.

    Raises TensorError listing every tensor that is missing, unexpected or of wrong shape or dtype.
    """
    report = match_names(checkpoint.tensors, spec)
    refuse_errors(report.findings(), f"{checkpoint.path}: weights do not fit the config")
    return report
