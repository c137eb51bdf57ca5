"""Owns reading a model's generation_config.json into defaults for sampling and ending.
It knows nothing of requests or of how tokens are sampled.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from firstlight.errors import ConfigError
from firstlight.inputs.json_object import read_object


@dataclass(frozen=True)
class GenerationDefaults:
    """What the model's authors recommend; None where they say nothing.

    `eos_ids` are all ids that end an answer, of generation_config.json first and then of
    config.json; `ignored` names the fields that were read past.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    bos_id: int | None = None
    pad_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Rule:
    field: str
    kind: type
    holds: Callable[[Any], bool]
    wanted: str


_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "temperature": _Rule("temperature", float, lambda v: v >= 0, "a number, at least 0"),
        "top_k": _Rule("top_k", int, lambda v: v >= -1, "a whole number, at least -1"),
        "top_p": _Rule("top_p", float, lambda v: 0 <= v <= 1, "a number from 0 to 1"),
        "min_p": _Rule("min_p", float, lambda v: 0 <= v <= 1, "a number from 0 to 1"),
        "repetition_penalty": _Rule(
            "repetition_penalty", float, lambda v: v > 0, "a number above 0"
        ),
        "do_sample": _Rule("do_sample", bool, lambda v: True, "true or false"),
        "max_new_tokens": _Rule("max_new_tokens", int, lambda v: v > 0, "a whole number above 0"),
        "bos_token_id": _Rule("bos_id", int, lambda v: v >= 0, "a token id"),
        "pad_token_id": _Rule("pad_id", int, lambda v: v >= -1, "a token id"),
    }
)


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """Reads generation_config.json and the end tokens of config.json in `directory`.

    Either file may be missing. Raises ConfigError naming file and field for values of a wrong
    type or out of range.
    """
    path = directory / "generation_config.json"
    values = read_object(path)
    found = {
        rule.field: _checked(values[name], rule, f"{path}: {name}")
        for name, rule in _RULES.items()
        if values.get(name) is not None
    }
    model = read_object(directory / "config.json")
    text_model = model.get("text_config")
    sources: list[tuple[Mapping[str, Any], Path]] = [
        (values, path),
        (model, directory / "config.json"),
    ]
    if isinstance(text_model, Mapping):
        sources.append((text_model, directory / "config.json"))
    ends = [end for source, origin in sources for end in _eos(source, origin)]
    ignored = sorted(name for name in values if name not in _RULES and name != "eos_token_id")
    return GenerationDefaults(**found, eos_ids=tuple(dict.fromkeys(ends)), ignored=tuple(ignored))


def _checked(value: Any, rule: _Rule, where: str) -> Any:
    kinds = (int, float) if rule.kind is float else (rule.kind,)
    wrong_kind = not isinstance(value, kinds) or (isinstance(value, bool) and rule.kind is not bool)
    if wrong_kind or not math.isfinite(value) or not rule.holds(value):
        raise ConfigError(f"{where} is {value!r}, which is not {rule.wanted}")
    return rule.kind(value)


def _eos(values: Mapping[str, Any], origin: Path) -> list[int]:
    value = values.get("eos_token_id")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    for item in listed:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise ConfigError(
                f"{origin}: eos_token_id is {value!r}, not a token id or a list of them"
            )
    return listed
