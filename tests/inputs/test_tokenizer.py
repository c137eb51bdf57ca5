"""Tokenizers read from every kind of file agree with the libraries that made them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gguf
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from firstlight.errors import ConfigError, RequestError
from firstlight.inputs.gguf_pre_tokenizers import pre_tokenizer_named
from firstlight.inputs.tokenizer import Tokenizer, load_tokenizer

SAMPLE = "Don't  12345 stop, h\u00e9llo \U0001f642\n\n\tdef f(x): return x\u00b2 \u4f60\u597d  "
CONTROL_TEXT = "a<|im_end|>b</s>c<|eot_id|>[INST]<|endoftext|><think>"


def write_gguf(path: Path, fields: dict[str, Any]) -> Path:
    """A GGUF file of metadata only."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.{name}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.{name}", value)
        else:
            writer.add_array(f"tokenizer.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_fields(backend: Backend, pre: str) -> dict[str, Any]:
    """The GGUF metadata of a tokenizers BPE."""
    model = json.loads(backend.to_str())
    tokens = [token for token, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]
    special = {entry["content"]: entry["special"] for entry in model["added_tokens"]}
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [3 if special.get(t) else 4 if t in special else 1 for t in tokens],
        "ggml.merges": [" ".join(pair) for pair in model["model"]["merges"]],
        "ggml.eos_token_id": backend.token_to_id("<|im_end|>"),
    }


