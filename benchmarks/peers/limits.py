"""Owns the least time the hardware needs for each question, from shapes and measured rates.

Knows nothing of any side; a share of 1 would be a program that wastes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Shapes:
    """What counts of a Llama-form model: parameters by use, and KV of one token."""

    body_parameters: int
    head_parameters: int
    kv_bytes_per_token: int
    query_width: int
    num_layers: int

    @property
    def weight_bytes(self) -> int:
        """fp32 bytes read for one decode step; the tied embedding is read as the head."""
        return (self.body_parameters + self.head_parameters) * FP32_BYTES


def read_shapes(model_folder: Path) -> Shapes:
    """Reads the shapes from `config.json`."""
    config = json.loads((model_folder / "config.json").read_text())
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_width = config.get("head_dim") or width // heads
    query, kv = heads * head_width, kv_heads * head_width
    layer = width * (query + 2 * kv) + query * width + 3 * width * config["intermediate_size"]
    return Shapes(
        body_parameters=layers * layer,
        head_parameters=config["vocab_size"] * width,
        kv_bytes_per_token=2 * kv * layers * FP32_BYTES,
        query_width=query,
        num_layers=layers,
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured rates of the machine with the shapes of a model; all results in seconds."""

    shapes: Shapes
    gemm_flops: float
    read_bytes: float

    def prefill(self, num_prompts: int, length: int) -> float:
        """Least time to compute the prompts: projections of all tokens, causal attention, head."""
        shapes = self.shapes
        projections = 2 * shapes.body_parameters * length
        attention = 4 * shapes.num_layers * shapes.query_width * length * length / 2
        head = 2 * shapes.head_parameters
        return num_prompts * (projections + attention + head) / self.gemm_flops

    def step(self, batch: int, context: int) -> float:
        """Least time of one decode step: weights and KV read once, or the multiplications."""
        shapes = self.shapes
        read = shapes.weight_bytes + batch * context * shapes.kv_bytes_per_token
        flops = 2 * batch * (shapes.body_parameters + shapes.head_parameters)
        return max(read / self.read_bytes, flops / self.gemm_flops)

    def whole(self, batch: int, prompt: int, output: int) -> float:
        """Least time of `batch` answers, prefill included."""
        return self.prefill(batch, prompt) + (output - 1) * self.step(batch, prompt + output // 2)
