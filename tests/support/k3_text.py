"""The text side of the miniature Kimi K3: its tokenizer, chat format and expected values."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from firstlight.inputs.chat_format import load_chat_format
from firstlight.inputs.kimi_k3.chat import KimiK3Format
from firstlight.inputs.tiktoken_tokenizer import TiktokenTokenizer
from firstlight.inputs.tokenizer import load_tokenizer

K3 = Path(__file__).parents[1] / "data" / "k3"
CHECKPOINT = K3 / "checkpoint"


@cache
def k3_tokenizer() -> TiktokenTokenizer:
    """The tokenizer of the checkpoint, found as a server finds it."""
    tokenizer = load_tokenizer(CHECKPOINT)
    assert isinstance(tokenizer, TiktokenTokenizer)
    return tokenizer


@cache
def k3_format() -> KimiK3Format:
    """The chat format of the checkpoint, found as a server finds it."""
    chat_format = load_chat_format(CHECKPOINT, k3_tokenizer())
    assert isinstance(chat_format, KimiK3Format)
    return chat_format


@cache
def k3_cases(name: str) -> Any:
    """The expected values of tests/data/k3/render/<name>.json."""
    return json.loads((K3 / "render" / f"{name}.json").read_text())
