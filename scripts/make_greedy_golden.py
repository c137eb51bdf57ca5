"""Makes the golden file of greedy answers: what transformers, in fp32, continues 50 prompts with.

Owns the choice of prompts and the form of the file; knows nothing of our model, of which only the
tokenizer and the chat template are used, to make the prompts.

    python scripts/make_greedy_golden.py tests/data/greedy/smollm2.json
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
import transformers

import fetch_smollm2
from firstlight.inputs.chat_format import load_chat_format
from firstlight.inputs.tokenizer import load_tokenizer

NUM_TOKENS = 24
NUM_TEXTS = 36
SHORTEST, LONGEST = 5, 400
NUM_CHARACTERS = 4000  # more than LONGEST tokens of these texts
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
    "What is 17 + 25?",
    "Who wrote Hamlet?",
    "Translate 'good morning' to French.",
    "How many legs has a spider?",
    "Explain recursion to a child.",
    "Give me a recipe for pancakes in three steps.",
    "Is 91 a prime number? Say why.",
    "Which is heavier, a kilogram of iron or a kilogram of feathers?",
    "List the planets, nearest to the sun first.",
    "What does this print? `print([i * i for i in range(4)])`",
    "Write a haiku about an engine that starts for the first time.",
)


class Answer(NamedTuple):
    """A greedy continuation. Entry i of each list is about output token i."""

    token_ids: list[int]
    margins: list[float]
    runners_up: list[int]


def prompts(gguf: Path) -> Iterator[tuple[str, list[int]]]:
    """Yields 50 prompts by name: parts of Python's own documentation, and questions as chats."""
    tokenizer = load_tokenizer(gguf)
    names = sorted(topics)
    for index in range(NUM_TEXTS):
        name = names[index * len(names) // NUM_TEXTS]
        length = SHORTEST + (LONGEST - SHORTEST) * index * index // (NUM_TEXTS - 1) ** 2
        ids = tokenizer.encode_plain(topics[name][:NUM_CHARACTERS])
        yield f"topic {name}", ids[:length]
    chat = load_chat_format(gguf, tokenizer)
    for question in QUESTIONS:
        yield f"chat {question}", chat.render([{"role": "user", "content": question}]).token_ids


def load_oracle(gguf: Path) -> Any:
    """Returns the model as transformers reads it, dequantised, in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).eval()


@torch.inference_mode()
def continue_greedily(model: Any, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> Answer:
    """Returns the most likely tokens one after another; end tokens do not end it.

    The margin of a token is its lead over the second in log-probability.
    """
    answer = Answer([], [], [])
    step, past = torch.tensor([list(prompt)]), None
    for _ in range(num_tokens):
        out = model(input_ids=step, past_key_values=past, use_cache=True)
        past = out.past_key_values
        values, ids = torch.log_softmax(out.logits[0, -1], -1).topk(2)
        answer.token_ids.append(int(ids[0]))
        answer.runners_up.append(int(ids[1]))
        answer.margins.append(float(values[0] - values[1]))
        step = ids[:1].unsqueeze(0)
    return answer


@torch.inference_mode()
def margin_spread(model: Any, cases: Sequence[tuple[Sequence[int], Answer]]) -> float:
    """Returns how far a margin in fp32 lies from the same in float64, at most, over all tokens."""
    double = model.double()
    worst = 0.0
    for prompt, answer in cases:
        ids = torch.tensor([[*prompt, *answer.token_ids[:-1]]])
        logits = double(input_ids=ids).logits[0, len(prompt) - 1 :]
        pairs = torch.tensor([answer.token_ids, answer.runners_up]).T
        values = logits.gather(1, pairs)
        exact = values[:, 0] - values[:, 1]
        worst = max(worst, float((exact - torch.tensor(answer.margins)).abs().max()))
    return worst


def main(target: Path) -> None:
    """Writes the golden file."""
    torch.set_num_threads(2)
    gguf = fetch_smollm2.fetch()
    model = load_oracle(gguf)
    cases = [(name, ids, continue_greedily(model, ids)) for name, ids in prompts(gguf)]
    head = {
        "made_by": "scripts/make_greedy_golden.py",
        "oracle": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "weights_sha256": fetch_smollm2.GGUF_SHA256,
        "num_tokens": NUM_TOKENS,
        "margin_spread": margin_spread(model, [(ids, answer) for _, ids, answer in cases]),
    }
    lines = [
        json.dumps(
            {
                "name": name,
                "prompt_ids": ids,
                "token_ids": answer.token_ids,
                "margins": [round(m, 6) for m in answer.margins],
                "runners_up": answer.runners_up,
            }
        )
        for name, ids, answer in cases
    ]
    text = json.dumps(head, indent=1)[:-2] + ',\n "cases": [\n' + ",\n".join(lines) + "\n]}\n"
    json.loads(text)
    target.write_text(text, encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
