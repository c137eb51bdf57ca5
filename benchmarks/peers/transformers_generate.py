"""Owns the transformers side of the serving benchmark: a child process that answers JSON lines.

Knows nothing of the other sides. fp32, SDPA attention, one batch with left padding; the end token
is switched off, so that every prompt gets exactly the tokens asked for.

    python transformers_generate.py MODEL_FOLDER NUM_THREADS
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

PAD_ID = 0


class StepClock(StoppingCriteria):
    """Notes when each token of the batch was chosen and never stops."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seconds.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """Answers all prompts as one batch; times are seconds from the call."""
    start = time.perf_counter()
    longest = max(len(prompt) for prompt in prompts)
    rows = [[PAD_ID] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    clock = StepClock()
    out_BT = model.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(mask),
        max_new_tokens=num_tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    wall = time.perf_counter() - start
    steps = [moment - start for moment in clock.seconds]
    return {"wall": wall, "steps": steps, "tokens": out_BT[:, longest:].tolist()}


def main() -> None:
    folder, num_threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(num_threads)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD_ID
    generate(model, [[1, 2, 3]], 2)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(generate(model, asked["prompts"], asked["num_tokens"])), flush=True)


if __name__ == "__main__":
    main()
