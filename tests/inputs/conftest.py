"""Real tokenizers at toy size, trained on the topics of Python's own help, and their folders."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from firstlight.inputs.tokenizer import load_tokenizer

TEMPLATES = Path(__file__).parent.parent / "data" / "inputs"
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "[INST]",
    "[/INST]",
    "</s>",
]
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<table>"]


def help_texts() -> Iterator[str]:
    """About 150,000 characters of English and code."""
    return (text for _, text in sorted(topics.items())[:30])


def write_folder(folder: Path, tokenizer: Tokenizer, template: str | None, **config: Any) -> Path:
    """Writes a model folder with the tokenizer and the named template of tests/data/inputs."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        text = (TEMPLATES / f"{template}.jinja").read_text()
        (folder / "chat_template.jinja").write_text(text)
    return folder


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A byte-level BPE of 1,200 tokens with special tokens and plain added words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(help_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in WORDS])
    return tokenizer


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece BPE model of 800 pieces with byte fallback, made as Llama's was."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in help_texts() for line in text.splitlines()),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<mask_word>"],
        minloglevel=2,
    )
    return folder / "tokenizer.model"


@pytest.fixture(scope="session")
def family(
    byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """`family(template)` is a byte-level model folder with that chat template."""
    root = tmp_path_factory.mktemp("families")

    def folder(template: str) -> Path:
        config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
        return write_folder(root / template, byte_level, template, **config)

    return folder


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Any:
    """The real SmolLM2 tokenizer, read from its GGUF file."""
    return load_tokenizer(smollm2_gguf)
