"""A tiny checkpoint that can read and write text: random weights, a byte-level tokenizer, a chat
template.

Knows files and nothing of services.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tiny_models import tiny_config, write_checkpoint

VOCABULARY = 300
CONTEXT = 8192
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_text_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes a checkpoint folder of 300 tokens whose every id has text."""
    config = tiny_config("llama3", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    config |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, **changes}
    write_checkpoint(folder, config, seed)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "the ship came into the harbour in the morning and then it went away again with others"
    backend.train_from_iterator([words * 9], trainer)
    assert backend.get_vocab_size() == VOCABULARY, "the corpus is too small for the vocabulary"
    backend.save(str(folder / "tokenizer.json"))
    texts = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    return folder


def poison(folder: Path, token_id: int) -> None:
    """Makes the embedding of one token NaN."""
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][token_id] = torch.nan
    save_file(weights, folder / "model.safetensors")
