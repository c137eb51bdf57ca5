"""Owns what can be said of a checkpoint or store from config and headers alone; reads no values.

Every defect becomes a finding; only a path that holds nothing to read is an error.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from firstlight.adapt.indexed_model import IndexedModel
from firstlight.adapt.shard_files import find_licence, licence_in
from firstlight.checkpoint.bare_index import read_bare_index
from firstlight.checkpoint.dequantised import dequantised
from firstlight.checkpoint.findings import ERROR, NOTE, Finding, errors_of
from firstlight.checkpoint.json_file import read_json
from firstlight.checkpoint.names import NameReport, match_names
from firstlight.checkpoint.reader import scan_checkpoint
from firstlight.checkpoint.shard_map import ShardMap
from firstlight.checkpoint.store import Store, read_manifest, size_findings
from firstlight.checkpoint.store_layout import PartRecord, part_bytes
from firstlight.checkpoint.store_names import MODEL_FOLDER, is_store
from firstlight.checkpoint.tensor_info import Checkpoint
from firstlight.errors import BadInput, UsageError
from firstlight.models.spec import ModelSpec, read_model_spec
from firstlight.sharding.codecs import find_codec
from firstlight.sharding.layout import Layout
from firstlight.sharding.rules import TensorRule, applies
from firstlight.sharding.slices import legal_degrees


@dataclass(frozen=True)
class InspectReport:
    """What is known of a model's weights. Counts are of values, sizes of bytes.

    `model_type` and what follows from the config are empty when the config cannot be read.
    `bytes_by_dtype` and `tensors_by_dtype` go by the form in the files. `tensors_per_layer` maps a
    number of tensors to the number of layers that have so many. `computed`: only an index was
    there; shapes, types and sizes are those the config asks for.
    """

    path: Path
    format: str
    family: str = ""
    model_type: str = ""
    num_layers: int = 0
    context_length: int = 0
    vocab_size: int = 0
    tied: bool = False
    parameters: int = 0
    parameters_by_part: Mapping[str, int] = field(default_factory=dict)
    num_tensors: int = 0
    num_files: int = 0
    num_bytes: int = 0
    bytes_by_dtype: Mapping[str, int] = field(default_factory=dict)
    tensors_by_dtype: Mapping[str, int] = field(default_factory=dict)
    tensors_per_layer: Mapping[int, int] = field(default_factory=dict)
    quantisation: str = ""
    licence: str = ""
    legal_tp: tuple[int, ...] = ()
    findings: tuple[Finding, ...] = ()
    computed: bool = False

    @property
    def sound(self) -> bool:
        """Says whether nothing forbids the use of the weights."""
        return not errors_of(self.findings)


def inspect_path(path: Path) -> InspectReport:
    """Returns what config and headers say of a checkpoint folder, file or store, defects included.

    Raises TensorError or StoreError when there is nothing at `path` to read.
    """
    if is_store(path):
        return _inspect_store(path)
    index = read_bare_index(path)
    if index is None:
        return _inspect_checkpoint(_plain(scan_checkpoint(path)))
    return _inspect_checkpoint(IndexedModel(path, index))


def map_path(path: Path, layout: Layout) -> ShardMap:
    """Returns which bytes of a sound checkpoint (or of the source its index names) go to which
    rank.

    Raises UsageError for a store or a GGUF file, LayoutError when the model cannot be cut so.
    """
    if is_store(path) or path.suffix == ".gguf":
        raise UsageError(f"{path}: only tensors as published are mapped; name the checkpoint")
    index = read_bare_index(path)
    source = IndexedModel(path, index) if index else scan_checkpoint(path)
    spec = read_model_spec(source.config())
    return ShardMap(match_names(source.tensors, spec), spec, layout)


def _plain(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the view in which quantised matrices are plain, if config and family want it."""
    try:
        return dequantised(checkpoint, read_model_spec(checkpoint.config()))
    except BadInput:
        return checkpoint  # said where the config is read to be used


def _inspect_checkpoint(checkpoint: Checkpoint | IndexedModel) -> InspectReport:
    path = checkpoint.path
    findings = list(checkpoint.findings)
    config, spec, names = _read_model(checkpoint, findings)
    if isinstance(checkpoint, IndexedModel):
        licence = licence_in(checkpoint.folder)
    else:
        licence = find_licence(checkpoint)
    if not licence:
        findings.append(Finding(NOTE, str(path), "states no licence for the weights"))
    infos = checkpoint.tensors.values()
    rules = [match.rule for match in names.matched] if names else []
    return InspectReport(
        path=path,
        format=checkpoint.format,
        **_model_facts(config, spec, rules),
        num_tensors=len(infos),
        num_files=len(checkpoint.files),
        num_bytes=sum(info.num_bytes for info in infos),
        bytes_by_dtype=_sum((info.stored, info.num_bytes) for info in infos),
        tensors_by_dtype=_sum((info.stored, 1) for info in infos),
        quantisation=_quantisation(config, [info.stored for info in infos]),
        licence=licence,
        findings=tuple(findings),
        computed=isinstance(checkpoint, IndexedModel),
    )


