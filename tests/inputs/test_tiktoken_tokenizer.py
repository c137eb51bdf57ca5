"""Kimi K3's tokenizer gives the ids of the reference, keeps control tokens apart, and says what is
wrong with a damaged file."""

import base64
import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import ConfigError, RequestError
from firstlight.inputs.forced_cuts import forced_cuts
from firstlight.inputs.tiktoken_tokenizer import TiktokenTokenizer
from firstlight.inputs.tokenizer import load_tokenizer
from k3_text import CHECKPOINT, k3_cases, k3_tokenizer

EXPECTED = k3_cases("tokenizer")
OPEN, CLOSE, SEP = 387, 388, 389
some_text = st.text() | st.lists(
    st.sampled_from(["<|open|>", "<|sep|>", "[BOS]", " ", "x", "\u4f60", "'LL", "\r\n", "12345"])
).map("".join)


@pytest.mark.parametrize("case", EXPECTED["texts"], ids=lambda case: ascii(case["text"][:20]))
def test_texts_have_the_ids_of_the_reference(case: dict[str, Any]) -> None:
    tokenizer = k3_tokenizer()
    assert tokenizer.encode_plain(case["text"]) == case["ids"]
    assert tokenizer.encode(case["text"], add_special=True) == case["ids_specials_on"]
    assert tokenizer.decode(case["ids"], skip_special=False) == case["text"]


@pytest.mark.parametrize("case", EXPECTED["long"], ids=lambda case: ascii(case["unit"]))
def test_long_texts_are_cut_where_the_reference_cuts(case: dict[str, Any]) -> None:
    text = case["prefix"] + case["unit"] * case["count"] + case["suffix"]
    ids = k3_tokenizer().encode_plain(text)
    assert len(ids) == case["n_ids"]
    digest = hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()
    assert digest == case["sha256_le32"]


def test_long_runs_are_cut_and_the_ranges_tile_the_text() -> None:
    text = "a" * 25_001 + " " * 60_000 + "b c" * 200_000
    cuts = list(forced_cuts(text))
    assert [start for start, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == len(text)
    assert {25_000, 50_001, 75_001, 400_000} <= {end for _, end in cuts}
    assert list(forced_cuts("")) == []


def test_vocabulary_and_named_tokens_are_those_of_the_files() -> None:
    tokenizer = k3_tokenizer()
    assert tokenizer.vocab_size == EXPECTED["vocab_size"] == EXPECTED["base_ranks"] + 256
    assert tokenizer.bos_id == 384 and tokenizer.eos_ids == (386, 385)
    assert tokenizer.added_tokens["<|reserved_token_500|>"] == 500
    assert len(tokenizer.controls) == 256
    assert not {OPEN, CLOSE, SEP} & tokenizer.special_ids
    assert tokenizer.token_bytes(OPEN) == b"<|open|>" and tokenizer.token_bytes(10_000) == b""


def test_markup_survives_where_special_tokens_are_skipped() -> None:
    ids = [384, OPEN, *k3_tokenizer().encode_plain("think"), SEP, 386, 500]
    assert k3_tokenizer().decode(ids, skip_special=True) == "<|open|>think<|sep|>"


@given(some_text)
def test_plain_text_never_becomes_a_control_token_and_comes_back(text: str) -> None:
    ids = k3_tokenizer().encode_plain(text)
    assert all(token_id < 384 for token_id in ids)
    assert k3_tokenizer().decode(ids, skip_special=True) == text


@given(some_text)
def test_a_text_with_controls_is_its_plain_pieces_and_the_controls(text: str) -> None:
    tokenizer = k3_tokenizer()
    parts: list[str | int] = []
    end = 0
    for span in tokenizer.find_controls(text):
        assert tokenizer.added_tokens[text[span.start : span.end]] == span.token_id
        parts += [text[end : span.start], span.token_id]
        end = span.end
    assert tokenizer.encode_parts([*parts, text[end:]]) == tokenizer.encode(text, add_special=True)


def test_each_part_is_encoded_on_its_own() -> None:
    tokenizer = k3_tokenizer()
    joined = tokenizer.encode_plain("thinking")
    apart = tokenizer.encode_parts(["thin", "king"])
    assert apart == tokenizer.encode_plain("thin") + tokenizer.encode_plain("king") != joined


def test_a_stream_holds_unfinished_characters_back() -> None:
    ids = k3_tokenizer().encode_plain("\u6d4b!")
    stream = k3_tokenizer().stream()
    assert [stream.push(token_id) for token_id in ids] == ["", "", "\u6d4b", "!"]
    assert stream.push(ids[0]) == "" and stream.finish() == "\ufffd"


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        k3_tokenizer().encode_plain("a\ud800")


def test_exported_files_load_as_the_same_tokenizer(tmp_path: Path) -> None:
    k3_tokenizer().export_hf(tmp_path)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, TiktokenTokenizer)
    assert dict(again.added_tokens) == dict(k3_tokenizer().added_tokens)
    assert again.encode_plain("again") == k3_tokenizer().encode_plain("again")


def damaged(tmp_path: Path, model: bytes | None = None, **config: Any) -> Path:
    """A copy of the tokenizer's files with another vocabulary or other settings."""
    given = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**given, **config}))
    shutil.copyfile(CHECKPOINT / "tiktoken.model", tmp_path / "tiktoken.model")
    if model is not None:
        (tmp_path / "tiktoken.model").write_bytes(model)
    return tmp_path


ENTRY = {"content": "[BOS]", "special": True}


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (b"IQ== 0\nIg== 2\n", {}, "tiktoken.model, line 2: rank 2 is out of order"),
        (b"IQ== 0\n???\n", {}, "tiktoken.model, line 2: not a base64 text"),
        (base64.b64encode(b"a") + b" 0\n", {}, "no token for the bytes"),
        (None, {"added_tokens_decoder": {"3": ENTRY}}, r"added_tokens_decoder\['3'\]"),
        (None, {"added_tokens_decoder": {"390": ENTRY, "391": ENTRY}}, "the same text"),
        (None, {"tokenizer_class": "OtherTokenizer"}, "TikTokenTokenizer"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, model: bytes | None, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(damaged(tmp_path, model, **config))
