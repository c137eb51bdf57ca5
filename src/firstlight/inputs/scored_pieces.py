"""Owns how a sentencepiece vocabulary (pieces, scores, kinds) becomes a tokenizer definition.
It knows nothing of the file the vocabulary was read from.
"""

import base64
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

SPACE_MARK = "\u2581"


class PieceKind(IntEnum):
    """What a piece is; sentencepiece models and GGUF files number the kinds alike."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ScoredPieces(NamedTuple):
    """A sentencepiece vocabulary; index in the tuples is the token id.

    `prefix` is when a space is put before text: "first" (start of the text only), "always" (every
    stretch between special tokens) or "never".
    """

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    kinds: tuple[int, ...]
    prefix: str
    unigram: bool = False
    charsmap: bytes = b""
    collapse_spaces: bool = False


def added_tokens(pieces: Sequence[str], kinds: Sequence[int]) -> list[dict[str, Any]]:
    """Entries of `added_tokens`: control and unknown pieces special, user-defined ones not."""
    special = (PieceKind.UNKNOWN, PieceKind.CONTROL)
    return [
        added_token(index, piece, special=kind in special)
        for index, (piece, kind) in enumerate(zip(pieces, kinds, strict=True))
        if kind in (*special, PieceKind.USER_DEFINED)
    ]


def added_token(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    """One entry of `added_tokens`, matched as written and keeping the spaces around it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **flags, "special": special}


def definition_of(vocabulary: ScoredPieces) -> dict[str, Any]:
    """The vocabulary as the content of a tokenizer.json, without a post-processor."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(vocabulary.pieces, vocabulary.kinds),
        "normalizer": _normalizer(vocabulary),
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": SPACE_MARK,
            "prepend_scheme": vocabulary.prefix,
            "split": vocabulary.unigram,
        },
        "post_processor": None,
        "decoder": _decoder(vocabulary.prefix),
        "model": _unigram(vocabulary) if vocabulary.unigram else _merging(vocabulary),
    }


def _normalizer(vocabulary: ScoredPieces) -> dict[str, Any] | None:
    steps: list[dict[str, Any]] = []
    if vocabulary.charsmap:
        text = base64.b64encode(vocabulary.charsmap).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": text})
    if vocabulary.collapse_spaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    return {"type": "Sequence", "normalizers": steps} if steps else None


def _decoder(prefix: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix != "never":
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _unknown_index(vocabulary: ScoredPieces) -> int:
    return next((i for i, k in enumerate(vocabulary.kinds) if k == PieceKind.UNKNOWN), 0)


def _unigram(vocabulary: ScoredPieces) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": _unknown_index(vocabulary),
        "vocab": [list(entry) for entry in zip(vocabulary.pieces, vocabulary.scores, strict=True)],
        "byte_fallback": PieceKind.BYTE in vocabulary.kinds,
    }


def _merging(vocabulary: ScoredPieces) -> dict[str, Any]:
    ids = {piece: index for index, piece in enumerate(vocabulary.pieces)}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": vocabulary.pieces[_unknown_index(vocabulary)],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": ids,
        "merges": _merges(vocabulary, ids),
    }


def _merges(vocabulary: ScoredPieces, ids: Mapping[str, int]) -> list[list[str]]:
    """Every way a piece splits into two pieces, best score first, longer left half first.

    sentencepiece merges the neighbours whose joined piece scores best, so this order of pairs
    makes the same choices.
    """
    mergeable = {
        piece
        for piece, kind in zip(vocabulary.pieces, vocabulary.kinds, strict=True)
        if kind in (PieceKind.NORMAL, PieceKind.UNUSED)
    }
    ranked = [
        (-vocabulary.scores[ids[piece]], -cut, piece)
        for piece in mergeable
        for cut in range(1, len(piece))
        if piece[:cut] in mergeable and piece[cut:] in mergeable
    ]
    ranked.sort()
    return [[piece[:-cut], piece[-cut:]] for _, cut, piece in ranked]