def _read_model(
    checkpoint: Checkpoint | IndexedModel, findings: list[Finding]
) -> tuple[dict[str, Any], ModelSpec | None, NameReport | None]:
    """Reads the config and matches the names; what fails becomes a finding."""
    config: dict[str, Any] = {}
    try:
        config = checkpoint.config()
        known = checkpoint.spec if isinstance(checkpoint, IndexedModel) else None
        spec = known or read_model_spec(config)
    except BadInput as error:
        findings.append(Finding(ERROR, str(checkpoint.path), str(error)))
        return config, None, None
    names = match_names(checkpoint.tensors, spec)
    absent = {f.where.rpartition(", ")[2] for f in findings}
    findings.extend(f for f in names.findings() if f.where not in absent)
    for extra, twin in names.tied:
        what = f"said to equal {twin.name}; compared when weights are read"
        findings.append(Finding(NOTE, f"{extra.file}, {extra.name}", what))
    return config, spec, names


def _inspect_store(path: Path) -> InspectReport:
    store = Store(path, read_manifest(path))
    manifest, findings = store.manifest, size_findings(store)
    parts = [p for unit in manifest.units for block in unit.blocks for p in block.parts]
    config: dict[str, Any] = {}
    spec = None
    try:
        config = read_json(path / MODEL_FOLDER / "config.json")
        spec = read_model_spec(config)
    except BadInput as error:
        findings.append(Finding(ERROR, str(path), str(error)))
    stored = {source: _form(p) for p in parts for source in p.sources}  # pieces share a source
    sizes = [(_form(p), len(p.sources) * part_bytes(p, p.shape)) for p in parts]
    return InspectReport(
        path=path,
        format="store",
        **_model_facts(config, spec, list(spec.tensors) if spec else []),
        num_tensors=len(stored),
        num_files=len(manifest.units),
        num_bytes=sum(unit.size for unit in manifest.units),
        bytes_by_dtype=_sum(sizes),
        tensors_by_dtype=_sum((dtype, 1) for dtype in stored.values()),
        quantisation=_quantisation(config, [*manifest.source.stored, *_codecs(parts)]),
        licence=manifest.licence,
        findings=tuple(findings),
    )


def _codecs(parts: Iterable[PartRecord]) -> set[str]:
    return {part.codec for part in parts if find_codec(part.codec).quantised}


def _form(part: PartRecord) -> str:
    """Says how a store holds a part: its element type, or the codec of its codes and scales."""
    return part.codec if find_codec(part.codec).quantised else part.dtype


def _model_facts(
    config: Mapping[str, Any], spec: ModelSpec | None, rules: list[TensorRule]
) -> dict[str, Any]:
    if spec is None:
        return {"model_type": str(config.get("model_type", ""))}
    layers = Counter(r.layer for r in rules if r.layer is not None and not r.unused)
    parts = _parameters_by_part(spec, rules)
    return {
        "family": spec.family.name,
        "model_type": str(config["model_type"]),
        "num_layers": spec.facts.num_layers,
        "context_length": spec.context_length,
        "vocab_size": spec.vocab_size,
        "tied": "tied" in spec.facts.flags,
        "parameters": sum(parts.values()),
        "parameters_by_part": parts,
        "tensors_per_layer": dict(sorted(Counter(layers.values()).items())),
        "legal_tp": tuple(legal_degrees(spec.facts.axes, limit=64)),
    }


def _parameters_by_part(spec: ModelSpec, rules: Iterable[TensorRule]) -> dict[str, int]:
    """Counts parameters by the parts the family names; packed values are counted one by one."""
    named = [(re.compile(translate(p.pattern)), p) for p in spec.family.table.parts]

    @cache
    def part_of(name: str, layer: int | None) -> str:
        for pattern, line in named:
            if pattern.match(name) and applies(line.when, spec.facts, layer):
                return line.part
        return _part_of(name)

    # Experts that share a name are alike; half a million of them have a few thousand names.
    firsts: dict[str, TensorRule] = {}
    counts: Counter[str] = Counter()
    for rule in rules:
        firsts.setdefault(rule.name, rule)
        counts[rule.name] += 1
    return _sum(
        (part_of(r.name, r.layer), counts[r.name] * r.values * prod(r.shape))
        for r in firsts.values()
    )


def _part_of(name: str) -> str:
    """Names the part of a model a parameter belongs to: embed, attention, mlp, norms, head ..."""
    words = name.split(".")
    if words[0] not in ("layers", "head"):
        return words[0]
    module = words[2] if words[0] == "layers" else words[1]
    if module.endswith("norm"):
        return "norms"
    return module if words[0] == "layers" else words[0]


def _quantisation(config: Mapping[str, Any], stored: Iterable[str]) -> str:
    """Says how weights are quantised, by the config or by the types in the file; empty if not."""
    inner = config.get("text_config")
    for fields in (config, inner if isinstance(inner, dict) else {}):
        stated = fields.get("quantization_config")
        if isinstance(stated, dict):
            method = str(stated.get("quant_method", "stated by the config without a method"))
            return f"{method}, {stated['format']}" if "format" in stated else method
    plain = {"F64", "F32", "F16", "BF16"}
    return ", ".join(sorted({name for name in stored if name not in plain}))


def _sum(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for key, amount in pairs:
        total[key] += amount
    return dict(total.most_common())
