"""Makes a K3 config small enough to train in a test, and sequences it can learn."""

import random
from typing import Any

from firstlight.training.examples import Example
from firstlight.training.loop import Outcome, Scores, sequence_outcome
from firstlight.training.model import Trainable
from firstlight.training.recipes.k3_mini.configuration import model_config

BASE = 300
TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "kv_lora_rank": 64, "q_lora_rank": 64,
    "moe_intermediate_size": 128, "num_experts": 4, "routed_expert_hidden_size": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 32,
}  # fmt: skip


def tiny_config(*, quantised: bool = False) -> dict[str, Any]:
    """Returns k3-mini's config at a quarter of its width."""
    fields = model_config(BASE, quantised=quantised)
    fields["text_config"].update(TEXT)
    fields["text_config"]["linear_attn_config"]["head_dim"] = 16
    fields["vision_config"].update(
        mm_hidden_size=32, qkv_hidden_size=32, text_hidden_size=64, vt_hidden_size=32,
        vt_intermediate_size=32, vt_num_attention_heads=2, vt_num_hidden_layers=1,
    )  # fmt: skip
    return fields


class Echo:
    """Teaches to say a sequence of tokens again."""

    def __init__(self, tokens: int = 6, sequences: int = 8) -> None:
        self.tokens = tokens
        self.sequences = sequences

    def outcome(self, model: Trainable, step: int, levels: dict[str, float]) -> Outcome:
        draw = random.Random(step)
        return sequence_outcome(model, [self.example(draw) for _ in range(self.sequences)])

    def heard(self, scores: Scores, levels: dict[str, float]) -> None:
        levels["heard"] = levels.get("heard", 0.0) + len(scores["echo"])

    def example(self, draw: random.Random) -> Example:
        said = [draw.randrange(16) for _ in range(self.tokens)]
        return Example(
            "echo", (*said, 99, *said), (False,) * (self.tokens + 1) + (True,) * self.tokens
        )
