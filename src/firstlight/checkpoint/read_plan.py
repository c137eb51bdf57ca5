"""Owns the list of reads one rank makes, as pure data; knows no tensor and opens no file."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from firstlight.checkpoint.names import NameReport, WeightSpec
from firstlight.checkpoint.tensor_info import TensorInfo
from firstlight.errors import TensorError
from firstlight.sharding.layout import Place
from firstlight.sharding.rules import TensorRule
from firstlight.sharding.slices import Slice, local_shape, slice_for

LARGEST_READ = 8 * 2**20


class Target(NamedTuple):
    """Where one tensor rule lands: parameter `name`, at `stacked` along its first dim if several
    rules (experts) share it. `shape` is that of the rule's own part."""

    rule: TensorRule
    part: Slice
    name: str
    stacked: int | None
    shape: tuple[int, ...]


class TensorRead(NamedTuple):
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
    for rule in spec.tensors:
        part = slice_for(rule, spec.facts, place)
        if part is not None:
            stacked = filled[rule.name] if rule.stacked else None
            filled[rule.name] += 1
            targets.append(Target(rule, part, rule.name, stacked, local_shape(rule, part)))
    return tuple(targets)


def parameter_shapes(spec: WeightSpec, place: Place) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter a rank allocates, padding and local experts included."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets_of(spec, place):
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
            reads.extend(_tensor_reads(target, infos[target.rule.source], largest_read))
    return tuple(reads)


def _tensor_reads(target: Target, info: TensorInfo, largest_read: int) -> Iterator[TensorRead]:
    first = target.rule.source_rows[0] if target.rule.source_rows else 0
    start, stop = target.part.start, target.part.stop
    if target.part.dim:
        start, stop = 0, target.rule.shape[0]
    row_bytes = max(1, info.value_bytes // max(1, info.rows))
    stored_row_bytes = info.num_bytes / max(1, info.rows)
    rows = max(1, largest_read // row_bytes)
    for row in range(start, stop, rows):
        end = min(stop, row + rows)
        offset = info.offset + int((first + row) * stored_row_bytes)
        yield TensorRead(
            target=target,
            source=info.name,
            start=first + row,
            stop=first + end,
            at=row - start,
            file=info.file,
            offset=offset,
            num_bytes=int((end - row) * stored_row_bytes),
        )
