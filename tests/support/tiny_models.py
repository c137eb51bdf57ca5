"""Tiny checkpoints with random weights, one for each family the llama module covers.

Written as Hugging Face folders from the rule table alone, so that no other library is needed.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from firstlight.models.spec import ModelSpec, read_model_spec

BASE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
# name -> fields beyond BASE; each brings at least one feature that no other one has.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 8},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3, "num_key_value_heads": 2},
    "llama-biased": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LINEAR,
    },
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral-window": {"model_type": "mistral", "sliding_window": 16},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "rope_parameters": YARN},
    "smollm3": {"model_type": "smollm3", "head_dim": 8, "num_key_value_heads": 1},
}


def tiny_config(name: str, **changes: Any) -> dict[str, Any]:
    """Returns the config.json fields of one of CONFIGS."""
    return {**BASE, **CONFIGS[name], **changes}


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns a tensor for every source name: matrices of unit gain, norms and biases near 1 and
    0.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for rule in spec.tensors:
        values = torch.randn(rule.shape, generator=generator)
        if len(rule.shape) > 1:
            weights[rule.source] = values * rule.shape[-1] ** -0.5
        else:
            weights[rule.source] = values * 0.2 + (0.0 if rule.name.endswith("bias") else 1.0)
    return weights


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int = 0) -> ModelSpec:
    """Writes config.json and model.safetensors into `folder` and returns the model's spec."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = read_model_spec(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(random_weights(spec, seed), folder / "model.safetensors")
    return spec
