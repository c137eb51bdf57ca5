"""Owns the verification of a store, step by step down to one flipped bit; repairs nothing.

Knows no tensor library: it works on bytes, digests and records.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from firstlight.checkpoint.digests import Entries, checksums_of, granule_digest
from firstlight.checkpoint.findings import ERROR, Finding
from firstlight.checkpoint.positioned_io import InputFile
from firstlight.checkpoint.progress import Progress, silent
from firstlight.checkpoint.store import Store, file_findings, read_manifest, size_findings
from firstlight.checkpoint.store_layout import (
    UnitRecord,
    block_offsets,
    describe_granule,
    granule_bytes,
    granule_keys,
    payload_bytes,
    stride,
    uncovered_parts,
    unit_record,
)
from firstlight.checkpoint.store_names import UNITS_FOLDER
from firstlight.errors import BadInput, DigestMismatch
from firstlight.units import format_bytes, format_count

_FIX = "make the store again from its source"


@dataclass(frozen=True)
class VerifyStep:
    """One numbered step: what was checked, what was found wrong, and a line on what was seen."""

    number: int
    title: str
    findings: tuple[Finding, ...]
    summary: str

    @property
    def passed(self) -> bool:
        """Says whether nothing was found."""
        return not self.findings


@dataclass(frozen=True)
class VerifyReport:
    """The steps that ran; the first that makes later ones meaningless is the last."""

    path: Path
    steps: tuple[VerifyStep, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything found, in order."""
        return tuple(f for step in self.steps for f in step.findings)

    @property
    def passed(self) -> bool:
        """Says whether the store is whole."""
        return not self.findings


def verify_store(path: Path, *, progress: Progress = silent) -> VerifyReport:
    """Reads a whole store and compares every byte with its digests. Raises nothing for damage."""
    try:
        store = Store(path, read_manifest(path))
    except BadInput as error:
        first = VerifyStep(1, "manifest", (Finding(ERROR, str(path), str(error)),), "not readable")
        return VerifyReport(path, (first,))
    manifest = store.manifest
    steps = [
        VerifyStep(
            1, "manifest", (), f"{len(manifest.units)} units made by {manifest.creator}, complete"
        )
    ]
    for title, check in _CHECKS:
        findings, summary = check(store, progress)
        steps.append(VerifyStep(len(steps) + 1, title, tuple(findings), summary))
    return VerifyReport(path, tuple(steps))


def _check_sizes(store: Store, progress: Progress) -> tuple[list[Finding], str]:
    findings = size_findings(store)
    total = sum(unit.size for unit in store.manifest.units)
    known = {f"{unit.name}.{kind}" for unit in store.manifest.units for kind in ("bin", "idx")}
    folder = store.path / UNITS_FOLDER
    if folder.is_dir():
        for extra in sorted(p.name for p in folder.iterdir() if p.name not in known):
            findings.append(Finding(ERROR, str(folder / extra), "the manifest knows no such file"))
    return findings, f"{2 * len(store.manifest.units)} files, {format_bytes(total)}"


def _check_coverage(store: Store, progress: Progress) -> tuple[list[Finding], str]:
    findings = []
    for unit in store.manifest.units:
        for name in uncovered_parts(unit):
            what = "its granules do not hold every value once"
            findings.append(Finding(ERROR, f"{store.path}, {name}", what, _FIX))
        if unit_record(unit.name, unit.blocks).size != unit.size:
            what = "size in the manifest differs from the one its blocks give"
            findings.append(Finding(ERROR, f"{store.path}, {unit.name}", what, _FIX))
    payload = sum(payload_bytes(unit) for unit in store.manifest.units)
    coverage = store.manifest.coverage
    if payload != coverage.payload_bytes:
        what = f"units hold {payload} bytes of values, the proof says {coverage.payload_bytes}"
        findings.append(Finding(ERROR, str(store.path), what, _FIX))
    return findings, (
        f"{format_count(coverage.tensors)} tensors, {format_count(coverage.values)} values, "
        f"padding {format_bytes(coverage.padding_bytes)}"
    )


def _check_indexes(store: Store, progress: Progress) -> tuple[list[Finding], str]:
    findings = []
    for unit in store.manifest.units:
        try:
            store.entries(unit.name)
        except DigestMismatch as error:
            findings.append(Finding(ERROR, str(store.bin_path(unit.name)), str(error), _FIX))
        except OSError:
            continue  # said by the step on sizes
    return findings, f"{len(store.manifest.units)} indexes"


def _check_granules(store: Store, progress: Progress) -> tuple[list[Finding], str]:
    findings: list[Finding] = []
    total, done, granules = sum(unit.size for unit in store.manifest.units), 0, 0
    for unit in store.manifest.units:
        for damage, num_bytes in _unit_damage(store, unit):
            done, granules = done + num_bytes, granules + 1
            progress("verify", done, total, unit.name)
            findings.extend(damage)
    return findings, f"{format_count(granules)} granules, {format_bytes(done)}"


def _unit_damage(store: Store, unit: UnitRecord) -> Iterator[tuple[list[Finding], int]]:
    """Yields what is wrong with each granule, and its bytes."""
    path = store.bin_path(unit.name)
    try:
        entries = store.entries(unit.name)
    except (DigestMismatch, OSError):
        return
    if not path.is_file() or path.stat().st_size != unit.size:
        return
    file = InputFile(path)
    try:
        yield from _compare_granules(file, unit, entries)
    finally:
        file.close()


def _compare_granules(
    file: InputFile, unit: UnitRecord, entries: Entries
) -> Iterator[tuple[list[Finding], int]]:
    offsets, strides = block_offsets(unit), [stride(block) for block in unit.blocks]
    written = 0
    for entry, key in enumerate(granule_keys(unit)):
        block = unit.blocks[key.block]
        row = key.expert * block.granules + key.granule
        offset = offsets[key.block] + row * strides[key.block]
        num_bytes = granule_bytes(block, key.granule)
        data = memoryview(file.read(offset, num_bytes))
        found, damage = granule_digest(data, unit.name, key), []
        gap = bytes(file.read(written, offset - written)) if offset > written else b""
        written = offset + num_bytes
        if found != entries["digest"][entry].tobytes():
            agrees = checksums_of(data) == int(entries["checksum"][entry])
            hint = "; its checksum agrees, so the index may be what is damaged" if agrees else ""
            what = f"{describe_granule(unit, key)} differs from its digest at byte {offset}{hint}"
            damage.append(Finding(ERROR, str(file.path), what, _FIX))
        if gap.strip(b"\0"):
            what = f"padding before byte {offset} of unit {unit.name} is not zero"
            damage.append(Finding(ERROR, str(file.path), what, _FIX))
        yield damage, num_bytes


def _check_files(store: Store, progress: Progress) -> tuple[list[Finding], str]:
    count = len(store.manifest.files) + len(store.manifest.answers)
    return file_findings(store), f"{count} files of model and answers"


Check = Callable[[Store, Progress], tuple[list[Finding], str]]
_CHECKS: tuple[tuple[str, Check], ...] = (
    ("sizes of files", _check_sizes),
    ("coverage of the source", _check_coverage),
    ("digests of indexes", _check_indexes),
    ("digests of granules", _check_granules),
    ("model and answer files", _check_files),
)
