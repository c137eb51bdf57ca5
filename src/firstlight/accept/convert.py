"""Owns a conversion as a user wants it: the store, its tokenizer files and its known answers in one
go.
"""

from collections.abc import Sequence
from pathlib import Path

from firstlight.accept.known_texts import KNOWN_TEXTS, KNOWN_TOKENS
from firstlight.adapt.known_answers import AnswerRecorder
from firstlight.adapt.shard import ShardOptions, ShardReport, shard
from firstlight.checkpoint.progress import Progress, silent
from firstlight.errors import FirstlightError
from firstlight.inputs.tokenizer import Tokenizer, load_tokenizer
from firstlight.models.spec import ModelSpec
from firstlight.runner.model_path import read_spec


def convert(
    source: Path,
    target: Path,
    *,
    dtype: str = "keep",
    budget: float = 0.0,
    sample: str = "",
    progress: Progress = silent,
) -> ShardReport:
    """Makes the store of a checkpoint, known answers included, or finishes one begun at `target`.

    A `budget` keeps the layers that quantising hurts most, measured on the `sample` text or else
    on the known texts.

    Raises what `shard` raises; nothing is written when the source is not whole.
    """
    spec = read_spec(source)
    tokenizer = _find_tokenizer(source)
    samples = known_samples(tokenizer, spec)
    recorder = AnswerRecorder(spec, samples)
    if sample and tokenizer is not None:
        samples = {"sample": tokenizer.encode_plain(sample)[: spec.context_length]}

    def export_tokenizer(gguf: Path, folder: Path) -> None:
        (tokenizer or load_tokenizer(gguf)).export_hf(folder)

    options = ShardOptions(
        dtype=dtype,
        budget=budget,
        samples=samples,
        hook=recorder,
        export_tokenizer=export_tokenizer,
        progress=progress,
    )
    return shard(source, target, options)


def known_samples(tokenizer: Tokenizer | None, spec: ModelSpec) -> dict[str, Sequence[int]]:
    """Returns token ids of the known texts; of counted ids where the model has no tokenizer."""
    longest = min(KNOWN_TOKENS, spec.context_length - 1)
    if tokenizer is None:
        step = max(1, spec.vocab_size // (longest + 1))
        return {"counted": [i * step % spec.vocab_size for i in range(longest)]}
    ids = {name: tokenizer.encode_plain(text) for name, text in KNOWN_TEXTS.items()}
    return {
        name: [token for token in tokens if token < spec.vocab_size][:longest]
        for name, tokens in ids.items()
    }


def _find_tokenizer(source: Path) -> Tokenizer | None:
    try:
        return load_tokenizer(source)
    except FirstlightError:
        return None  # a model without text is still converted, with counted tokens
