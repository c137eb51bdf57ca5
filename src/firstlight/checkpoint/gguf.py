"""Owns the reading of GGUF files as checkpoints of Hugging Face names; knows no layout.

Block-quantised tensors come dequantised to F32; tokenizers are left to `firstlight.inputs`.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import gguf
import numpy as np
from blake3 import blake3
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from firstlight.checkpoint.findings import ERROR, Finding
from firstlight.checkpoint.gguf_config import PERMUTED, config_from_metadata
from firstlight.checkpoint.positioned_io import InputFile
from firstlight.checkpoint.tensor_info import RAW_TYPES, Array, TensorInfo
from firstlight.errors import TensorError
from firstlight.units import format_count

_DENSE = {
    GGMLQuantizationType.F64: "F64",
    GGMLQuantizationType.F32: "F32",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
    GGMLQuantizationType.I64: "I64",
    GGMLQuantizationType.I32: "I32",
    GGMLQuantizationType.I16: "I16",
    GGMLQuantizationType.I8: "I8",
}

# GGUF names of Llama-like models and the Hugging Face names of the same tensors.
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SHORT = 4096  # longer lists belong to the tokenizer
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)")


def source_name(name: str) -> str:
    """Returns the Hugging Face name of a GGUF tensor, the name itself when there is none."""
    match = _BLOCK.fullmatch(name)
    if match and match[2] in _INNER:
        return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else name


class StoredTensor(NamedTuple):
    """One entry of the tensor table: `shape` is outermost first, `heads` the rope pairs to undo."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int
    heads: int = 0


