"""Writes a tokenizer whose tokens are the 256 bytes, so that any model of 259 tokens can spell."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from firstlight.inputs.token_bytes import byte_alphabet

SPECIALS = ("<pad>", "<s>", "</s>")
END_ID = 2


def write_byte_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json; token i + 3 is byte i, </s> ends."""
    vocabulary = {text: index for index, text in enumerate([*SPECIALS, *byte_alphabet()])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def to_bytes(token_ids: list[int]) -> bytes:
    """The bytes tokens stand for; special ones stand for none."""
    return bytes(index - len(SPECIALS) for index in token_ids if index >= len(SPECIALS))
