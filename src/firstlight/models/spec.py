"""Owns the registry of model families and what is known of a model from its config alone;
torch-free.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any

from firstlight.errors import ConfigError
from firstlight.models.kimi_k3 import config as kimi_config
from firstlight.models.kimi_k3 import facts as kimi_facts
from firstlight.models.kimi_k3.weights import RULES as KIMI_RULES
from firstlight.models.llama import config as llama_config
from firstlight.models.llama.weights import RULES as LLAMA_RULES
from firstlight.sharding.attention_pattern import (
    AttentionPattern,
    check_pages,
    parse_attention,
    patterns_of,
    with_pattern,
)
from firstlight.sharding.rules import Facts, RuleTable, TensorRule, expand
from firstlight.sharding.state_spec import StateSpec


@dataclass(frozen=True)
class Family:
    """One model family: how its config is read, its rule table, and where its module is built.

    `text_module` holds `build(config, kernels) -> nn.Module` and is imported only by who needs
    torch.
    """

    name: str
    model_types: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], Any]
    facts: Callable[[Any], Facts]
    states: Callable[[Any], tuple[StateSpec, ...]]
    table: RuleTable
    text_module: str

    def builder(self) -> Callable[..., Any]:
        """Imports torch and returns the family's build function."""
        build: Callable[..., Any] = import_module(self.text_module).build
        return build


@dataclass(frozen=True)
class ModelSpec:
    """A model as its config describes it: names, shapes and axes of every tensor, state per
    layer. `patterns` say which tokens the attention of each layer reads; empty for all.
    """

    family: Family
    config: Any
    facts: Facts
    states: tuple[StateSpec, ...]
    patterns: tuple[AttentionPattern, ...] = ()

    @cached_property
    def tensors(self) -> tuple[TensorRule, ...]:
        """Every tensor, units in load order; half a million of them are made only when asked."""
        return tuple(expand(self.family.table, self.facts))

    @property
    def context_length(self) -> int:
        """Largest number of tokens of one sequence."""
        return int(self.config.context_length)

    @property
    def reads_images(self) -> bool:
        """Whether the model has an encoder for images."""
        return getattr(self.config, "vision", None) is not None

    @property
    def vocab_size(self) -> int:
        """Rows of the vocabulary, padding excluded."""
        return int(self.config.vocab_size)


def families() -> tuple[Family, ...]:
    """Returns every family this program can run."""
    return (
        Family(
            name="llama",
            model_types=llama_config.MODEL_TYPES,
            read_config=llama_config.read_config,
            facts=llama_config.facts,
            states=llama_config.states,
            table=LLAMA_RULES,
            text_module="firstlight.models.llama.text",
        ),
        Family(
            name="kimi_k3",
            model_types=kimi_config.MODEL_TYPES,
            read_config=kimi_config.read_config,
            facts=kimi_facts.facts,
            states=kimi_facts.states,
            table=KIMI_RULES,
            text_module="firstlight.models.kimi_k3.text",
        ),
    )


def find_family(model_type: object) -> Family:
    """Returns the family of a config's `model_type`. Raises ConfigError listing the known ones."""
    for family in families():
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(t for f in families() for t in f.model_types))
    raise ConfigError(f"config.json: model_type {model_type!r} is not known; known: {known}")


def read_model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Returns everything a config says about a model. Raises ConfigError, fields named."""
    family = find_family(config.get("model_type"))
    parsed = family.read_config(config)
    facts = family.facts(parsed)
    return ModelSpec(
        family=family,
        config=parsed,
        facts=facts,
        states=family.states(parsed),
    )


def with_attention(spec: ModelSpec, text: str, page_tokens: int) -> ModelSpec:
    """Returns a model whose layers read what `text` says, as `--attention` has it, from pages of
    `page_tokens`. Raises UsageError for what does not fit the model or the pages.
    """
    patterns = patterns_of(parse_attention(text), spec.states)
    check_pages(patterns, page_tokens)
    pairs = zip(spec.states, patterns, strict=True)
    states = tuple(with_pattern(state, pattern, page_tokens) for state, pattern in pairs)
    return replace(spec, states=states, patterns=patterns)