class _Table(gguf.GGUFReader):
    """The library's reader, keeping the tensor table but touching no tensor data.

    The library maps the file; with this only its metadata pages are read, so that a file cut short
    in its data is described tensor by tensor.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        # A plain view: slicing the map itself takes 5 times as long.
        self.data = np.asarray(self.data)  # type: ignore[assignment]
        found = super()._get(offset, dtype, count, override_order)
        # The library returns what there is; a damaged count would have it loop for ever.
        if len(found) < int(count):
            raise IndexError(f"the metadata runs past the end of the file at byte {offset}")
        return found

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        self.stored: list[StoredTensor] = []
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            tensor_type = GGMLQuantizationType(kind[0])
            shape = tuple(int(d) for d in reversed(dims.tolist()))
            block, block_bytes = GGML_QUANT_SIZES[tensor_type]
            num_bytes = prod(shape) // block * block_bytes
            start = int(start_offs + offset[0])
            text = bytes(name).decode("utf-8")
            self.stored.append(StoredTensor(text, shape, tensor_type, start, num_bytes))


class GgufCheckpoint:
    """One GGUF file of a Llama-like model, its tensors by their Hugging Face names."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = (path,)
        table = _read_table(path)
        self._fields = table.fields
        self._metadata = _short_fields(path, table)
        self._size = path.stat().st_size
        stored = [_with_heads(entry, self._metadata) for entry in table.stored]
        self._stored = {source_name(entry.name): entry for entry in stored}
        self.findings: tuple[Finding, ...] = tuple(_defects(path, self._size, stored))
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: _info(path, name, entry) for name, entry in self._stored.items()}
        )
        self._file: InputFile | None = None
        self._lock = threading.Lock()

    def config(self) -> dict[str, Any]:
        """Returns a config.json made from the metadata. Raises ConfigError for what it lacks."""
        factors = self.read("rope_freqs.weight") if "rope_freqs.weight" in self.tensors else None
        return config_from_metadata(self._metadata, self.tensors, rope_factors=factors)

    def field(self, name: str, default: Any = None) -> Any:
        """Returns one metadata field that is no tokenizer list."""
        return self._metadata.get(name, default)

    def metadata(self) -> dict[str, Any]:
        """Returns all metadata as the file has it, tokenizer lists included (a second or so)."""
        return {key: field.contents() for key, field in self._fields.items()}

    def read(self, name: str, rows: slice | None = None) -> Array:
        """Returns a tensor, or the rows [start, stop) of it, dequantised."""
        entry, info = self._stored[name], self.tensors[name]
        start, stop, _ = (rows or slice(None)).indices(info.rows)
        head = info.rows // entry.heads if entry.heads else 1
        whole = len(info.shape) < 2 and GGML_QUANT_SIZES[entry.type][0] > 1
        first, last = (0, info.rows) if whole else (start // head * head, -(-stop // head) * head)
        values = self._read_rows(entry, info, first, last)
        if entry.heads and last > first:
            values = unpermute(values, (last - first) // head)
        result: Array = np.ascontiguousarray(values[start - first : stop - first])
        return result if info.shape else values

    def _read_rows(self, entry: StoredTensor, info: TensorInfo, first: int, last: int) -> Array:
        row_bytes = entry.num_bytes // max(1, info.rows)
        raw = np.empty((last - first) * row_bytes, np.uint8)
        self._open().read_into(raw.data, entry.offset + first * row_bytes)
        shape = (last - first, *info.shape[1:]) if info.shape else ()
        if entry.type in _DENSE:
            return raw.view(RAW_TYPES[info.dtype]).reshape(shape)
        block, block_bytes = GGML_QUANT_SIZES[entry.type]
        stored = (*shape[:-1], shape[-1] // block * block_bytes)
        values: Array = gguf.quants.dequantize(raw.reshape(stored), entry.type)
        return values.reshape(shape)

    def read_into(self, name: str, start_row: int, buffer: memoryview) -> None:
        """Fills a byte buffer with whole rows from `start_row` on, as they are in the file."""
        info = self.tensors[name]
        row_bytes = info.num_bytes // max(1, info.rows)
        self._open().read_into(buffer, info.offset + start_row * row_bytes)

    def source_digest(self) -> str:
        """Returns a BLAKE3 over the file's name, size and everything before its tensor data."""
        header = self._open().read(0, min((e.offset for e in self._stored.values()), default=0))
        hasher = blake3(f"{self.path.name}\0{self._size}\n".encode())
        hasher.update(header)
        return hasher.hexdigest()

    def close(self) -> None:
        """Closes the file; it is opened again by the next read."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

    def _open(self) -> InputFile:
        with self._lock:
            if self._file is None:
                self._file = InputFile(self.path)
            return self._file


def unpermute(values: Array, heads: int) -> Array:
    """Undoes llama.cpp's order of rotary pairs: rows [heads, half, 2] become [heads, 2, half]."""
    shape = values.shape
    half = shape[0] // heads // 2
    pairs: Array = values.reshape(heads, half, 2, *shape[1:]).swapaxes(1, 2)
    result: Array = pairs.reshape(shape)
    return result


def _read_table(path: Path) -> _Table:
    if path.stat().st_size == 0:
        raise TensorError(f"{path}: the file is empty; download or copy it again")
    try:
        return _Table(path)
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        raise TensorError(
            f"{path}: not a readable GGUF file, or cut short in its metadata: {error}"
        ) from error


def _short_fields(path: Path, table: _Table) -> dict[str, Any]:
    """Returns the metadata but for the tokenizer's long lists."""
    try:
        return {
            key: field.contents()
            for key, field in table.fields.items()
            if field.types[0] != GGUFValueType.ARRAY or len(field.data) <= _SHORT
        }
    except (ValueError, IndexError) as error:
        raise TensorError(f"{path}: damaged metadata: {error}") from error


def _with_heads(entry: StoredTensor, metadata: Mapping[str, Any]) -> StoredTensor:
    """Marks query and key projections whose rows the converter to GGUF has permuted."""
    architecture = metadata.get("general.architecture")
    match = _BLOCK.fullmatch(entry.name)
    if architecture not in PERMUTED or not match or match[2] not in ("attn_q", "attn_k"):
        return entry
    heads = metadata.get(f"{architecture}.attention.head_count", 0)
    if match[2] == "attn_k":
        heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
    if not isinstance(heads, int) or heads < 1 or not entry.shape or entry.shape[0] % (2 * heads):
        raise TensorError(
            f"{entry.name}: {list(entry.shape)} does not hold {heads!r} heads of an even size"
        )
    return entry._replace(heads=heads)


def _info(path: Path, name: str, entry: StoredTensor) -> TensorInfo:
    dense = _DENSE.get(entry.type)
    return TensorInfo(
        name=name,
        dtype=dense or "F32",
        shape=entry.shape,
        file=path,
        offset=entry.offset,
        num_bytes=entry.num_bytes,
        stored=entry.type.name if dense is None else dense,
        in_place=dense is not None and not entry.heads,
    )


def _defects(path: Path, size: int, stored: list[StoredTensor]) -> Iterator[Finding]:
    fix = "download or copy this file again"
    for entry in stored:
        where, end = f"{path}, {entry.name}", entry.offset + entry.num_bytes
        block, _ = GGML_QUANT_SIZES[entry.type]
        if entry.shape and entry.shape[-1] % block:
            what = f"rows of {entry.shape[-1]} values are no whole blocks of {entry.type.name}"
            yield Finding(ERROR, where, what, fix)
        if entry.type not in _DENSE and not _dequantises(entry.type):
            yield Finding(ERROR, where, f"type {entry.type.name} cannot be dequantised here")
        if end > size:
            what = (
                f"file is truncated: it has {format_count(size)} bytes, this tensor ends "
                f"{format_count(end - size)} bytes later"
            )
            yield Finding(ERROR, where, what, fix)
    runs = sorted(stored, key=lambda entry: entry.offset)
    for left, right in pairwise(runs):
        if left.offset + left.num_bytes > right.offset:
            what = f"overlaps {left.name} in the file"
            yield Finding(ERROR, f"{path}, {right.name}", what, fix)
    for name, uses in Counter(entry.name for entry in stored).items():
        if uses > 1:
            yield Finding(ERROR, f"{path}, {name}", "name occurs twice in the tensor table", fix)


def _dequantises(kind: GGMLQuantizationType) -> bool:
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
