"""Owns the reading of a config so that every field is used or refused by name; knows no model."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from firstlight.errors import ConfigError

Value = TypeVar("Value", int, float, bool, str, list, dict)  # type: ignore[type-arg]

_REQUIRED: Any = object()

# Fields of any Hugging Face config that say nothing about what the model computes at inference.
BOOKKEEPING = (
    "architectures", "model_type", "transformers_version", "_name_or_path", "_model_name_or_path",
    "torch_dtype", "dtype", "use_cache", "initializer_range", "attention_dropout", "hidden_dropout",
    "return_dict", "output_attentions", "output_hidden_states", "auto_map", "_attn_implementation",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "is_llama_config",
    "_attn_implementation_autoset", "id2label", "label2id", "problem_type",
    "chunk_size_feed_forward", "is_encoder_decoder", "rope_interleaved",
)  # fmt: skip

# Fields of generation and of encoder-decoders that transformers 4 wrote into every config.
GENERATION_BOOKKEEPING = (
    "add_cross_attention", "bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "is_decoder", "length_penalty", "max_length",
    "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_scores", "prefix", "pruned_heads", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p",
    "torchscript", "typical_p", "use_bfloat16",
)  # fmt: skip


class ConfigReader:
    """Hands out fields of one config and remembers which were asked for.

    `where` is shown in every error: the file, and the section when it is nested.
    """

    def __init__(self, fields: Mapping[str, Any], where: str = "config.json") -> None:
        self._fields = fields
        self._where = where
        self._used: set[str] = set()

    def take(self, name: str, kind: type[Value], default: Any = _REQUIRED) -> Value:
        """Returns a field checked against its type; a missing or null field gives the default.

        Raises ConfigError when a required field is missing or the type is wrong.
        """
        self._used.add(name)
        value = self._fields.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(f"{self._where}: field {name!r} is missing")
            return default  # type: ignore[no-any-return]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(
                f"{self._where}: field {name!r} must be {kind.__name__}, got {value!r}"
            )
        return value

    def positive(self, name: str, default: Any = _REQUIRED) -> int:
        """Returns an integer field that must be at least 1."""
        value = self.take(name, int, default)
        if value < 1:
            raise ConfigError(f"{self._where}: field {name!r} must be at least 1, got {value}")
        return value

    def has(self, name: str) -> bool:
        """Says whether the field is present and not null."""
        return self._fields.get(name) is not None

    def names(self, name: str) -> bool:
        """Says whether the field is present, even if null."""
        return name in self._fields

    def section(self, name: str) -> "ConfigReader":
        """Returns a reader of a nested object. Raises ConfigError when it is missing."""
        return ConfigReader(self.take(name, dict), f"{self._where}, {name}")

    def refuse(self, name: str, reason: str) -> ConfigError:
        """Returns the error that names a field, its value and why it cannot be used."""
        return ConfigError(f"{self._where}: {name} = {self._fields.get(name)!r}: {reason}")

    def must_equal(self, name: str, allowed: Iterable[Any], default: Any) -> Any:
        """Returns the field if it is one of the values this family computes.

        Raises ConfigError naming the field and the values that are supported.
        """
        self._used.add(name)
        value = self._fields.get(name, default)
        value = default if value is None else value
        choices = list(allowed)
        if value not in choices:
            raise ConfigError(
                f"{self._where}: {name} = {value!r} is not supported; this family computes "
                + " or ".join(repr(c) for c in choices)
            )
        return value

    def ignore(self, names: Iterable[str]) -> None:
        """Marks fields that do not change what is computed."""
        self._used.update(names)

    def finish(self) -> None:
        """Raises ConfigError listing every field nobody asked for."""
        unknown = sorted(set(self._fields) - self._used)
        if unknown:
            listed = ", ".join(f"{n} = {self._fields[n]!r}" for n in unknown)
            raise ConfigError(
                f"{self._where}: fields this model family does not know, so the result could be "
                f"wrong: {listed}"
            )