def sentencepiece_fields(model: Path) -> dict[str, Any]:
    """The GGUF metadata of a sentencepiece model."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = range(pieces.vocab_size())

    def kind(i: int) -> int:
        checks = (pieces.is_unknown, pieces.is_control, pieces.is_byte)
        found = [value for check, value in zip(checks, (2, 3, 6), strict=True) if check(i)]
        return found[0] if found else 4 if pieces.id_to_piece(i) == "<mask_word>" else 1

    return {
        "ggml.model": "llama",
        "ggml.tokens": [pieces.id_to_piece(i) for i in ids],
        "ggml.scores": [float(pieces.get_score(i)) for i in ids],
        "ggml.token_type": [kind(i) for i in ids],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    }


def test_smollm2_splits_digits_and_round_trips(smollm2: Tokenizer) -> None:
    assert smollm2.encode("12345  67", add_special=True) == [33, 34, 35, 36, 37, 256, 38, 39]
    ids = smollm2.encode(SAMPLE, add_special=True)
    assert smollm2.decode(ids, skip_special=True) == SAMPLE
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.vocab_size) == (1, (2,), 49152)
    assert smollm2.specials["<|im_end|>"] == 2


def test_smollm2_exported_as_hf_files_encodes_the_same(smollm2: Tokenizer, tmp_path: Path) -> None:
    smollm2.export_hf(tmp_path)
    again = load_tokenizer(tmp_path)
    for text in (SAMPLE, CONTROL_TEXT, *topics.values()):
        assert again.encode(text, add_special=True) == smollm2.encode(text, add_special=True)
    assert again.chat_templates == smollm2.chat_templates
    assert (again.bos_id, again.eos_ids) == (1, (2,))


def test_exported_files_load_in_transformers(smollm2: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    smollm2.export_hf(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert reference.encode(SAMPLE) == smollm2.encode(SAMPLE, add_special=True)
    assert reference.chat_template == smollm2.chat_templates["default"]


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2", "qwen2"])
def test_byte_level_gguf_encodes_as_its_pre_tokenizer_says(
    byte_level: Backend, tmp_path: Path, pre: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", {**byte_level_fields(byte_level, pre)})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.origin == path
    expected = Backend.from_str(byte_level.to_str())
    splits = json.dumps(pre_tokenizer_named(pre, "").definition())
    definition = json.loads(byte_level.to_str()) | {"pre_tokenizer": json.loads(splits)}
    definition["model"]["ignore_merges"] = pre == "llama-bpe"
    expected = Backend.from_str(json.dumps(definition))
    ids = expected.encode(SAMPLE + CONTROL_TEXT).ids
    assert tokenizer.encode(SAMPLE + CONTROL_TEXT, add_special=False) == ids


def pieces_of(pre: str, text: str) -> list[str]:
    """The words a pre-tokeniser cuts ASCII text into."""
    built = Backend.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": pre_tokenizer_named(pre, "").definition(),
                "model": {"type": "BPE", "vocab": {}, "merges": []},
            }
        )
    )
    assert isinstance(built.pre_tokenizer, pre_tokenizers.Sequence)
    return [word.replace("\u0120", " ") for word, _ in built.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", " OK", "/", " "]),
        ("gpt-2", ["it", "'s", " 1234", " OK", "/", " "]),
        ("llama-bpe", ["it", "'s", " ", "123", "4", " OK", "/", " "]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", " OK", "/", " "]),
        ("tekken", ["it", "'s", " ", "1", "2", "3", "4", " OK", "/", " "]),
        ("gpt-4o", ["it's", " ", "123", "4", " OK", "/", " "]),
        ("deepseek-v3", ["it", "'s", " ", "123", "4", " OK", "/", " "]),
        ("default", ["it", "'", "s", " ", "123", "4", " OK", "/", " "]),
    ],
)
def test_pre_tokenizers_cut_words_as_named(pre: str, expected: list[str]) -> None:
    assert pieces_of(pre, "it's 1234 OK/ ") == expected


def test_unknown_pre_tokenizer_is_refused_by_name(byte_level: Backend, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", byte_level_fields(byte_level, "martian"))
    with pytest.raises(ConfigError, match=r"m\.gguf.*'martian'.*smollm"):
        load_tokenizer(path)


@pytest.mark.parametrize("source", ["tokenizer.model", "gguf"])
def test_sentencepiece_vocabularies_encode_as_the_library(
    sentencepiece_file: Path, tmp_path: Path, source: str
) -> None:
    if source == "gguf":
        write_gguf(tmp_path / "m.gguf", sentencepiece_fields(sentencepiece_file))
    else:
        (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file.read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    for text in (SAMPLE, "x <mask_word> <s> x", "lead", *sorted(topics.values())[30:45]):
        expected = library.encode(text)
        assert tokenizer.encode_plain(text) == expected
        assert tokenizer.decode(expected, skip_special=True) == text
    assert tokenizer.encode("ab", add_special=True)[0] == tokenizer.bos_id == 1


def test_sentencepiece_ids_equal_transformers(sentencepiece_file: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file.read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    reference = transformers.LlamaTokenizer.from_pretrained(tmp_path)
    for text in ("Hello</s> world", " a  b<s>c", "<mask_word> x", SAMPLE):
        expected = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special=False) == expected


@given(st.lists(st.sampled_from([*CONTROL_TEXT, "<|im_end|>", "</s>", "<|user|>", " ", "\n"])))
@settings(max_examples=60, deadline=None)
def test_plain_text_never_becomes_a_control_token(smollm2: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    ids = smollm2.encode_plain(text)
    assert not set(ids) & set(smollm2.controls.values())
    assert smollm2.decode(ids, skip_special=False) == text


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_plain_text_is_ordinary_text_where_no_control_string_stands(
    family: Callable[[str], Path], sentencepiece_file: Path, kind: str
) -> None:
    folder = family("chatml") if kind == "byte_level" else sentencepiece_file.parent
    tokenizer = load_tokenizer(folder)
    for text in sorted(topics.values())[:10]:
        assert tokenizer.encode_plain(text) == tokenizer.encode(text, add_special=False)
    ids = tokenizer.encode_plain("x</s><s><unk>" + CONTROL_TEXT)
    assert not set(ids) & set(tokenizer.controls.values())


def test_added_words_that_are_not_special_stay_words(family: Callable[[str], Path]) -> None:
    tokenizer = load_tokenizer(family("chatml"))
    table = tokenizer.added_tokens["<table>"]
    assert tokenizer.encode_plain("a<table>b")[1] == table
    assert "<table>" in tokenizer.decode([table], skip_special=True)
    assert table not in tokenizer.with_controls(["<table>"]).encode_plain("a<table>b")


def test_encoded_parts_equal_the_text_they_spell(sentencepiece_file: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_file.parent)
    spelled = tokenizer.encode("<s>ab</s> c", add_special=False)
    assert tokenizer.encode_parts([1, "ab", 2, " c"]) == spelled


@given(st.lists(st.integers(min_value=0, max_value=1230), max_size=30))
@settings(max_examples=100, deadline=None)
def test_byte_level_decoding_equals_the_library(byte_level_model: Any, ids: list[int]) -> None:
    tokenizer, backend = byte_level_model
    for skip in (True, False):
        expected = backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special=skip) == expected


@pytest.fixture(scope="module")
def byte_level_model(
    family: Callable[[str], Path], byte_level: Backend
) -> tuple[Tokenizer, Backend]:
    return load_tokenizer(family("chatml")), byte_level


def test_stream_gives_whole_characters_only(smollm2: Tokenizer) -> None:
    text = "na\u00efve \U0001f469\u200d\U0001f680 \u4f60\u597d"
    stream = smollm2.stream()
    pieces = [stream.push(i) for i in smollm2.encode_plain(text)]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert stream.finish() == ""


def test_stream_shows_a_broken_character_at_the_end_only(smollm2: Tokenizer) -> None:
    stream = smollm2.stream()
    first, *_ = smollm2.encode_plain("\u4f60")
    assert stream.push(first) == ""
    assert stream.finish() == "\ufffd"


def test_token_bytes_join_to_the_text(smollm2: Tokenizer, sentencepiece_file: Path) -> None:
    text = " caf\u00e9 \U0001f642"
    for tokenizer in (smollm2, load_tokenizer(sentencepiece_file.parent)):
        ids: Sequence[int] = tokenizer.encode_plain(text)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().lstrip() == text.lstrip()
    assert smollm2.token_bytes(10**6) == b"" and smollm2.token_bytes(-1) == b""


def test_half_a_surrogate_pair_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        smollm2.encode("\ud800", add_special=True)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b'{"added_tokens": [], "model": {"type": "Nope"}}'),
        ("tokenizer.model", b"\xff\xff\xff"),
        ("m.gguf", b"GGUF"),
        ("other.txt", b""),
    ],
)
def test_damaged_or_missing_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_add_bos_flag_of_the_config_decides(byte_level: Backend, tmp_path: Path) -> None:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<|begin_of_text|>"}, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("x", add_special=True)[0] == tokenizer.bos_id
    assert tokenizer.encode("x", add_special=False)[0] != tokenizer.bos_id
