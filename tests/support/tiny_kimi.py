"""Makes configs and random checkpoints of Kimi K3 and Kimi Linear that many layouts can cut."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from firstlight.models.spec import ModelSpec, read_model_spec

K3_DATA = Path(__file__).parents[1] / "data" / "k3"
MINIATURE = K3_DATA / "checkpoint"

WIDE_TEXT: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 12, "num_key_value_heads": 12,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "intermediate_size": 768, "moe_intermediate_size": 384, "num_experts": 12,
    "routed_expert_hidden_size": 64, "num_hidden_layers": 4,
}  # fmt: skip
WIDE_LINEAR = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 12, "head_dim": 8}


def miniature_config() -> dict[str, Any]:
    """Returns the config of the miniature: 5 KDA heads, 4 MLA heads, experts one scale wide."""
    fields: dict[str, Any] = json.loads((MINIATURE / "config.json").read_text())
    return fields


def wide_config(**text: Any) -> dict[str, Any]:
    """Returns a K3 config of 12 KDA and 12 MLA heads, 12 experts of width 384, 4 layers."""
    fields = miniature_config()
    fields["text_config"].update({**WIDE_TEXT, **text})
    fields["text_config"]["linear_attn_config"].update(WIDE_LINEAR)
    fields["vision_config"]["text_hidden_size"] = fields["text_config"]["hidden_size"]
    return fields


def linear_config(**text: Any) -> dict[str, Any]:
    """Returns a text-only Kimi Linear config: softplus decay, low-rank gate, plain experts."""
    kept = (
        "vocab_size", "hidden_act", "rms_norm_eps", "first_k_dense_replace", "num_shared_experts",
        "num_experts_per_token", "moe_renormalize", "mla_use_nope",
    )  # fmt: skip
    source = miniature_config()["text_config"]
    fields = {name: source[name] for name in kept} | WIDE_TEXT
    del fields["routed_expert_hidden_size"]
    linear = {**WIDE_LINEAR, "short_conv_kernel_size": 4}
    own = {
        "model_type": "kimi_linear", "hidden_act": "silu", "q_lora_rank": None,
        "model_max_length": 256, "linear_attn_config": linear, "routed_scaling_factor": 2.446,
    }  # fmt: skip
    return {**fields, **own, **text}


def random_kimi_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns values for every source tensor, in the types a published checkpoint has."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for rule in spec.tensors:
        if rule.dtype == "U8":
            values = torch.randint(0, 256, rule.shape, generator=generator, dtype=torch.uint8)
        else:
            values = torch.randn(rule.shape, generator=generator)
            values = torch.zeros_like(values) if rule.unused else values
            values = values.to(torch.float32 if rule.dtype else torch.bfloat16)
        if rule.source in tensors:
            values = torch.cat([tensors[rule.source], values])
        tensors[rule.source] = values
    return tensors


def write_kimi_checkpoint(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Writes config.json and random weights, and returns the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_kimi_tensors(read_model_spec(config))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors
