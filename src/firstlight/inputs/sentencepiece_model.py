"""Owns how a sentencepiece model file (tokenizer.model) becomes a tokenizer definition.
It knows nothing of GGUF files or of how text is encoded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstlight.errors import ConfigError, EnvironmentProblem
from firstlight.inputs.scored_pieces import ScoredPieces, definition_of

_UNIGRAM, _BPE = 1, 2


def sentencepiece_definition(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads `path` into the content of a tokenizer.json, as Llama and Mistral use such a model.

    `config` is the folder's tokenizer_config: `legacy: true` puts the prefix space before every
    stretch of text between special tokens, otherwise only the start of the text gets one.
    Raises ConfigError when the file is no sentencepiece model of kind BPE or unigram.
    """
    proto = _parse(path)
    kind = proto.trainer_spec.model_type
    if kind not in (_UNIGRAM, _BPE):
        raise ConfigError(f"{path}: sentencepiece model of kind {kind}; only BPE and unigram work")
    return definition_of(
        ScoredPieces(
            pieces=tuple(piece.piece for piece in proto.pieces),
            scores=tuple(piece.score for piece in proto.pieces),
            kinds=tuple(piece.type for piece in proto.pieces),
            prefix=_prefix(proto, config),
            unigram=kind == _UNIGRAM,
            charsmap=proto.normalizer_spec.precompiled_charsmap,
            collapse_spaces=proto.normalizer_spec.remove_extra_whitespaces,
        )
    )


def _prefix(proto: Any, config: Mapping[str, Any]) -> str:
    if not config.get("add_prefix_space", proto.normalizer_spec.add_dummy_prefix):
        return "never"
    return "always" if config.get("legacy") else "first"


def _parse(path: Path) -> Any:
    try:
        from sentencepiece import sentencepiece_model_pb2 as schema
    except ImportError as error:
        raise EnvironmentProblem(
            f"{path}: reading a sentencepiece model needs the packages sentencepiece and protobuf "
            f"({error}); install them, or put a tokenizer.json beside the weights"
        ) from error
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    proto: Any = schema.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(path.read_bytes())
    except (DecodeError, OSError) as error:
        raise ConfigError(f"{path}: not a readable sentencepiece model: {error}") from error
    if not proto.pieces:
        raise ConfigError(f"{path}: a sentencepiece model without pieces; the file is damaged")
    return proto
