"""Owns the list of reads one rank makes, as pure data; knows no tensor and opens no file."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from firstlight.checkpoint.names import NameReport, WeightSpec
from firstlight.checkpoint.tensor_info import TensorInfo
from firstlight.errors import TensorError
from firstlight.sharding.layout import Place
from firstlight.sharding.rules import TensorRule
from firstlight.sharding.slices import Slice, local_shape, slice_for

LARGEST_READ = 8 * 2**20


class Target(msgspec.Struct, frozen=True, gc=False):
    """Where one tensor rule lands: parameter `name`, at `stacked` along its first dim if several
    rules (experts) share it. `shape` is that of the rule's own part."""

    rule: TensorRule
    part: Slice
    name: str
    stacked: int | None
    shape: tuple[int, ...]


class TensorRead(msgspec.Struct, frozen=True, gc=False):
    """Rows [start, stop) of one source tensor; in the target they begin at row `at`.

    `offset` and `num_bytes` are the run in the file. For a part cut along dim 0 the rows are the
    part's own; else they are whole rows of which the target takes its columns.
    """

    target: Target
    source: str
    start: int
    stop: int
    at: int
    file: Path
    offset: int
    num_bytes: int


def targets_of(spec: WeightSpec, place: Place) -> tuple[Target, ...]:
    """Returns every tensor a rank holds and where it lands, units in load order."""
    filled: Counter[str] = Counter()
    targets = []
    alike: dict[str, tuple[Slice, tuple[int, ...]]] = {}  # the experts of one parameter
    facts = spec.facts
    experts = place.experts(facts.num_experts)
    for rule in spec.tensors:
        if rule.expert is not None and rule.expert not in experts:
            continue
        known = alike.get(rule.name) if rule.stacked else None
        if known is None:
            part = slice_for(rule, facts, place)
            if part is None:
                continue
            known = part, local_shape(rule, part)
            if rule.stacked:
                alike[rule.name] = known
        stacked = None
        if rule.stacked:
            stacked = filled[rule.name]
            filled[rule.name] = stacked + 1
        targets.append(Target(rule, known[0], rule.name, stacked, known[1]))
    return tuple(targets)


def parameter_shapes(spec: WeightSpec, place: Place) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter a rank allocates, padding and local experts included."""
    return shapes_of(targets_of(spec, place))


def shapes_of(targets: Iterable[Target]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter that some targets fill."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        shape = target.shape
        shapes[target.name] = shape if target.stacked is None else (target.stacked + 1, *shape)
    return shapes


def kept_types(spec: WeightSpec) -> dict[str, str]:
    """Returns the header type of every parameter that does not take the compute dtype."""
    return {rule.name: rule.dtype for rule in spec.tensors if rule.dtype}


def plan_tensor_reads(
    report: NameReport, targets: Sequence[Target], *, largest_read: int = LARGEST_READ
) -> tuple[TensorRead, ...]:
    """Returns the reads that fill the targets straight from a checkpoint, in file order per unit.

    Raises TensorError naming the parameters for which the checkpoint has no values.
    """
    infos = {match.rule.source: match.info for match in report.matched}
    absent = [t.name for t in targets if t.rule.source not in infos and not t.part.zero]
    if absent:
        raise TensorError(f"no values in the checkpoint for: {', '.join(absent[:50])}")
    reads: list[TensorRead] = []
    for target in targets:
        if not target.part.zero:
            _add_reads(reads, target, infos[target.rule.source], largest_read)
    return tuple(reads)


def _add_reads(reads: list[TensorRead], target: Target, info: TensorInfo, largest: int) -> None:
    rule, start, stop = target.rule, target.part.start, target.part.stop
    first = rule.source_rows[0] if rule.source_rows else 0
    if target.part.dim:
        start, stop = 0, rule.shape[0]
    num_rows = info.rows or 1
    stored_row_bytes = info.num_bytes / num_rows
    row_bytes = info.num_bytes if info.in_place else info.value_bytes
    rows = max(1, largest * num_rows // max(1, row_bytes))
    for row in range(start, stop, rows):
        end = min(stop, row + rows)
        reads.append(
            TensorRead(
                target,
                info.name,
                first + row,
                first + end,
                row - start,
                info.file,
                info.offset + int((first + row) * stored_row_bytes),
                int((end - row) * stored_row_bytes),
            )
        )
