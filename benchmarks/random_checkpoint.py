"""Writes a checkpoint of any size with true headers and random bf16 values, a stand-in for a model.

Owns the shape of such a model (a Llama whose layers are many enough) and its values; refuses to
know what is measured with it. Values lie between 0.008 and 0.03 in size: finite, incompressible.
"""

import json
from pathlib import Path

import torch

from firstlight.checkpoint.reader import INDEX_NAME
from firstlight.checkpoint.safetensors_header import OutputTensor, encode_header, place_tensors
from firstlight.checkpoint.torch_types import bytes_of
from firstlight.models.spec import ModelSpec, read_model_spec

FILE_BYTES = 2**30  # a published checkpoint comes in files of some gigabytes
PIECE_VALUES = 8 * 2**20


def llama_config(num_bytes: int) -> dict[str, object]:
    """Returns the config of a Llama of about so many bytes: 49,152 tokens, width 2,048."""
    config: dict[str, object] = {
        "model_type": "llama", "vocab_size": 49_152, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 1, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }  # fmt: skip
    spec = read_model_spec(config)
    sizes = [2 * torch.Size(rule.shape).numel() for rule in spec.tensors if rule.layer == 0]
    outside = [2 * torch.Size(rule.shape).numel() for rule in spec.tensors if rule.layer is None]
    layers = max(1, round((num_bytes - sum(outside)) / sum(sizes)))
    return {**config, "num_hidden_layers": layers}


def write_random(folder: Path, num_bytes: int) -> ModelSpec:
    """Writes config, index and weight files of about so many bytes; returns the model's spec."""
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config(num_bytes)
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(config)
    files: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    held = 0
    for rule in spec.tensors:
        if held >= FILE_BYTES:
            files.append([])
            held = 0
        files[-1].append((rule.source, "BF16", rule.shape))
        held += 2 * torch.Size(rule.shape).numel()
    weight_map = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        placed = place_tensors(tensors)
        _write_file(folder / name, placed, seed=number)
        weight_map.update({tensor.name: name for tensor in placed})
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return spec


def _write_file(path: Path, tensors: list[OutputTensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with path.open("wb") as file:
        file.write(encode_header(tensors))
        left = sum(tensor.num_bytes for tensor in tensors) // 2
        while left:
            count = min(left, PIECE_VALUES)
            bits = torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16, generator=generator)
            file.write(bytes_of(bits.bitwise_and_(0x80FF - 2**16).bitwise_or_(0x3C00)))
            left -= count
