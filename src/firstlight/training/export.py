"""Owns writing a trained model as a checkpoint in the form Kimi K3 is published in.

One file a layer, then embedding and head, projector, vision tower; bf16, fp32 where the rules keep
it, experts in MXFP4. It knows the rule table and no recipe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from firstlight.errors import ConfigError
from firstlight.kernels.mxfp4 import Mxfp4, to_mxfp4
from firstlight.models.spec import ModelSpec, read_model_spec
from firstlight.sharding.rules import TensorRule

INDEX_FILE = "model.safetensors.index.json"


def export_checkpoint(
    values: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path
) -> list[Path]:
    """Writes config.json, generation_config.json, weight files and their index to `folder`.

    `values` are whole fp32 parameters by name, experts dense; `config` is the published one. Raises
    ConfigError when the folder holds weight files already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if found := sorted(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder}: holds {found[0].name} already; export to a new folder")
    spec = read_model_spec(config)
    tensors = source_tensors(spec, values)
    files = file_of_tensor(spec)
    paths = []
    for name in sorted(set(files.values())):
        held = {source: tensors[source] for source, file in files.items() if file == name}
        save_file(held, folder / name, metadata={"format": "pt"})
        paths.append(folder / name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": files})
    _write(folder / "config.json", config)
    generation = {"max_length": spec.context_length, "eos_token_id": config["eos_token_id"]}
    _write(folder / "generation_config.json", generation)
    return paths


def source_tensors(spec: ModelSpec, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns every tensor of the checkpoint by its published name, in its published type."""
    rows: dict[str, dict[int, Tensor]] = {}
    packed: dict[str, Mxfp4] = {}
    for rule in spec.tensors:
        begin = rule.source_rows[0] if rule.source_rows else 0
        rows.setdefault(rule.source, {})[begin] = _published(rule, values, packed)
    return {
        source: torch.cat([parts[begin] for begin in sorted(parts)]).contiguous()
        for source, parts in rows.items()
    }


def file_of_tensor(spec: ModelSpec) -> dict[str, str]:
    """Returns the weight file of each published tensor, in the order of the rules."""
    layers = spec.facts.num_layers
    last = {"projector": layers + 2, "vision": layers + 3}
    total = layers + (3 if spec.config.vision else 1)
    files = {}
    for rule in spec.tensors:
        number = rule.layer + 1 if rule.layer is not None else last.get(rule.unit, layers + 1)
        files[rule.source] = f"model-{number:05d}-of-{total:06d}.safetensors"
    return files


def _published(rule: TensorRule, values: Mapping[str, Tensor], packed: dict[str, Mxfp4]) -> Tensor:
    if rule.unused:
        return torch.zeros(rule.shape, dtype=torch.float32)
    if rule.stacked and rule.dtype == "U8":
        assert rule.expert is not None
        name, _, part = rule.name.rpartition("_")
        if name not in packed:
            packed[name] = to_mxfp4(values[name])
        whole: Tensor = getattr(packed[name], part)
        return whole[rule.expert]
    value = values[rule.name]
    assert tuple(value.shape) == tuple(rule.shape), f"{rule.name}: {tuple(value.shape)}"
    return value.float() if rule.dtype == "F32" else value.bfloat16()


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
