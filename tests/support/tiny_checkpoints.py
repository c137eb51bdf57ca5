"""Makes small random checkpoints of every Llama-like family, as folders a real model would have."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from firstlight.models.spec import ModelSpec, read_model_spec

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-bias": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "use_sliding_window": False},
    "smollm3": {"model_type": "smollm3", "tie_word_embeddings": True, "sliding_window": None},
}


def tiny_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """Returns a config.json of a family: 4 heads, 2 KV heads, 2 layers, 200 tokens."""
    return {
        "model_type": "llama",
        "vocab_size": 200,
        "hidden_size": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **FAMILIES[family],
        **changes,
    }


def random_tensors(
    spec: ModelSpec, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Returns values for every source tensor of a model."""
    generator = torch.Generator().manual_seed(seed)
    return {
        rule.source: torch.randn(rule.shape, generator=generator).to(dtype) for rule in spec.tensors
    }


def write_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Writes config.json and the weights of a random model, and returns the weights."""
    config = tiny_config(family, **changes)
    tensors = random_tensors(read_model_spec(config), dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, tensors, shards=shards)
    return tensors


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], *, shards: int = 1) -> None:
    """Writes tensors as one safetensors file, or several with an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        own = names[number::shards]
        save_file({name: tensors[name] for name in own}, folder / file)
        weight_map.update(dict.fromkeys(own, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def contents(folder: Path) -> dict[str, bytes]:
    """Returns every file below a folder by its relative name."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
