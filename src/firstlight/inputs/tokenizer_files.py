"""Owns the files beside a tokenizer: its settings, the tokens they declare, its chat templates.
It knows nothing of how text is encoded or templates are rendered.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.errors import ConfigError
from firstlight.inputs.json_object import read_object
from firstlight.inputs.scored_pieces import added_token

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class TokenizerFiles:
    """What was read: `definition` is a tokenizer.json, `config` a tokenizer_config.json."""

    origin: Path
    definition: Mapping[str, Any]
    config: Mapping[str, Any]
    chat_templates: Mapping[str, str]

    def export_hf(self, directory: Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the chat templates into `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        config = {key: value for key, value in self.config.items() if key != "chat_template"}
        _write(directory / "tokenizer.json", json.dumps(self.definition, ensure_ascii=False))
        _write(
            directory / "tokenizer_config.json",
            json.dumps(config, ensure_ascii=False, indent=2, sort_keys=True) + "\n",
        )
        for name, template in self.chat_templates.items():
            if name == "default":
                _write(directory / "chat_template.jinja", template)
            else:
                folder = directory / "additional_chat_templates"
                folder.mkdir(exist_ok=True)
                _write(folder / f"{_safe_name(name)}.jinja", template)


def read_chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a folder by name; the one without a name is `default`.

    A template file wins over the same name in tokenizer_config.json.
    """
    templates = _templates_of(config.get("chat_template"), directory / "tokenizer_config.json")
    beside = read_object(directory / "chat_template.json")
    templates |= _templates_of(beside.get("chat_template"), directory / "chat_template.json")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    if (directory / "chat_template.jinja").is_file():
        templates["default"] = _read_text(directory / "chat_template.jinja")
    return templates


def token_text(value: Any) -> str | None:
    """The text of a token as tokenizer_config.json writes it: a string or an object."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of bos_token, eos_token and their like that a tokenizer_config.json sets."""
    found = {name: token_text(config.get(name)) for name in NAMED_TOKENS}
    return {name: text for name, text in found.items() if text is not None}


def with_declared_tokens(
    definition: Mapping[str, Any], config: Mapping[str, Any], directory: Path
) -> dict[str, Any]:
    """Adds the tokens that only tokenizer_config.json declares, as the reference loader does."""
    entries = definition.get("added_tokens")
    if not isinstance(entries, list) or not isinstance(definition.get("model"), Mapping):
        raise ConfigError(f"{directory}/tokenizer.json: no `model` or no list `added_tokens`")
    by_id = {entry["id"]: dict(entry) for entry in entries}
    declared = config.get("added_tokens_decoder")
    for key, entry in (declared if isinstance(declared, Mapping) else {}).items():
        if int(key) not in by_id and token_text(entry) is not None:
            by_id[int(key)] = {**added_token(int(key), "", special=False), **entry}
    known = {entry["content"]: entry for entry in by_id.values()}
    ids = _model_ids(definition["model"])
    for name in NAMED_TOKENS:
        text = token_text(config.get(name))
        if text is None:
            continue
        if text in known:
            known[text]["special"] = True
        elif text in ids:
            by_id[ids[text]] = added_token(ids[text], text, special=True)
    return {**definition, "added_tokens": [by_id[key] for key in sorted(by_id)]}


def _model_ids(model: Mapping[str, Any]) -> Mapping[str, int]:
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, Mapping):
        return vocabulary
    return {entry[0]: index for index, entry in enumerate(vocabulary)}


def _templates_of(value: Any, origin: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(
        isinstance(entry, Mapping)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in value
    ):
        return {entry["name"]: entry["template"] for entry in value}
    raise ConfigError(
        f"{origin}: chat_template is neither text nor a list of objects with name and template"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8"))


def _safe_name(name: str) -> str:
    if not name.replace("_", "").replace("-", "").isalnum():
        raise ConfigError(f"chat template name {name!r} cannot be a file name")
    return name
