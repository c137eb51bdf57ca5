"""Owns which file of a model folder a tokenizer is read from.
It knows nothing of what stands in the files or of how text is encoded.
"""

from pathlib import Path
from types import MappingProxyType

from firstlight.errors import ConfigError
from firstlight.inputs.gguf_vocabulary import read_gguf_tokenizer
from firstlight.inputs.json_object import read_object
from firstlight.inputs.sentencepiece_model import sentencepiece_definition
from firstlight.inputs.tokenizer_files import (
    TokenizerFiles,
    read_chat_templates,
    with_declared_tokens,
)


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Reads a GGUF file, or a folder with tokenizer.json, tokenizer.model or one GGUF file.

    Raises ConfigError naming the file when one is missing or damaged.
    """
    if path.suffix == ".gguf" and path.is_file():
        return read_gguf_tokenizer(path)
    return _read_folder(path)


def _read_folder(directory: Path) -> TokenizerFiles:
    config = read_object(directory / "tokenizer_config.json")
    names = read_object(directory / "special_tokens_map.json")
    merged = {**names, **config}
    if (directory / "tokenizer.json").is_file():
        definition = read_object(directory / "tokenizer.json")
    elif (directory / "tokenizer.model").is_file():
        definition = sentencepiece_definition(directory / "tokenizer.model", merged)
        merged = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, **merged}
    else:
        return _read_only_gguf(directory)
    return TokenizerFiles(
        origin=directory,
        definition=with_declared_tokens(definition, merged, directory),
        config=MappingProxyType(merged),
        chat_templates=MappingProxyType(read_chat_templates(directory, merged)),
    )


def _read_only_gguf(directory: Path) -> TokenizerFiles:
    found = sorted(directory.glob("*.gguf"))
    if len(found) == 1:
        return read_gguf_tokenizer(found[0])
    if found:
        raise ConfigError(
            f"{directory}: {len(found)} GGUF files ({', '.join(p.name for p in found)}) and no "
            "tokenizer.json; name the one to read"
        )
    raise ConfigError(
        f"{directory}: no tokenizer.json, tokenizer.model, GGUF file, or tiktoken.model with "
        "tokenizer class TikTokenTokenizer; copy the model's tokenizer files there"
    )
