"""Collects the greedy fp32 answers of a model with transformers, as a smoke profile.

Knows nothing of firstlight: transformers is the oracle, and an answer whose choice between two
tokens was ever close is left out, so that rounding cannot change it.

    python benchmarks/peers/collect_answers.py MODEL_FOLDER smollm2-135m > samples_smollm2-135m.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

LEAST_MARGIN = 0.02  # logits; fp32 sums in another order differ by less than 0.001
CHAT_LIMIT, TEXT_LIMIT = 64, 16
CHAT = (
    "What is the capital of France?",
    "What is the capital of Japan? Answer with one word.",
    "What is 2 + 3? Answer with the number only.",
    "What is 7 + 5?",
    "What is 10 - 4?",
    "Repeat exactly: KESTREL-4471",
    "How many days are in a week?",
    "Count from 1 to 40.",
    "Translate to French: Good morning.",
    "Repeat this text exactly and write nothing else: caf\u00e9 na\u00efve \u6771\u4eac",
)
TEXT = (
    "The capital of France is",
    "Once upon a time",
    "The password is KESTREL-4471. I repeat: the password is",
    "The code word is lantern-62-oak. Again, the code word is",
    "1, 2, 3, 4, 5, 6,",
    "Q: What is 2 + 2?\nA:",
    "copy: caf\u00e9 \u6771\u4eac na\u00efve\ncopy: caf\u00e9 \u6771\u4eac na\u00efve\ncopy:",
    "The opposite of hot is",
    "The chemical symbol for water is",
    "def add(a, b):\n    return",
    "Line: the heron keeps nine keys\nLine: the heron keeps nine keys\nLine:",
)


def main() -> None:
    folder, profile = sys.argv[1:3]
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = [collect(model, tokenizer, "chat", prompt, CHAT_LIMIT) for prompt in CHAT]
    samples += [collect(model, tokenizer, "completions", prompt, TEXT_LIMIT) for prompt in TEXT]
    kept = [sample for sample in samples if sample is not None]
    groups = [{"name": f"exact answers ({api})", "need": 1.0} for api in ("chat", "completions")]
    description = "greedy answers of SmolLM2-135M-Instruct (from its Q4_1 file) in fp32"
    head = {"name": profile, "description": description, "groups": groups}
    json.dump({**head, "samples": kept}, sys.stdout, indent=1, ensure_ascii=True)
    sys.stdout.write("\n")


def collect(model: Any, tokenizer: Any, api: str, prompt: str, limit: int) -> dict[str, Any] | None:
    """One sample, or None when a choice was close."""
    ids = tokenizer(prompt)["input_ids"]
    if api == "chat":
        turn = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
    tokens, margin = greedy(model, tokenizer.eos_token_id, ids, limit)
    ended = tokens[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    print(f"{margin:7.3f} {api} {prompt!a} -> {text!a}", file=sys.stderr)
    if margin < LEAST_MARGIN:
        return None
    return {
        "name": "-".join(prompt.lower().split()[:6]),
        "group": f"exact answers ({api})",
        "api": api,
        "prompt": prompt,
        "accept": [text],
        "match": "exact",
        "max_tokens": limit,
        "finish_reason": "stop" if ended else "length",
        "prompt_tokens": len(ids),
        "must_stop": api == "chat" and ended,
    }


@torch.no_grad()
def greedy(model: Any, end_id: int, ids: list[int], limit: int) -> tuple[list[int], float]:
    """The greedy continuation and the smallest gap between the two best logits on the way."""
    given_BT = torch.tensor([ids])
    out = model.generate(
        given_BT,
        attention_mask=torch.ones_like(given_BT),
        max_new_tokens=limit,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        eos_token_id=end_id,
        pad_token_id=end_id,
    )
    gaps = [float(score[0].topk(2).values.diff().abs()) for score in out.scores]
    return out.sequences[0, len(ids) :].tolist(), min(gaps)


if __name__ == "__main__":
    main()
