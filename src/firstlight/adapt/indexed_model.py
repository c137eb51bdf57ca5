"""Owns a model of which only config and index are here, seen as tensors its rules describe."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from firstlight.checkpoint.bare_index import BareIndex
from firstlight.checkpoint.findings import NOTE, WARNING, Finding
from firstlight.checkpoint.json_file import read_json
from firstlight.checkpoint.names import source_rows
from firstlight.checkpoint.tensor_info import TensorInfo
from firstlight.errors import BadInput, ConfigError
from firstlight.models.spec import ModelSpec, read_model_spec
from firstlight.sharding.codecs import tensor_bytes
from firstlight.units import format_count

_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class IndexedModel:
    """The names of an index with the shapes and types the config asks for.

    Names that no rule knows have no shape and no bytes; they are found by comparing names.
    """

    format = "safetensors"

    def __init__(self, path: Path, index: BareIndex) -> None:
        self.path = path
        self._index = index
        self.folder = index.path.parent
        self.files = tuple(self.folder / name for name in sorted(set(index.files.values())))

    def config(self) -> dict[str, Any]:
        """Returns config.json. Raises ConfigError when there is none beside the index."""
        return read_json(self.folder / "config.json", ConfigError)

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor the index names; nothing of it was read."""
        paths, files = {path.name: path for path in self.files}, self._index.files
        tensors = {}
        for name, dtype, shape, num_bytes in self._described():
            file = files.get(name)
            if file is not None:
                tensors[name] = TensorInfo(name, dtype, shape, paths[file], 0, num_bytes, dtype)
        if len(tensors) < len(files):
            for name, file in files.items():
                if name not in tensors:
                    tensors[name] = TensorInfo(name, "", (), paths[file], 0, 0, stored="")
        return tensors

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Says that sizes are computed and files absent; warns where the index says otherwise."""
        where = str(self._index.path)
        what = (
            f"none of the {len(self.files)} files the index names is here: names are the index's, "
            "shapes, types and sizes are computed from the config"
        )
        found = [Finding(NOTE, where, what, "download the files to have their headers checked")]
        total = sum(info.num_bytes for info in self.tensors.values())
        stated = self._index.total_size
        if stated is not None and stated != total:
            what = f"total_size says {format_count(stated)} bytes, the config {format_count(total)}"
            found.append(Finding(WARNING, where, what))
        return tuple(found)

    @cached_property
    def spec(self) -> ModelSpec:
        """What the config describes. Raises ConfigError, fields named."""
        return read_model_spec(self.config())

    def _described(self) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        """Yields name, type, shape and bytes of every source tensor the config asks for."""
        try:
            spec = self.spec
        except BadInput:
            return  # said where the config is read to be used
        plain, rows = self._plain_type(), source_rows(spec)
        sizes: dict[tuple[str, tuple[int, ...]], int] = {}  # experts are alike
        for rule in spec.tensors:
            dtype, shape = rule.dtype or plain, rule.shape
            if rule.source_rows is not None:
                shape = (rows[rule.source], *shape[1:])
            size = sizes.get((dtype, shape))
            if size is None:
                size = sizes[dtype, shape] = tensor_bytes(dtype, shape)
            yield rule.source, dtype, shape, size

    def _plain_type(self) -> str:
        """Returns the type of weights no rule says a type of; configs name it in three places."""
        fields = self.config()
        inner = fields.get("text_config")
        places = (fields, inner if isinstance(inner, dict) else {})
        stated = [place.get(name) for place in places for name in ("dtype", "torch_dtype")]
        return next((_TYPES[name] for name in stated if name in _TYPES), "BF16")
