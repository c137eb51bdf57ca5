"""Makes a second miniature of Kimi K3, one that many layouts may cut: random weights, true form.

12 KDA and 12 MLA heads, 12 experts of width 384, shared width 768, dense width 768, vocabulary 640,
2 vision heads; the rest is the oracle's miniature, whose tokenizer and image settings it takes.
Run as a program it writes the folder: python tests/support/k3_layouts.py FOLDER
"""

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from firstlight.models.spec import ModelSpec, read_model_spec
from firstlight.sharding.rules import TensorRule

ORACLE = Path(__file__).parents[1] / "data" / "k3" / "checkpoint"
TEXT: dict[str, Any] = {
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "num_experts": 12,
    "moe_intermediate_size": 384,
    "num_shared_experts": 2,
    "intermediate_size": 768,
}


def layout_config(*, quantised: bool = True) -> dict[str, Any]:
    """Returns the config.json of the miniature, with MXFP4 or with float experts."""
    config: dict[str, Any] = json.loads((ORACLE / "config.json").read_text("utf-8"))
    config = copy.deepcopy(config)
    config["text_config"].update(TEXT)
    config["text_config"]["linear_attn_config"]["num_heads"] = 12
    if not quantised:
        del config["text_config"]["quantization_config"]
    return config


def layout_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """Returns a tensor for every source name, of the types a published checkpoint has."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for rule in spec.tensors:
        values = _values(rule, generator)
        if rule.source in tensors:  # the pieces of one source tensor follow each other
            values = torch.cat((tensors[rule.source], values))
        tensors[rule.source] = values
    return {name: values.contiguous() for name, values in tensors.items()}


def _values(rule: TensorRule, generator: torch.Generator) -> Tensor:
    leaf = rule.name.split("attention.")[-1].split("moe.")[-1]
    if leaf.endswith("_packed"):
        return torch.randint(0, 256, rule.shape, generator=generator).to(torch.uint8)
    if leaf.endswith("_scale"):
        return torch.randint(121, 124, rule.shape, generator=generator).to(torch.uint8)
    if leaf == "A_log_padding":
        return torch.zeros(rule.shape)
    values = torch.randn(rule.shape, generator=generator)
    if leaf == "dt_bias":
        values = values - 3.0
    elif leaf == "routed.router.bias":
        values = values * 0.1
    elif len(rule.shape) == 1 and leaf != "A_log":
        values = 1.0 + 0.2 * values
    elif leaf != "A_log" and rule.name not in ("embed.weight", "vision.positions"):
        values = values * torch.Size(rule.shape[1:]).numel() ** -0.5
    return values if rule.dtype == "F32" else values.bfloat16()


def write_layout_miniature(folder: Path, *, quantised: bool = True, seed: int = 0) -> ModelSpec:
    """Writes a checkpoint folder with tokenizer and image settings; returns the model's spec."""
    folder.mkdir(parents=True, exist_ok=True)
    config = layout_config(quantised=quantised)
    spec = read_model_spec(config)
    for path in ORACLE.iterdir():
        if path.name != "config.json" and "safetensors" not in path.name:
            shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(layout_tensors(spec, seed), folder / "model.safetensors")
    return spec


if __name__ == "__main__":
    write_layout_miniature(Path(sys.argv[1]))
