"""Owns reading a `tiktoken.model` file with the settings beside it, and naming its special slots.
It knows nothing of how text is cut or encoded.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from firstlight.errors import ConfigError
from firstlight.inputs.json_object import read_object
from firstlight.inputs.tokenizer_files import read_chat_templates, token_text

MODEL_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_CLASS = "TikTokenTokenizer"
NUM_SPECIAL_SLOTS = 256


@dataclass(frozen=True)
class TiktokenFiles:
    """What was read: `ranks` are the byte strings of the vocabulary, in the order they merge.

    `slots` are the texts of the 256 special tokens by id, which follow the ranks; `special` are
    the ids that a decoded text leaves out.
    """

    origin: Path
    ranks: Mapping[bytes, int]
    slots: Mapping[int, str]
    special: frozenset[int]
    config: Mapping[str, Any]
    chat_templates: Mapping[str, str]


def has_tiktoken_files(directory: Path) -> bool:
    """Whether the folder holds a tiktoken vocabulary of the class this module knows."""
    if not (directory / MODEL_FILE).is_file():
        return False
    return read_object(directory / CONFIG_FILE).get("tokenizer_class") == TOKENIZER_CLASS


def read_tiktoken_files(directory: Path) -> TiktokenFiles:
    """Reads the vocabulary and its settings; raises ConfigError naming the file and the line."""
    config = read_object(directory / CONFIG_FILE)
    ranks = _read_ranks(directory / MODEL_FILE)
    declared = _declared(config, len(ranks), directory / CONFIG_FILE)
    ids = range(len(ranks), len(ranks) + NUM_SPECIAL_SLOTS)
    slots = {index: f"<|reserved_token_{index}|>" for index in ids}
    slots |= {index: text for index, (text, _) in declared.items()}
    if len(set(slots.values())) != len(slots):
        raise ConfigError(f"{directory / CONFIG_FILE}: two special tokens have the same text")
    plain = {index for index, (_, special) in declared.items() if not special}
    return TiktokenFiles(
        origin=directory,
        ranks=MappingProxyType(ranks),
        slots=MappingProxyType(slots),
        special=frozenset(slots.keys() - plain),
        config=MappingProxyType(config),
        chat_templates=MappingProxyType(read_chat_templates(directory, config)),
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    """The lines `base64 rank`; ranks must be 0, 1, 2 ... and all single bytes must be there."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            data, index = base64.b64decode(text, validate=True), int(rank)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(f"{path}, line {number}: not a base64 text and a rank") from error
        if index != len(ranks) or data in ranks or not data:
            raise ConfigError(f"{path}, line {number}: rank {index} is out of order or doubled")
        ranks[data] = index
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConfigError(f"{path}: no token for the bytes {missing[:8]}; the file is cut short")
    return ranks


def _declared(config: Mapping[str, Any], base: int, where: Path) -> dict[int, tuple[str, bool]]:
    entries = config.get("added_tokens_decoder") or {}
    found = {}
    for key, entry in entries.items() if isinstance(entries, Mapping) else ():
        text = token_text(entry)
        is_slot = key.isdecimal() and base <= int(key) < base + NUM_SPECIAL_SLOTS
        if text is None or not text or not is_slot:
            raise ConfigError(
                f"{where}: added_tokens_decoder[{key!r}] is not a token of the "
                f"{NUM_SPECIAL_SLOTS} slots from {base}"
            )
        found[int(key)] = (text, bool(entry.get("special")))
    return found
